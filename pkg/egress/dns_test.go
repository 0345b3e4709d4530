package egress

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

func TestDNS(t *testing.T) {
	w := newWorld(t)
	asked := w.upstream()
	e := w.open()
	open := w.sandbox(e, 0, rules(t, "open", "10.98.0.0/16:80"))
	ruled := w.sandbox(e, 1, rules(t, "rules", "203.0.113.0/24"))
	none := w.sandbox(e, 2, rules(t, "none"))
	for _, c := range []struct {
		id, network, name string
		typ               uint16
		rcode             int
		want              string // data of the answers
	}{
		{open, "udp", "one.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.1"},
		{open, "tcp", "one.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.1"},
		{open, "udp", "one.test.", dns.TypeAAAA, dns.RcodeSuccess, ""},
		{open, "udp", "one.test.", dns.TypeHTTPS, dns.RcodeSuccess, ""},
		{open, "udp", "one.test.", dns.TypeANY, dns.RcodeRefused, ""},
		{open, "udp", "absent.test.", dns.TypeA, dns.RcodeNameError, ""},
		{open, "udp", "silent.test.", dns.TypeA, dns.RcodeServerFailure, ""},
		{open, "tcp", "many.test.", dns.TypeA, dns.RcodeSuccess, strings.TrimSpace(strings.Repeat("203.0.113.1 ", 100))},
		// Rebinding: everything of the host and its networks goes, but what a rule names.
		{open, "udp", "rebind.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.2 10.98.0.1"},
		{ruled, "udp", "one.test.", dns.TypeA, dns.RcodeRefused, ""},
		{ruled, "tcp", "one.test.", dns.TypeA, dns.RcodeRefused, ""},
		{none, "udp", "one.test.", dns.TypeA, dns.RcodeRefused, ""},
	} {
		// Whatever server it asks, one it may not reach included.
		for _, server := range []string{"8.8.8.8:53", inst.Gateway().String() + ":53", "10.99.0.1:53"} {
			limit := patient
			switch c.rcode {
			case dns.RcodeRefused:
				limit = deniedWithin
			case dns.RcodeServerFailure:
				limit = 3 * time.Second // dnsTimeout, and then it is told at once
			}
			var a *dns.Msg
			took, err := hosttest.Soonest(limit, func() (err error) {
				a, err = w.ask(c.id, c.network, server, c.name, c.typ, patient)
				return err
			})
			if err != nil {
				t.Errorf("%s %s %s @%s: %v", c.network, c.name, dns.TypeToString[c.typ], server, err)
				continue
			}
			if took > limit {
				t.Errorf("%s %s %s @%s took %v", c.network, c.name, dns.TypeToString[c.typ], server, took)
			}
			var got []string
			for _, rr := range a.Answer {
				got = append(got, strings.TrimPrefix(rr.String(), rr.Header().String()))
			}
			if a.Rcode != c.rcode || strings.Join(got, " ") != c.want {
				t.Errorf("%s %s %s @%s: %s %v; want %s %s", c.network, c.name, dns.TypeToString[c.typ], server,
					dns.RcodeToString[a.Rcode], got, dns.RcodeToString[c.rcode], c.want)
			}
			if c.name == "silent.test." {
				break // once is two seconds
			}
		}
	}
	// Too long for UDP: truncated, so that the guest comes back by TCP.
	if a, err := w.ask(open, "udp", "8.8.8.8:53", "many.test.", dns.TypeA, patient); err != nil || !a.Truncated {
		t.Errorf("100 addresses by UDP: %v, %v", a, err)
	}
	for name := range asked() {
		if strings.HasPrefix(name, "refused") {
			t.Errorf("the upstream was asked for %s", name)
		}
	}
	if _, err := w.ask(ruled, "udp", "8.8.8.8:53", "refused.test.", dns.TypeA, patient); err != nil {
		t.Error(err)
	}
	if asked()["refused.test."] {
		t.Error("a query of a sandbox without names reached the upstream")
	}
}

// TestResolverBuffers: what all sandboxes share is large, what each connection has is not.
func TestResolverBuffers(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	size := func(c any) (n int) {
		raw, err := c.(syscall.Conn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		cerr := raw.Control(func(fd uintptr) { n, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF) })
		if cerr != nil || err != nil {
			t.Fatal(cerr, err)
		}
		return n
	}
	if n := size(e.dns.servers[0].PacketConn); n < dnsBuffer {
		t.Errorf("the socket for UDP has %d bytes, want %d", n, dnsBuffer)
	}
	if n := size(e.dns.servers[1].Listener.(*budgetListener).Listener); n > 1<<20 {
		t.Errorf("each connection by TCP may have %d bytes", n)
	}
}

// TestForgedLetters: an answer by UDP counts only in the letters that were sent.
func TestForgedLetters(t *testing.T) {
	var pc net.PacketConn
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	for range 10 { // the same port of UDP may be taken
		if err != nil {
			t.Fatal(err)
		}
		if pc, err = net.ListenPacket("udp4", l.Addr().String()); err == nil {
			break
		}
		l.Close()
		l, err = net.Listen("tcp4", "127.0.0.1:0")
	}
	if pc == nil {
		t.Fatal("no port is free for both UDP and TCP")
	}
	answers := func(addr string, letters func(string) string) dns.HandlerFunc {
		return func(rw dns.ResponseWriter, q *dns.Msg) {
			m := new(dns.Msg)
			m.SetReply(q)
			m.Question[0].Name = letters(q.Question[0].Name)
			rr, err := dns.NewRR(q.Question[0].Name + " 60 IN A " + addr)
			if err != nil {
				t.Error(err)
			}
			m.Answer = []dns.RR{rr}
			rw.WriteMsg(m) //nolint:errcheck // the other side says
		}
	}
	same := func(s string) string { return s }
	swapped := func(s string) string {
		b := []byte(s)
		b[0] ^= 0x20
		return string(b)
	}
	next := make(chan dns.HandlerFunc, 1)
	udp := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(rw dns.ResponseWriter, q *dns.Msg) { (<-next)(rw, q) })}
	tcp := &dns.Server{Listener: l, Handler: answers("203.0.113.1", swapped)}
	go udp.ActivateAndServe() //nolint:errcheck // ends with the test
	go tcp.ActivateAndServe() //nolint:errcheck // likewise
	defer pc.Close()
	defer l.Close()
	for want, h := range map[string]dns.HandlerFunc{
		"203.0.113.2": answers("203.0.113.2", same),
		"203.0.113.1": answers("203.0.113.66", swapped), // that of TCP, where nobody forges
	} {
		next <- h
		a, err := ask(t.Context(), netip.MustParseAddrPort(pc.LocalAddr().String()), dns.Question{
			Name: "one.test.", Qtype: dns.TypeA,
			Qclass: dns.ClassINET,
		}, func(string, netip.AddrPort) {})
		if err != nil {
			t.Fatal(err)
		}
		if got := a.Answer[0].(*dns.A).A.String(); got != want || a.Answer[0].Header().Name != "one.test." {
			t.Errorf("answer %v, want %s", a.Answer[0], want)
		}
	}
}

// TestRefusedTCP: what is known of a connection that did not come about suffices to find
// its entry in the table of conntrack.
func TestRefusedTCP(t *testing.T) {
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	go (&dns.Server{PacketConn: pc, Handler: truncated}).ActivateAndServe() //nolint:errcheck // ends with the test
	closed := map[string]netip.AddrPort{}
	_, err = ask(t.Context(), netip.MustParseAddrPort(pc.LocalAddr().String()),
		dns.Question{Name: "one.test.", Qtype: dns.TypeA, Qclass: dns.ClassINET},
		func(network string, local netip.AddrPort) { closed[network] = local })
	if !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("%v, want that TCP is refused", err)
	}
	for _, network := range []string{"udp", "tcp"} {
		if a := closed[network]; a.Addr() != netip.MustParseAddr("127.0.0.1") || a.Port() == 0 {
			t.Errorf("%s came from %v", network, a)
		}
	}
}

// truncated answers by UDP that TCP must be asked.
var truncated = dns.HandlerFunc(func(rw dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	m.Truncated = true
	rw.WriteMsg(m) //nolint:errcheck // the other side says
})
