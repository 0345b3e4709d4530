package names

import (
	"crypto/tls"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// certificate makes one for a name, and a file with its authority.
func certificate(t *testing.T, name string) (tls.Certificate, *os.File) {
	t.Helper()
	a := hosttest.NewAuthority("roots")
	path := filepath.Join(t.TempDir(), "roots.pem")
	if err := os.WriteFile(path, a.PEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return a.Issue(name, time.Now().Add(time.Hour)), f
}

// TestTLS: a server is asked by a connection that is used again, and not at all if its
// certificate has another name.
func TestTLS(t *testing.T) {
	cert, roots := certificate(t, "dns.test")
	l, err := tls.Listen("tcp4", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	h := zone(t, map[string][]string{"one.test.": {"one.test. 0 IN A 203.0.113.1"}}) // not to be cached
	go (&dns.Server{Listener: l, Handler: h}).ActivateAndServe()                     //nolint:errcheck // ends with the test
	to := netip.MustParseAddrPort(l.Addr().String())
	d := newDaemon(t, roots, Config{Upstreams: []Upstream{{TLS: "dns.test"}}}, to)
	for range 5 {
		if a := d.ask(question("one.test.", dns.TypeA), false); datas(a) != "203.0.113.1" {
			t.Error(a)
		}
	}
	d.mu.Lock()
	if d.sockets != 1 {
		t.Errorf("%d connections", d.sockets)
	}
	d.mu.Unlock()
	// The server closed what was kept.
	p := d.child.setup.Load().tls[0]
	p.mu.Lock()
	p.idle[0].conn.NetConn().Close()
	p.mu.Unlock()
	if a := d.ask(question("one.test.", dns.TypeA), false); datas(a) != "203.0.113.1" {
		t.Error(a)
	}
	_, roots = certificate(t, "dns.test") // of somebody else
	for _, d := range []*daemon{
		newDaemon(t, roots, Config{Upstreams: []Upstream{{TLS: "dns.test"}}}, to),
		newDaemon(t, nil, Config{Upstreams: []Upstream{{TLS: "dns.test"}}}, to),
	} {
		if a := d.ask(question("one.test.", dns.TypeA), false); a.Rcode != dns.RcodeServerFailure {
			t.Error(a)
		}
	}
}
