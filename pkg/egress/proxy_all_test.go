//go:build all

package egress

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/conntrack"
)

// TestManyByName: of 100,000 connections by a name none fails, none is left in the table of
// conntrack when it has had its seconds, and the child that passes them on does not grow. 32
// guests share them, since one may open 200 a second. It takes one or two minutes on two
// cores.
func TestManyByName(t *testing.T) {
	const guests, each, parallel = 32, 20_000, 8
	w := newWorld(t)
	w.sites()
	dir := t.TempDir()
	e := w.lasting(dir)
	var ids []string
	for i := range guests {
		ids = append(ids, w.named(e, i, rules(t, "rules", byName...)))
	}
	files, err := filepath.Glob(filepath.Join(dir, "*"+endOfFlows))
	if err != nil || len(files) != 1 {
		t.Fatalf("%q, %v", files, err)
	}
	child := w.headOf(files[0]).Pid
	before := 0
	for round := range 5 {
		var all sync.WaitGroup
		var failed atomic.Int64
		for k := range parallel {
			all.Go(func() {
				for i := k; i < each; i += parallel {
					if err := w.fetch(ids[i%guests]); err != nil && failed.Add(1) <= 3 {
						t.Errorf("connection %d: %v", round*each+i, err)
					}
				}
			})
		}
		all.Wait()
		if n := failed.Load(); n > 0 {
			t.Fatalf("%d of %d connections failed in round %d", n, each, round)
		}
		entries, most := w.toSite(e)
		t.Logf("round %d: the child has %d KiB, the table %d entries, a guest %d at most", round, resident(t, child), entries, most)
		if most > e.cfg.MaxFlows {
			t.Errorf("a guest has %d entries", most)
		}
		if round == 0 { // its buffers are made
			before = resident(t, child)
		}
	}
	const grows = 32 << 10 // KiB: between two runs of its collector
	if now := resident(t, child); now > before+grows {
		t.Errorf("the child has grown from %d to %d KiB", before, now)
	}
	w.noneProxied(e)
	for end := time.Now().Add(patient); ; time.Sleep(10 * time.Millisecond) { // the kernel tells nobody of an entry that goes
		n, _ := w.toSite(e)
		if n == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d entries are left", n)
		}
	}
}

// fetch makes one connection to the site, with one request. On a busy host a SYN may be sent
// twice.
func (w *world) fetch(id string) (err error) {
	var c net.Conn
	w.in(w.guests[id], func() { c, err = net.DialTimeout("tcp4", site+":80", patient) })
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in the read
	status, body, err := ask(c, bufio.NewReader(c), "allowed.test")
	if err == nil && (status != 200 || body != "allowed.test") {
		err = fmt.Errorf("%d %q", status, body)
	}
	return err
}

// toSite counts the flows by name in the table of conntrack, both sides, and those of the
// guest that has most.
func (w *world) toSite(e *Engine) (n, most int) {
	w.t.Helper()
	var by map[netip.Addr]int
	to := netip.MustParseAddr(site)
	if err := conntrack.Each(func() { n, by = 0, map[netip.Addr]int{} }, func(f conntrack.Entry) {
		if f.Dst == to {
			n++
			by[f.Src]++
		}
	}); err != nil {
		w.t.Fatal(err)
	}
	for a, k := range by {
		if inst.Pool().Contains(a) {
			most = max(most, k)
		}
	}
	return n, most
}

// resident is the memory of a process that is no file's, in KiB: proc_pid_status(5).
func resident(t *testing.T, pid int) (kib int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "RssAnon:")
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		t.Fatal(err)
	}
	return kib
}
