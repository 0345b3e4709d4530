package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/conntrack"
	"github.com/sandboxd/sandboxd/pkg/egress/leases"
	"github.com/sandboxd/sandboxd/pkg/egress/names"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/egress/tunnel"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// near is a resolver on loopback whose child is in this process: no kernel rules, no root. Its
// sandboxes are those of fuzzEngine and named, at 127.0.0.5.
func near(t testing.TB, h dns.HandlerFunc) (e *Engine, upstream netip.AddrPort) {
	t.Helper()
	e = fuzzEngine(t)
	e.denials = newDenials(func(Denial) {}, nil)
	var err error
	if e.table, err = conntrack.Open(); err != nil {
		t.Fatal(err)
	}
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go (&dns.Server{PacketConn: pc, Handler: h}).ActivateAndServe() //nolint:errcheck // ends with the test
	upstream = netip.MustParseAddrPort(pc.LocalAddr().String())
	r := &resolver{
		e: e, log: e.log, fixed: true, udp: -1, upstreams: []Upstream{{Addr: upstream}},
		asking: map[uint64]*asking{}, requests: map[uint32]*request{},
	}
	e.dns = r
	if err := r.listen(t.Context(), netip.MustParseAddrPort("127.0.0.1:0")); err != nil {
		t.Fatal(err)
	}
	a, b, err := child.Pair()
	if err != nil {
		t.Fatal(err)
	}
	ours, err := child.NewConn(a, names.MaxMessage, false)
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := child.NewConn(b, names.MaxMessage, true)
	if err != nil {
		t.Fatal(err)
	}
	handle, err := names.Open(theirs, r.files)
	if err != nil {
		t.Fatal(err)
	}
	var done sync.WaitGroup
	done.Go(func() { theirs.Run(handle) }) //nolint:errcheck // ends with the test
	r.begin(ours)
	done.Go(func() {
		ours.Run(func(m child.Message) { r.handle(ours, m) }) //nolint:errcheck // likewise
		r.end(ours)
	})
	r.serve()
	t.Cleanup(func() {
		ours.Close()
		done.Wait()
		r.close()       //nolint:errcheck // it has none
		e.table.Close() //nolint:errcheck // likewise
		pc.Close()
	})
	e.admitted(t, "named", "127.0.0.5", rules(t, "rules", "one.test", "alias.test", "*.wild.test", "rebind.test", "text.test:443",
		"!bad.wild.test", "!closed.test"))
	e.admitted(t, "open", "127.0.0.6", rules(t, "open", "10.98.0.0/16", "!bad.wild.test"))
	e.admitted(t, "none", "127.0.0.7", rules(t, "none"))
	return e, upstream
}

// admitted adds a sandbox without a link.
func (e *Engine) admitted(t testing.TB, id, addr string, n record.Network) *sandbox {
	t.Helper()
	p, err := policy.Compile(policy.Host{}, n)
	if err != nil {
		t.Fatal(err)
	}
	s := &sandbox{id: id, addr: netip.MustParseAddr(addr), leases: new(leases.Table)}
	s.policy.Store(p)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.byID[id], e.byAddr[s.addr] = s, s
	return s
}

// query asks from an address.
func (e *Engine) query(t testing.TB, from, network, name string, typ uint16) *dns.Msg {
	t.Helper()
	q := new(dns.Msg).SetQuestion(name, typ).SetEdns0(1232, false)
	c := dns.Client{Net: network, Timeout: patient, Dialer: &net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(from)}}}
	to := localOf(t, e.dns.udp)
	if network == "tcp" {
		c.Dialer.LocalAddr, to = &net.TCPAddr{IP: net.ParseIP(from)}, e.dns.tcp.Addr().String()
	}
	a, _, err := c.Exchange(q, to)
	if err != nil {
		t.Fatalf("%s asks for %s by %s: %v", from, name, network, err)
	}
	return a
}

func localOf(t testing.TB, fd int) string {
	t.Helper()
	a, err := localAddr(fd)
	if err != nil {
		t.Fatal(err)
	}
	return a.String()
}

// testZone has the names that the tests ask for.
func testZone(rw dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg).SetReply(q)
	for _, line := range map[string][]string{
		"one.test.":    {"A 203.0.113.1"},
		"text.test.":   {"A 203.0.113.4", `TXT "word"`},
		"rebind.test.": {"A 203.0.113.2", "A 127.0.0.1", "A 10.98.0.1", "A 192.0.2.99", "A 169.254.169.254"},
		"inside.test.": {"A 127.0.0.1"},
	}[strings.ToLower(q.Question[0].Name)] {
		if rr, err := dns.NewRR(q.Question[0].Name + " 60 IN " + line); err == nil && rr.Header().Rrtype == q.Question[0].Qtype {
			m.Answer = append(m.Answer, rr)
		}
	}
	if strings.HasSuffix(strings.ToLower(q.Question[0].Name), ".wild.test.") {
		rr, _ := dns.NewRR(q.Question[0].Name + " 60 IN A 203.0.113.3")
		m.Answer = []dns.RR{rr}
	}
	if strings.EqualFold(q.Question[0].Name, "alias.test.") {
		cname, _ := dns.NewRR(q.Question[0].Name + " 60 IN CNAME closed.test.")
		a, _ := dns.NewRR("closed.test. 60 IN A 203.0.113.5")
		m.Answer = []dns.RR{cname, a}
	}
	if strings.EqualFold(q.Question[0].Name, "fail.wild.test.") {
		m.Answer, m.Rcode = nil, dns.RcodeServerFailure
	}
	rw.WriteMsg(m) //nolint:errcheck // the other side says
}

// TestNames: what a policy says of a name decides whether it is asked for, and whatever DNS
// answers is leased to the name that was asked.
func TestNames(t *testing.T) {
	e, _ := near(t, testZone)
	const named, open, none = "127.0.0.5", "127.0.0.6", "127.0.0.7"
	for _, c := range []struct {
		from, name string
		typ        uint16
		rcode      int
		want, why  string
	}{
		{named, "one.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.1", ""},
		{named, "ONE.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.1", ""},
		{named, "one.test.", dns.TypeMX, dns.RcodeSuccess, "", ""},
		{named, "two.test.", dns.TypeA, dns.RcodeNameError, "", "refused by the network policy: no rule allows this name"},
		{named, "a.wild.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.3", ""},
		{named, "a.b.wild.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.3", ""},
		{named, "a.wild.test.", dns.TypeTXT, dns.RcodeRefused, "", "TXT needs a rule with the whole name"},
		{named, "text.test.", dns.TypeTXT, dns.RcodeSuccess, `"word"`, ""},
		{named, "a.wild.test.", dns.TypeNULL, dns.RcodeRefused, "", "DNS type NULL is not served"},
		{named, `a\.b.wild.test.`, dns.TypeA, dns.RcodeRefused, "", "not a host name"},
		{named, `\000.wild.test.`, dns.TypeA, dns.RcodeRefused, "", "not a host name"},
		{named, "rebind.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.2", ""},
		{open, "rebind.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.2 10.98.0.1", ""},
		{open, "inside.test.", dns.TypeA, dns.RcodeSuccess, "", ""},
		{open, "bad.wild.test.", dns.TypeA, dns.RcodeNameError, "", "deny bad.wild.test"},
		{open, "good.wild.test.", dns.TypeAAAA, dns.RcodeSuccess, "", ""},
		// The CNAME of an allowed name leads to a denied one: the rule that denies is about what
		// the guest says, and it said the other.
		{named, "alias.test.", dns.TypeA, dns.RcodeSuccess, "closed.test. 203.0.113.5", ""},
		{named, "closed.test.", dns.TypeA, dns.RcodeNameError, "", "deny closed.test"},
		{none, "one.test.", dns.TypeA, dns.RcodeNameError, "", "the sandbox has network mode none"},
		{"127.0.0.8", "one.test.", dns.TypeA, dns.RcodeRefused, "", "not known yet"},
	} {
		for _, network := range []string{"udp", "tcp"} {
			if c.from == "127.0.0.8" {
				break // nobody's: no answer goes there
			}
			a := e.query(t, c.from, network, c.name, c.typ)
			var got []string
			for _, rr := range a.Answer {
				got = append(got, strings.TrimPrefix(rr.String(), rr.Header().String()))
			}
			why := ""
			for _, o := range a.IsEdns0().Option {
				if ede, ok := o.(*dns.EDNS0_EDE); ok && ede.InfoCode == dns.ExtendedErrorCodeBlocked {
					why += ede.ExtraText
				}
			}
			if a.Rcode != c.rcode || strings.Join(got, " ") != c.want || !strings.Contains(why, c.why) || (why == "") != (c.why == "") {
				t.Errorf("%s, %s %s %s: %s %q %q, want %s %q %q", c.from, network, c.name, dns.TypeToString[c.typ],
					dns.RcodeToString[a.Rcode], got, why, dns.RcodeToString[c.rcode], c.want, c.why)
			}
		}
	}
	s := e.lookup(netip.MustParseAddr(named))
	for a, want := range map[string]string{
		"203.0.113.1": "[one.test]", "203.0.113.2": "[rebind.test]", "203.0.113.3": "[a.wild.test a.b.wild.test]",
		"203.0.113.5": "[alias.test]",
		"10.98.0.1":   "[]", "127.0.0.1": "[]", "192.0.2.99": "[]",
	} {
		if got := fmt.Sprint(s.leased(netip.MustParseAddr(a))); got != want {
			t.Errorf("%s is leased to %s, want %s", a, got, want)
		}
	}
	f := policy.Flow{Src: s.addr, Dst: netip.MustParseAddr("203.0.113.5"), Proto: unix.IPPROTO_TCP, Port: 443}
	for name, want := range map[string]bool{"alias.test": true, "closed.test": false} {
		if allow, why := s.policy.Load().DecideName(f, name); allow != want {
			t.Errorf("to %s at the address of both: %v, %s", name, allow, why.Text)
		}
	}
	if n := s.dns.queries.Load(); n != 0 {
		t.Errorf("%d queries are still under way", n)
	}
	var denied []string
	e.denials.mu.Lock()
	defer e.denials.mu.Unlock()
	for _, d := range e.toTell {
		denied = append(denied, d.ID+" "+d.Proto+" "+d.Name+": "+d.Rule)
	}
	if !slices.Contains(denied, "named dns two.test: default") || !slices.Contains(denied, "open dns bad.wild.test: deny bad.wild.test") {
		t.Errorf("denials: %q", denied)
	}
}

// TestPointers: the names of an address are those by which the sandbox knows it, and no server
// is asked for them.
func TestPointers(t *testing.T) {
	var asked atomic.Int32
	e, _ := near(t, func(rw dns.ResponseWriter, q *dns.Msg) {
		if q.Question[0].Qtype != dns.TypePTR {
			testZone(rw, q)
			return
		}
		asked.Add(1)
		m := new(dns.Msg).SetReply(q)
		m.Answer = []dns.RR{&dns.PTR{
			Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypePTR, Class: dns.ClassINET, Ttl: 60}, Ptr: "of.the.server.test.",
		}}
		rw.WriteMsg(m) //nolint:errcheck // the other side says
	})
	const named, open, none = "127.0.0.5", "127.0.0.6", "127.0.0.7"
	now := time.Now()
	e.lookup(netip.MustParseAddr(none)).leases.Add("one.test", []netip.Addr{netip.MustParseAddr("203.0.113.1")}, 0, now)
	want := func(from, address, names string, rcode int, questions int32) {
		t.Helper()
		for _, network := range []string{"udp", "tcp"} {
			a := e.query(t, from, network, address+".in-addr.arpa.", dns.TypePTR)
			var got []string
			for _, rr := range a.Answer {
				got = append(got, rr.(*dns.PTR).Ptr)
				if h := rr.Header(); h.Name != a.Question[0].Name || h.Ttl == 0 || h.Ttl > 60 {
					t.Errorf("%s asks for %s: %v", from, address, rr)
				}
			}
			if strings.Join(got, " ") != names || a.Rcode != rcode {
				t.Errorf("%s asks for %s by %s: %s %q, want %s %q", from, address, network, dns.RcodeToString[a.Rcode], got,
					dns.RcodeToString[rcode], names)
			}
		}
		if n := asked.Swap(0); n != questions {
			t.Errorf("%s asks for %s: the server got %d questions, want %d", from, address, n, questions)
		}
	}
	want(named, "1.113.0.203", "", dns.RcodeNameError, 0)
	want(none, "1.113.0.203", "", dns.RcodeNameError, 0) // it has a lease, of another policy
	want(open, "1.113.0.203", "of.the.server.test.", dns.RcodeSuccess, 1)
	for _, from := range []string{named, open} {
		for _, name := range []string{"one.test.", "a.wild.test.", "b.wild.test."} {
			e.query(t, from, "udp", name, dns.TypeA)
		}
		want(from, "1.113.0.203", "one.test.", dns.RcodeSuccess, 0) // also in place of the answer in the cache
		want(from, "3.113.0.203", "a.wild.test. b.wild.test.", dns.RcodeSuccess, 0)
	}
	want(open, "2.113.0.203", "of.the.server.test.", dns.RcodeSuccess, 1)
	for _, odd := range []string{"01.113.0.203", "1.1.113.0.203", "113.0.203", "x.113.0.203"} {
		want(named, odd, "", dns.RcodeNameError, 0)
	}
	many := netip.MustParseAddr("203.0.113.7")
	for i := range 3 * maxPointers {
		e.lookup(netip.MustParseAddr(named)).leases.Add(fmt.Sprintf("%d.wild.test", i), []netip.Addr{many}, 0, now)
	}
	if a := e.query(t, named, "tcp", "7.113.0.203.in-addr.arpa.", dns.TypePTR); len(a.Answer) != maxPointers {
		t.Errorf("%d names of one address, want %d", len(a.Answer), maxPointers)
	}
}

// TestResolve: the daemon gets what the sandbox would.
func TestResolve(t *testing.T) {
	e, _ := near(t, testZone)
	s := e.lookup(netip.MustParseAddr("127.0.0.5"))
	for name, want := range map[string]string{"one.test": "[203.0.113.1]", "rebind.test": "[203.0.113.2]"} {
		for range 2 {
			if got, err := e.Resolve(t.Context(), s, name); err != nil || fmt.Sprint(got) != want {
				t.Errorf("%s: %v, %v; want %s", name, got, err, want)
			}
		}
	}
	if got, err := e.Resolve(t.Context(), s, "two.test"); !errors.Is(err, errRefused) {
		t.Errorf("a name that no rule allows: %v, %v", got, err)
	}
	got, err := e.Resolve(t.Context(), s, "fail.wild.test")
	if err == nil || errors.Is(err, errRefused) || !strings.Contains(err.Error(), "SERVFAIL") {
		t.Errorf("a server that fails: %v, %v", got, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := e.Resolve(ctx, s, "one.test"); err == nil && ctx.Err() == nil {
		t.Error("it does not end with its context")
	}
	e.dns.end(nil)
	if _, err := e.Resolve(t.Context(), s, "one.test"); err == nil {
		t.Error("resolved without a child")
	}
}

// TestRates: a sandbox cannot ask without end, nor say much by the names that it asks for.
func TestRates(t *testing.T) {
	var b dnsBudget
	now := time.Now().Truncate(time.Minute) // a new minute has new bounds
	for n := range 2 * dnsBurst {
		if b.within(now) != (n < dnsBurst) {
			t.Fatalf("query %d of a burst of %d", n, dnsBurst)
		}
	}
	for n := range 2 * dnsPerSecond {
		if b.within(now.Add(time.Second)) != (n < dnsPerSecond) {
			t.Fatalf("query %d of the next second", n)
		}
	}
	e, _ := near(t, testZone)
	s := e.lookup(netip.MustParseAddr("127.0.0.5"))
	refused := 0
	for i := range 100 {
		m := names.Message{Type: dns.TypeA, Name: fmt.Sprintf("%s%d.wild.test", strings.Repeat("0123456789abcdefghij", 3), i)}
		m.Name = strings.Repeat(m.Name[:50]+".", 3) + m.Name
		if why, do := e.dns.allows(s, m, now.Add(time.Duration(i)*time.Second/100)); do != names.Forward {
			refused++
			if !strings.Contains(why, "names below *.wild.test") {
				t.Error(why)
			}
		}
	}
	if most := 100 - tunnel.MaxBits/900; refused < most/2 {
		t.Errorf("%d of 100 long names are refused", refused)
	}
}

// TestUpstreamBudget: a query that waits for servers has one place, and gives it back.
func TestUpstreamBudget(t *testing.T) {
	release := make(chan struct{})
	e, _ := near(t, func(rw dns.ResponseWriter, q *dns.Msg) {
		<-release
		testZone(rw, q)
	})
	s := e.lookup(netip.MustParseAddr("127.0.0.6"))
	var done sync.WaitGroup
	got := make(chan int, dnsInFlight+8)
	for i := range dnsInFlight + 8 {
		done.Go(func() { got <- e.query(t, "127.0.0.6", "udp", fmt.Sprintf("n%d.wild.test.", i), dns.TypeA).Rcode })
	}
	for range 8 { // only these are answered at once
		if rcode := <-got; rcode != dns.RcodeServerFailure {
			t.Errorf("answered with %s", dns.RcodeToString[rcode])
		}
	}
	if n := s.dns.queries.Load(); n != dnsInFlight {
		t.Errorf("%d queries are under way", n)
	}
	close(release)
	for range dnsInFlight {
		if rcode := <-got; rcode != dns.RcodeSuccess && rcode != dns.RcodeServerFailure { // a slow host: too late
			t.Errorf("answered with %s", dns.RcodeToString[rcode])
		}
	}
	done.Wait()
	if n := s.dns.queries.Load(); n != 0 {
		t.Errorf("%d queries are still under way", n)
	}
}

// TestConversations: a connection has as many queries as it likes, one after the other, and a
// sandbox as many connections as it may.
func TestConversations(t *testing.T) {
	e, _ := near(t, testZone)
	dial := func() (*dns.Conn, error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP("127.0.0.5")}}
		c, err := d.Dial("tcp", e.dns.tcp.Addr().String())
		if err != nil {
			return nil, err
		}
		t.Cleanup(func() { c.Close() })
		return &dns.Conn{Conn: c}, nil
	}
	ask := func(c *dns.Conn) error {
		c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in the read
		if err := c.WriteMsg(new(dns.Msg).SetQuestion("one.test.", dns.TypeA)); err != nil {
			return err
		}
		a, err := c.ReadMsg()
		if err == nil && len(a.Answer) != 1 {
			err = fmt.Errorf("%v", a)
		}
		return err
	}
	for range dnsConns {
		c, err := dial()
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if err := ask(c); err != nil {
				t.Fatal(err)
			}
		}
	}
	c, err := dial()
	if err == nil { // else the reset came while it connected
		err = ask(c)
	}
	if err == nil {
		t.Error("one more connection is served")
	}
}

// FuzzChild: whatever a child says that was taken over, no sandbox gets a lease for a name that
// its policy does not allow, or to an address that is closed.
func FuzzChild(f *testing.F) {
	for kind := range uint8(9) {
		m := names.Message{
			ID: 1, Source: netip.MustParseAddrPort("127.0.0.5:5000"), Name: "two.test", Type: dns.TypeA, Hit: true, TTL: 60,
			Addrs: []netip.Addr{netip.MustParseAddr("203.0.113.9")}, Body: []byte("answer"),
		}
		f.Add(kind, m.Append(nil))
		m.Name, m.Addrs = "one.test", []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("203.0.113.9")}
		f.Add(kind, m.Append(nil))
	}
	e, _ := near(f, testZone)
	e.dns.upstreams = nil
	f.Fuzz(func(t *testing.T, kind uint8, b []byte) {
		a, peer, err := child.Pair()
		if err != nil {
			t.Fatal(err)
		}
		defer peer.Close()
		line, err := child.NewConn(a, names.MaxMessage, false)
		if err != nil {
			t.Fatal(err)
		}
		defer line.Close()
		e.dns.handle(line, child.Message{Kind: kind, Body: b})
		e.dns.handle(line, child.Message{Kind: uint8(names.Lease), Body: b}) // of the same number, if it was an Ask
		e.dns.end(line)
		for id, s := range e.byID {
			if n := s.dns.queries.Load(); n != 0 {
				t.Fatalf("%s has %d queries under way", id, n)
			}
			for l := range s.leases.All {
				p := s.policy.Load()
				if ok, _ := p.Resolves(l.Name); !ok || e.blocks(l.Addr) != "" || policy.Private(l.Addr) && !p.Names(l.Addr) {
					t.Fatalf("%s: %s is leased to %s", id, l.Addr, l.Name)
				}
			}
			s.leases = new(leases.Table)
			s.dns.left, s.dns.watch = dnsBurst, tunnel.Watch{}
		}
	})
}
