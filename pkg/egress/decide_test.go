package egress

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/conntrack"
	"github.com/sandboxd/sandboxd/pkg/egress/leases"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/egress/policy/policytest"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func rules(t testing.TB, mode record.NetworkMode, specs ...string) record.Network {
	t.Helper()
	return policytest.Network(t, policy.ParseRule, mode, specs...)
}

func TestDecide(t *testing.T) {
	hosts := map[netip.Addr]bool{netip.MustParseAddr("198.51.100.1"): true, netip.MustParseAddr("198.51.100.255"): false}
	e := &Engine{judge: judge{pool: inst.Pool()}}
	e.hosts.Store(&hosts)
	for a, want := range map[string]bool{"198.51.100.1": true, "198.51.100.255": false, "198.51.100.2": false} {
		if e.HostAddress(netip.MustParseAddr(a)) != want {
			t.Errorf("%s is an address of this host: %v, want %v", a, !want, want)
		}
	}
	everything := []string{
		"0.0.0.0/0", "10.0.0.0/8", "169.254.0.0/16", "127.0.0.0/8", "198.51.100.1", "100.64.0.0/10",
		"240.0.0.0/4", "224.0.0.0/4", "168.63.129.16",
	}
	for _, c := range []struct {
		mode  record.NetworkMode
		rules []string
		flow  string // addr:port/proto
		allow bool
		why   string
	}{
		{"rules", nil, "1.1.1.1:443/tcp", false, "default"},
		{"none", []string{"1.1.1.1"}, "1.1.1.1:443/tcp", false, "network none"},
		{"open", nil, "1.1.1.1:443/tcp", true, "default"},
		{"open", []string{"!1.1.1.1:443"}, "1.1.1.1:443/tcp", false, "deny 1.1.1.1/32:443"},
		{"open", []string{"!1.1.1.1:443"}, "1.1.1.1:80/tcp", true, "default"},
		{"rules", []string{"1.1.1.1:443/tcp"}, "1.1.1.1:443/udp", false, "default"},
		{"rules", []string{"1.1.1.1:443"}, "1.1.1.1:0/icmp", false, "default"},
		{"rules", []string{"1.1.1.1"}, "1.1.1.1:0/icmp", true, "allow 1.1.1.1/32"},
		{"rules", []string{"1.1.1.0/24:80-90"}, "1.1.1.255:90/tcp", true, "allow 1.1.1.0/24:80-90"},
		{"rules", []string{"1.1.1.0/24:80-90"}, "1.1.1.255:91/tcp", false, "default"},
		// Private ranges: by name only.
		{"open", nil, "10.1.2.3:80/tcp", false, "private range"},
		{"open", []string{"0.0.0.0/0"}, "10.1.2.3:80/tcp", false, "private range"},
		{"rules", []string{"8.0.0.0/5"}, "10.1.2.3:80/tcp", false, "private range"},
		{"rules", []string{"10.0.0.0/8"}, "10.1.2.3:80/tcp", true, "allow 10.0.0.0/8"},
		{"rules", []string{"10.1.2.3:80"}, "10.1.2.3:80/tcp", true, "allow 10.1.2.3/32:80"},
		{"rules", []string{"10.1.2.3:80"}, "10.1.2.3:81/tcp", false, "private range"},
		{"open", []string{"!0.0.0.0/0", "10.0.0.0/8"}, "10.1.2.3:80/tcp", false, "deny 0.0.0.0/0"},
		{"rules", []string{"0.0.0.0/0", "100.64.0.0/10"}, "100.100.1.1:80/tcp", true, "allow 100.64.0.0/10"},
		// Never.
		{"open", everything, "169.254.169.254:80/tcp", false, "metadata service"},
		{"open", everything, "100.100.100.200:80/tcp", false, "metadata service"},
		{"open", everything, "168.63.129.16:80/tcp", false, "metadata service"},
		{"open", everything, "169.254.1.1:80/tcp", false, "link-local"},
		{"open", everything, "127.0.0.1:80/tcp", false, "loopback"},
		{"open", everything, "0.0.0.1:80/tcp", false, "this network"},
		{"open", everything, "224.0.0.251:5353/udp", false, "multicast"},
		{"open", everything, "255.255.255.255:67/udp", false, "reserved"},
		{"open", everything, "198.51.100.1:22/tcp", false, "host address"},
		{"open", everything, "198.51.100.255:22/udp", false, "host address"},
		{"open", everything, inst.Pool().Addr().Next().String() + ":80/tcp", false, "another sandbox"},
	} {
		p, err := policy.Compile(policy.Host{}, rules(t, c.mode, c.rules...))
		if err != nil {
			t.Fatal(err)
		}
		s := &sandbox{leases: new(leases.Table)}
		s.policy.Store(p)
		target, proto, _ := strings.Cut(c.flow, "/")
		dst := netip.MustParseAddrPort(target)
		action, why := e.decide(s, policy.Flow{Dst: dst.Addr(), Port: dst.Port(), Proto: policy.Proto(proto)})
		if allow := action != policy.Deny; allow != c.allow || why.Text != c.why {
			t.Errorf("%s %v: %s: %v, %q; want %v, %q", c.mode, c.rules, c.flow, action, why.Text, c.allow, c.why)
		}
	}
}

// TestVerdictMarks: a flow to the resolver is not one that a policy has allowed, and gets
// another mark.
func TestVerdictMarks(t *testing.T) {
	e := &Engine{
		judge:  judge{pool: inst.Pool()},
		cfg:    Config{Instance: inst, Pool: inst.Pool(), MaxOpenFlows: 9, MaxFlows: 9 + dnsInFlight},
		byAddr: map[netip.Addr]*sandbox{},
	}
	e.hosts.Store(&map[netip.Addr]bool{})
	e.ledger = newLedger(e.cfg, nil)
	for i, c := range []struct {
		network record.Network
		port    uint16
		want    uint32
	}{
		{rules(t, "none"), 53, markResolve},
		{rules(t, "open"), 53, markResolve},
		{rules(t, "none"), 80, markDeny},
		{rules(t, "open"), 80, markAllow},
	} {
		p, err := policy.Compile(policy.Host{}, c.network)
		if err != nil {
			t.Fatal(err)
		}
		s := &sandbox{id: strconv.Itoa(i), addr: addr(i), leases: new(leases.Table)}
		s.policy.Store(p)
		e.byAddr[s.addr] = s
		for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			packet := make([]byte, 24)
			packet[0], packet[9] = 0x45, proto
			copy(packet[12:], s.addr.AsSlice())
			copy(packet[16:], []byte{8, 8, 8, 8})
			binary.BigEndian.PutUint16(packet[22:], c.port)
			if got := e.verdict(packet); got != c.want {
				t.Errorf("sandbox %d, %s to port %d: mark %#x, want %#x", i, policy.ProtoName(proto), c.port, got, c.want)
			}
		}
	}
}

// TestTightened: a policy that is replaced closes the open flows that the new one denies
// before Register returns, and no others.
func TestTightened(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.0/24", "db.test"))
	neighbour := w.sandbox(e, 1, rules(t, "rules", "203.0.113.1:443"))
	s := e.lookup(addr(0))
	s.leases.Add("db.test", []netip.Addr{netip.MustParseAddr("198.51.100.2")}, 0, time.Now())
	dial := func(id, network, to string) net.Conn {
		t.Helper()
		c, err := w.dial(id, network, to, patient)
		if err != nil {
			t.Fatalf("%s %s: %v", network, to, err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	stays := dial(id, "tcp", "203.0.113.1:443")
	named := dial(id, "tcp", "198.51.100.2:8080")
	others := dial(neighbour, "tcp", "203.0.113.1:443")
	ends := []net.Conn{dial(id, "tcp", "203.0.113.1:80"), dial(id, "tcp", "203.0.113.2:443"), dial(id, "udp", "203.0.113.2:443")}
	e.ledger.mu.Lock() // its lease ends, and the flow that it opened goes on
	s.leases = new(leases.Table)
	s.leases.Add("db.test", []netip.Addr{netip.MustParseAddr("198.51.100.2")}, 0, time.Now().Add(-time.Hour))
	e.ledger.mu.Unlock()
	w.refused(id, "tcp", "198.51.100.2:8080")
	if err := e.Register(t.Context(), id, addr(0), rules(t, "rules", "203.0.113.1:443", "db.test"), nil); err != nil {
		t.Fatal(err)
	}
	if err := conntrack.EachOf(addr(0), func() {}, func(f conntrack.Entry) {
		if f.Dst != netip.MustParseAddr("198.51.100.2") && f.Port != 443 || f.Dst == netip.MustParseAddr("203.0.113.2") {
			t.Errorf("%+v is open after Register", f.Flow)
		}
	}); err != nil {
		t.Fatal(err)
	}
	for i, c := range ends {
		if err := echo(c, patient); err == nil {
			t.Errorf("flow %d, which the new policy denies, goes on", i)
		} else if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
			t.Errorf("flow %d ends by a timeout; want an error at once", i)
		}
	}
	for what, c := range map[string]net.Conn{"an allowed flow": stays, "one by a name": named, "a neighbour's": others} {
		if err := echo(c, patient); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	// A flow that passed by its address says no name: a rule by name alone does not keep it.
	if err := e.Register(t.Context(), id, addr(0), rules(t, "rules", "db.test"), nil); err != nil {
		t.Fatal(err)
	}
	if err := echo(stays, patient); err == nil {
		t.Error("a flow that only a name could allow now, and that never said it, goes on")
	}
}

// TestTightenedMeanwhile: a policy that changed while no Engine ran ends the open flows that
// no name could have opened; leases are lost with the Engine.
func TestTightenedMeanwhile(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443", "203.0.113.2:443", "db.test"))
	e.lookup(addr(0)).leases.Add("db.test", []netip.Addr{netip.MustParseAddr("198.51.100.2")}, 0, time.Now())
	open := map[string]net.Conn{}
	for _, to := range []string{"203.0.113.1:443", "203.0.113.2:443", "198.51.100.2:8080"} {
		c, err := w.dial(id, "tcp", to, patient)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		open[to] = c
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	e = w.open()
	if err := e.Register(t.Context(), id, addr(0), rules(t, "rules", "203.0.113.1:443", "db.test"), nil); err != nil {
		t.Fatal(err)
	}
	for to, c := range open {
		if err := echo(c, patient); (err == nil) == (to == "203.0.113.2:443") {
			t.Errorf("the flow to %s: %v", to, err)
		}
	}
}

// TestLeaves: what the proxy dials leaves the host, whatever instance a sandbox is of.
func TestLeaves(t *testing.T) {
	w := newWorld(t)
	w.guest(0)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for at, want := range map[string]string{
		"203.0.113.1": "", "192.0.2.99": "an address of this host", "127.0.0.1": "an address of this host",
		addr(0).String(): "another sandbox",
	} {
		err := leaves(fd, netip.MustParseAddr(at))
		if (err == nil) != (want == "") || err != nil && err.Error() != want {
			t.Errorf("%s: %v, want %q", at, err, want)
		}
	}
}

// TestMayDial: what the proxy dials passes the hard blocks once more, whoever asked for it.
func TestMayDial(t *testing.T) {
	addrOf := netip.MustParseAddr
	s := &sandbox{id: "x", addr: addr(0)}
	e := &Engine{
		judge: judge{pool: inst.Pool()}, byID: map[string]*sandbox{"x": s}, byAddr: map[netip.Addr]*sandbox{s.addr: s},
	}
	e.hosts.Store(&map[netip.Addr]bool{addrOf("192.0.2.99"): true})
	p, err := policy.Compile(policy.Host{}, rules(t, "open", "10.1.2.0/24"))
	if err != nil {
		t.Fatal(err)
	}
	s.policy.Store(p)
	x := &proxied{s: s, number: 1}
	px := &proxy{e: e, flows: map[uint64]*proxied{1: x}}
	for at, want := range map[string]string{
		"203.0.113.1": "", "10.1.2.3": "",
		"10.1.3.3": "private range", "192.168.0.1": "private range", "100.64.0.1": "private range",
		"192.0.2.99": "host address", "169.254.169.254": "metadata service", "127.0.0.1": "loopback",
		addr(1).String(): "another sandbox", "224.0.0.251": "multicast", "255.255.255.255": "reserved", "0.0.0.0": "this network",
	} {
		to := netip.AddrPortFrom(addrOf(at), 443)
		err := px.mayDial(x, to, to.String())
		if (err == nil) != (want == "") || err != nil && err.Error() != want {
			t.Errorf("%s: %v, want %q", at, err, want)
		}
	}
	to := netip.MustParseAddrPort("203.0.113.1:443")
	if err := px.mayDial(x, to, "203.0.113.2:443"); err == nil {
		t.Error("another address than was decided on may be dialled")
	}
	delete(px.flows, 1)
	if err := px.mayDial(x, to, to.String()); !errors.Is(err, errGone) {
		t.Errorf("a flow that has ended: %v", err)
	}
}

// TestNoMoment: while a policy is replaced by another over and over, what both allow always
// opens, and what both deny never does, by DNS, by a packet, and by a name. Others stay open.
func TestNoMoment(t *testing.T) {
	w := newWorld(t)
	w.upstream()
	arrived := w.sites()
	e := w.open()
	// Parts of both together would open what each denies.
	one := rules(t, "rules", "203.0.113.1:443", "!203.0.113.9:22", "!other.test", "203.0.113.0/28", "*.test:443", "one.test")
	two := rules(t, "rules", "one.test", "allowed.test", "203.0.113.1:443")
	id := w.named(e, 0, one)
	kept, err := w.tls(id, site+":443", "allowed.test")
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	if err := said(kept); err != nil {
		t.Fatal(err)
	}
	before := arrived.Load()
	var trying sync.WaitGroup
	each := func(what string, f func() error) {
		trying.Go(func() {
			pace := time.NewTicker(25 * time.Millisecond) // a sandbox may open 200 flows a second
			defer pace.Stop()
			for n := range 100 {
				if err := f(); err != nil {
					t.Errorf("%s, the time %d: %v", what, n, err)
					return
				}
				<-pace.C
			}
		})
	}
	var named atomic.Int64
	each("an address that both allow", func() error {
		c, err := w.connect(w.guests[id], "tcp", "203.0.113.1:443", patient)
		if err == nil {
			reset(c)
		}
		return err
	})
	each("a name that both allow", func() error {
		c, err := w.tls(id, site+":443", "allowed.test")
		if err != nil {
			return err
		}
		named.Add(1)
		return c.Close()
	})
	each("a name that DNS answers under both", func() error {
		a, err := w.ask(id, "tcp", "8.8.8.8:53", "one.test.", dns.TypeA, patient)
		if err == nil && len(a.Answer) != 1 {
			err = fmt.Errorf("%v", a)
		}
		return err
	})
	each("an address that both deny", func() error {
		c, err := w.connect(w.guests[id], "tcp", "203.0.113.9:22", patient)
		if err == nil {
			reset(c)
			return errors.New("it opens")
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
		return nil
	})
	each("a name that both deny", func() error {
		// Under the first, DNS has told whose address it is.
		if c, err := w.tls(id, site+":443", "other.test"); err == nil {
			c.Close()
			return errors.New("it opens")
		} else if !strings.Contains(err.Error(), "tls: access denied") {
			return err
		}
		return nil
	})
	tried := make(chan struct{})
	go func() { trying.Wait(); close(tried) }()
	changes := 0
	for more := true; more; changes++ {
		n := one
		if changes%2 == 0 {
			n = two
		}
		if err := e.Register(t.Context(), id, addr(0), n, nil); err != nil {
			t.Error(err)
			break
		}
		select {
		case <-tried:
			more = false
		case <-time.After(5 * time.Millisecond): // others run, too
		}
	}
	<-tried
	if changes < 20 {
		t.Errorf("the policy changed only %d times meanwhile", changes)
	}
	if err := said(kept); err != nil {
		t.Errorf("a connection that both allow has ended: %v", err)
	}
	if n := arrived.Load() - before; n > named.Load() {
		t.Errorf("%d connections by name reached a server, %d were allowed", n, named.Load())
	}
}

// TestExplainStored: of a sandbox that does not run the stored policy answers, behind the
// rules of the host and the hard blocks.
func TestExplainStored(t *testing.T) {
	e := &Engine{judge: judge{pool: inst.Pool()}, cfg: Config{Host: policy.Host{Deny: rules(t, "rules", "pypi.org:80").Rules}}}
	e.hosts.Store(&map[netip.Addr]bool{})
	stored := rules(t, "rules", "pypi.org", "203.0.113.7:443")
	for _, c := range []struct {
		t    Target
		want Explanation
	}{
		{
			Target{Name: "pypi.org", Port: 443},
			Explanation{Allowed: true, Rule: "allow pypi.org", Resolves: true, ResolvesRule: "allow pypi.org"},
		},
		{
			Target{Name: "pypi.org", Port: 80},
			Explanation{Rule: "host: deny pypi.org:80", Fixed: true, Resolves: true, ResolvesRule: "allow pypi.org"},
		},
		{Target{Name: "npmjs.org", Port: 443}, Explanation{Rule: "default", ResolvesRule: "default"}},
		{Target{Addr: netip.MustParseAddr("203.0.113.7"), Port: 443}, Explanation{Allowed: true, Rule: "allow 203.0.113.7/32:443"}},
		// Behind a rule of the host that denies a name, which it may be.
		{Target{Addr: netip.MustParseAddr("203.0.113.7"), Port: 80}, Explanation{Rule: policy.NoName, ByName: true, Fixed: true}},
		{Target{Addr: netip.MustParseAddr("203.0.113.7"), Port: 53, Proto: "udp"}, Explanation{Allowed: true, Resolver: true}},
		{Target{Name: "npmjs.org", Port: 53}, Explanation{Allowed: true, Resolver: true}},
		{Target{Addr: netip.MustParseAddr("203.0.113.8"), Port: 22}, Explanation{Rule: "default"}}, // pypi.org may have it
		{Target{Addr: netip.MustParseAddr("169.254.169.254"), Port: 80}, Explanation{Rule: "metadata service", Fixed: true, Block: true}},
	} {
		c.want.Stored = true
		got, err := e.Explain("x", stored, c.t)
		if err != nil || fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", c.want) {
			t.Errorf("%+v: %+v, %v; want %+v", c.t, got, err, c.want)
		}
	}
}

// TestExplainInspected: what has requests decrypted is told apart: rules about them, or a binding.
func TestExplainInspected(t *testing.T) {
	n := requests(t, "GET api.test", "GET both.test", "bound.test", "open.test", "GET all.test", "all.test")
	p, err := policy.Compile(policy.Host{}, n)
	if err != nil {
		t.Fatal(err)
	}
	s := &sandbox{id: "x", leases: new(leases.Table)}
	s.policy.Store(p)
	s.plan.Store(&plan{Inspection: &Inspection{Marks: func(scheme, host string) bool {
		return scheme == "https" && (host == "both.test" || host == "bound.test")
	}}})
	e := &Engine{judge: judge{pool: inst.Pool()}, byID: map[string]*sandbox{"x": s}}
	for target, want := range map[string]struct{ judged, bound bool }{
		"api.test:443": {true, false}, "api.test:80": {true, false}, "both.test:443": {true, true}, "both.test:80": {true, false},
		"bound.test:443": {false, true}, "bound.test:80": {}, "open.test:443": {}, "all.test:443": {}, // all of its requests are allowed
	} {
		name, port, _ := strings.Cut(target, ":")
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil {
			t.Fatal(err)
		}
		x, err := e.Explain("x", record.Network{}, Target{Name: name, Port: uint16(n)})
		if err != nil || !x.Allowed || x.Judged != want.judged || x.Bound != want.bound {
			t.Errorf("%s: %+v, %v; want %+v", target, x, err, want)
		}
	}
}
