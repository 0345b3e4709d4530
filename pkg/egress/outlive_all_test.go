//go:build all

package egress

import (
	"crypto/tls"
	"net/netip"
	"testing"
	"time"
)

// TestOldChildrenAreFew: of the children of earlier daemons the youngest live on.
func TestOldChildrenAreFew(t *testing.T) {
	w := newWorld(t)
	w.sites()
	dir := t.TempDir()
	e := w.lasting(dir)
	all := rules(t, "rules", byName...)
	id := w.sandbox(e, 0, all)
	var open []*tls.Conn
	for range mostOld + 2 {
		e.lookup(addr(0)).leases.Add("allowed.test", []netip.Addr{netip.MustParseAddr(site)}, time.Hour, time.Now())
		c, err := w.tls(id, site+":443", "allowed.test")
		if err == nil {
			err = said(c)
		}
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(10 * patient)) //nolint:errcheck // shows in reads
		open = append(open, c)
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		e = w.lasting(dir)
		if err := e.Register(t.Context(), id, addr(0), all, nil); err != nil {
			t.Fatal(err)
		}
		if err := Recovered(e); err != nil {
			t.Fatal(err)
		}
	}
	w.children(dir, mostOld+1)
	for i, c := range open {
		if i < 2 {
			if err := said(c); err == nil {
				t.Errorf("flow %d of %d goes on", i, len(open))
			}
			continue
		}
		if err := said(c); err != nil {
			t.Errorf("flow %d of %d: %v", i, len(open), err)
		}
	}
}
