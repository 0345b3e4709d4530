package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	vns "github.com/vishvananda/netns"
)

// rulesNow is what iptables-save says of the instance, and little else.
func rulesNow(w *world) string {
	var out strings.Builder
	for _, table := range tables {
		for line := range strings.Lines(w.run("iptables-save", "-t", table)) {
			if strings.HasPrefix(line, "*") || strings.HasPrefix(line, "-A") || strings.HasPrefix(line, ":"+inst.Chain("")) {
				f := strings.Fields(line)
				if f[0][0] == ':' {
					f = f[:1]
				}
				fmt.Fprintln(&out, strings.Join(f, " "))
			}
		}
	}
	return out.String()
}

func TestGolden(t *testing.T) {
	w := newWorld(t)
	golden, err := os.ReadFile("testdata/chains.golden")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		e := w.open()
		if got := rulesNow(w); got != string(golden) {
			t.Errorf("iptables-save:\n%s", got)
		}
		got := w.run("ip6tables-save")
		for _, want := range []string{"-A PREROUTING -i sb-e+ -j DROP", "-A OUTPUT -o sb-e+ -j DROP"} {
			if !strings.Contains(got, want) {
				t.Errorf("ip6tables lacks %q", want)
			}
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if err := e.Close(); err != nil {
			t.Errorf("second close: %v", err)
		}
	}
	if err := Purge(t.Context(), inst); err != nil {
		t.Fatal(err)
	}
	if got := rulesNow(w); strings.Contains(got, "SANDBOXD") || strings.Contains(got, "MASQ") {
		t.Errorf("after Purge:\n%s", got)
	}
}

// TestOpenAgainTouchesNothing: the same rules, the same handles in the kernel.
func TestOpenAgainTouchesNothing(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	e.Close()
	w.run("iptables", "-t", "filter", "-Z") // counters: a rule made anew would start at 0 anyway
	before, err := e.chains.save()
	if err != nil {
		t.Fatal(err)
	}
	e = w.open()
	after, err := e.chains.save()
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range tables {
		for name, rules := range before[table] {
			if !slices.Equal(rules, after[table][name]) {
				t.Errorf("%s %s changed", table, name)
			}
		}
	}
	if _, ok := after["filter"][inst.Chain("FORWARD")+"-B"]; ok {
		t.Error("the chains were built anew")
	}
}

const deniedWithin = 50 * time.Millisecond

func (w *world) allowed(id, network, to string) {
	w.t.Helper()
	c, err := w.dial(id, network, to, time.Second)
	if err != nil {
		w.t.Errorf("%s: %s %s: %v, want an answer", id, network, to, err)
		return
	}
	c.Close()
}

func (w *world) refused(id, network, to string) {
	w.t.Helper()
	start := time.Now()
	c, err := w.dial(id, network, to, time.Second)
	d := time.Since(start)
	if err == nil {
		c.Close()
	}
	if !errors.Is(err, syscall.ECONNREFUSED) || d > deniedWithin {
		w.t.Errorf("%s: %s %s: %v after %v, want connection refused within %v", id, network, to, err, d, deniedWithin)
	}
}

func (w *world) silent(id, network, to string) {
	w.t.Helper()
	c, err := w.dial(id, network, to, 300*time.Millisecond)
	if err == nil {
		c.Close()
	}
	if ne, ok := errors.AsType[net.Error](err); !ok || !ne.Timeout() {
		w.t.Errorf("%s: %s %s: %v, want no answer", id, network, to, err)
	}
}

func TestReach(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	w.serve(hostNS(t), "0.0.0.0", 8080) // a careless service of the host, on all its addresses
	ruled := w.sandbox(e, 0, rules(t, "rules", "203.0.113.0/24:443", "203.0.113.2", "10.98.0.1:80", "0.0.0.0/0:8080"))
	open := w.sandbox(e, 1, rules(t, "open", "!203.0.113.3", "169.254.0.0/16", addr(0).String(), "198.51.100.1", "192.0.2.99"))
	none := w.sandbox(e, 2, rules(t, "none", "203.0.113.0/24"))

	for _, network := range []string{"tcp", "udp"} {
		for _, to := range []string{"203.0.113.1:443", "203.0.113.3:443", "203.0.113.2:80", "10.98.0.1:80", "203.0.113.1:8080"} {
			w.allowed(ruled, network, to)
		}
		for _, to := range []string{"203.0.113.1:80", "198.51.100.2:443", "10.98.0.1:443", "10.99.0.1:8080", "192.168.7.7:8080"} {
			w.refused(ruled, network, to)
		}
		for _, to := range []string{"203.0.113.1:80", "198.51.100.2:8080"} {
			w.allowed(open, network, to)
		}
		for _, to := range []string{"203.0.113.3:80", "10.98.0.1:80", "192.168.7.7:80"} {
			w.refused(open, network, to)
		}
		for _, to := range []string{"203.0.113.1:443", "198.51.100.2:443"} {
			w.refused(none, network, to)
		}
		// What is never open, though rules name it.
		for _, id := range []string{ruled, open, none} {
			for _, to := range []string{
				"169.254.169.254:80", "198.51.100.1:8080", "192.0.2.99:8080",
				inst.Gateway().String() + ":8080", inst.Gateway().String() + ":15353",
				addr(9).String() + ":80",
			} {
				w.refused(id, network, to)
			}
		}
		w.refused(open, network, addr(0).String()+":80")
	}
	// The way in is the host's: to the sandbox, and the replies.
	c, err := net.DialTimeout("tcp", addr(0).String()+":80", time.Second)
	if err != nil {
		t.Fatalf("host to sandbox: %v", err)
	}
	defer c.Close()
	if err := echo(c, time.Second); err != nil {
		t.Errorf("host to sandbox: %v", err)
	}
	// From outside there is none.
	w.in(w.outside, func() {
		w.run("ip", "route", "add", inst.Pool().String(), "via", "198.51.100.1")
		if c, err := net.DialTimeout("tcp", addr(0).String()+":80", 300*time.Millisecond); err == nil {
			c.Close()
			t.Error("a sandbox was reached from outside")
		}
	})
	// And no IPv6 at all.
	for id, ns := range w.guests {
		w.in(ns, func() {
			if out := w.run("ip", "-6", "address"); out != "" {
				t.Errorf("%s has %s", id, out)
			}
		})
		if out := w.run("ip", "-6", "address", "show", "dev", "sb-"+id); out != "" {
			t.Errorf("the host end of %s has %s", id, out)
		}
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	for _, want := range []Denial{
		{ruled, "tcp", netip.MustParseAddrPort("203.0.113.1:80"), "default"},
		{ruled, "udp", netip.MustParseAddrPort("10.99.0.1:8080"), "private range"},
		{open, "tcp", netip.MustParseAddrPort("203.0.113.3:80"), "deny 203.0.113.3/32"},
		{open, "tcp", netip.MustParseAddrPort("169.254.169.254:80"), "metadata service"},
		{open, "udp", netip.MustParseAddrPort(addr(0).String() + ":80"), "another sandbox"},
		{open, "udp", netip.MustParseAddrPort("192.0.2.99:8080"), "host address"},
		{none, "tcp", netip.MustParseAddrPort("203.0.113.1:443"), "network none"},
	} {
		if !slices.Contains(w.denied, want) {
			t.Errorf("not told of %v", want)
		}
	}
}

func TestUnregistered(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.guest(0)
	w.silent(id, "tcp", "203.0.113.1:443")
	all := rules(t, "open")
	if err := e.Register(t.Context(), id, addr(0), all); err != nil {
		t.Fatal(err)
	}
	c, err := w.dial(id, "tcp", "203.0.113.1:443", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if ids, err := e.ListRegistered(t.Context()); err != nil || !slices.Equal(ids, []string{id}) {
		t.Errorf("registered: %v, %v", ids, err)
	}
	for range 2 {
		if err := e.Unregister(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		if err := e.Gone(ctx, id); err != nil {
			t.Error(err)
		}
		cancel()
	}
	if err := echo(c, 300*time.Millisecond); err == nil {
		t.Error("an established flow survives Unregister")
	}
	w.silent(id, "tcp", "203.0.113.1:443")
	if ids, err := e.ListRegistered(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("registered: %v, %v", ids, err)
	}
	if out := conntrack(t, w); strings.Contains(out, addr(0).String()) {
		t.Errorf("conntrack still has\n%s", out)
	}
	// Two of one address, and addresses that are nobody's.
	if err := e.Register(t.Context(), id, addr(0), all); err != nil {
		t.Fatal(err)
	}
	if err := e.Register(t.Context(), "eotherotherx", addr(0), all); err == nil {
		t.Error("two sandboxes have one address")
	}
	if err := e.Register(t.Context(), id, netip.MustParseAddr("10.1.1.1"), all); err == nil {
		t.Error("an address beyond the pool was taken")
	}
	// A later daemon, which does not know the sandbox.
	e.Close()
	e = w.open()
	if err := e.Unregister(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if ids, err := e.ListRegistered(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("registered: %v, %v", ids, err)
	}
}

func conntrack(t *testing.T, w *world) string {
	b, err := os.ReadFile("/proc/self/net/nf_conntrack")
	if errors.Is(err, os.ErrNotExist) {
		t.Log("no /proc/net/nf_conntrack on this kernel; entries are not looked at")
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestSpoof(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	honest := w.sandbox(e, 0, rules(t, "open"))
	liar := w.sandbox(e, 1, rules(t, "none"))
	w.allowed(honest, "udp", "203.0.113.1:443")
	w.write("net/ipv4/conf/sb-"+liar+"/rp_filter", "0") // the set alone must do
	w.in(w.guests[liar], func() { w.run("ip", "addr", "add", addr(0).String()+"/32", "dev", "eth0") })
	var c net.Conn
	var err error
	w.in(w.guests[liar], func() {
		d := net.Dialer{LocalAddr: &net.UDPAddr{IP: addr(0).AsSlice()}}
		c, err = d.Dial("udp", "203.0.113.1:443")
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := echo(c, 200*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a spoofed packet: %v, want silence", err)
	}
	raw := w.run("iptables", "-t", "raw", "-nvxL", inst.Chain("RAW"))
	if f := strings.Fields(strings.Split(raw, "\n")[3]); f[0] == "0" || f[2] != "DROP" {
		t.Errorf("no packet was dropped as spoofed:\n%s", raw)
	}
}

// TestDaemonAbsent: established flows go on, nothing new opens, and a restart
// serves again.
func TestDaemonAbsent(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	all := rules(t, "open")
	id := w.sandbox(e, 0, all)
	c, err := w.dial(id, "tcp", "203.0.113.1:443", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := echo(c, time.Second); err != nil {
			t.Fatalf("an established flow, the daemon gone: %v", err)
		}
	}
	w.silent(id, "tcp", "203.0.113.1:443")
	w.silent(id, "udp", "203.0.113.1:80")
	w.refused(id, "tcp", "198.51.100.1:8080")

	e = w.open()
	// Not yet registered with the new daemon: silence, so that guests try again.
	w.silent(id, "tcp", "203.0.113.1:443")
	if err := e.Register(t.Context(), id, addr(0), all); err != nil {
		t.Fatal(err)
	}
	w.allowed(id, "tcp", "203.0.113.1:443")
	if err := echo(c, time.Second); err != nil {
		t.Errorf("an established flow after the restart: %v", err)
	}
}

// TestTwoDaemons: the queue belongs to one.
func TestTwoDaemons(t *testing.T) {
	w := newWorld(t)
	w.open()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if e, err := Open(ctx, Config{Instance: inst}); err == nil {
		e.Close()
		t.Fatal("two engines of one instance")
	}
}

func TestManySandboxesOneRule(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	n := rules(t, "rules", "203.0.113.0/24:443")
	const many = 70
	for i := range many {
		w.sandbox(e, i, n)
	}
	for i := range many {
		w.allowed(id(i), "tcp", "203.0.113.1:443")
		w.refused(id(i), "tcp", "203.0.113.1:80")
	}
	if ids, err := e.ListRegistered(t.Context()); err != nil || len(ids) != many {
		t.Errorf("%d registered, %v", len(ids), err)
	}
}

// TestOperator: chains flushed, changed, or pushed back by others.
func TestOperator(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	c, err := w.dial(id, "tcp", "203.0.113.1:443", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for name, commands := range map[string][]string{
		"flush filter":       {"-F"},
		"flush all":          {"-F", "-t nat -F", "-t mangle -F", "-t raw -F"},
		"flush and delete":   {"-F", "-X", "-t mangle -F", "-t mangle -X"},
		"one rule more":      {"-A " + inst.Chain("BACK") + " -j ACCEPT"},
		"one rule less":      {"-t raw -D " + inst.Chain("RAW") + " 2"},
		"one in front of us": {"-I FORWARD -j ACCEPT"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, c := range commands {
				for i := range 2 { // one may be in the other generation's chain
					out, err := exec.Command("iptables", strings.Fields(c)...).CombinedOutput()
					if err == nil {
						break
					}
					if i == 1 || !strings.Contains(c, inst.Chain("")) {
						t.Fatalf("%s: %s", c, out)
					}
					c = strings.NewReplacer(inst.Chain("BACK"), inst.Chain("BACK")+"-B", inst.Chain("RAW"), inst.Chain("RAW")+"-B").Replace(c)
				}
			}
			e.check(t.Context())
			ok, err := e.chains.standing()
			if err != nil || !ok {
				t.Errorf("the chains do not stand: %v\n%s", err, rulesNow(w))
			}
			if err := echo(c, time.Second); err != nil {
				t.Errorf("an established flow: %v", err)
			}
			w.allowed(id, "tcp", "203.0.113.1:443")
			w.refused(id, "tcp", "203.0.113.1:80")
			w.run("iptables", "-t", "filter", "-S")
		})
	}
	w.try("iptables", "-D", "FORWARD", "-j", "ACCEPT")
}

// TestFlood: a sandbox that opens as fast as it can is answered, but not for
// ever, and its neighbour does not feel it.
func TestFlood(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	bad := w.sandbox(e, 0, rules(t, "none"))
	good := w.sandbox(e, 1, rules(t, "rules", "203.0.113.1:443"))
	for range 3000 {
		w.in(w.guests[bad], func() {
			if c, err := net.DialTimeout("tcp", "203.0.113.1:443", time.Second); err == nil {
				c.Close()
				t.Error("denied flow opened")
			}
		})
	}
	w.allowed(good, "tcp", "203.0.113.1:443")
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := len(w.denied); n == 0 || n > 10*deniedPerSecond {
		t.Errorf("told of %d denials", n)
	}
}

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
			start := time.Now()
			a, err := w.ask(c.id, c.network, server, c.name, c.typ)
			if err != nil {
				t.Errorf("%s %s %s @%s: %v", c.network, c.name, dns.TypeToString[c.typ], server, err)
				continue
			}
			var got []string
			for _, rr := range a.Answer {
				got = append(got, strings.TrimPrefix(rr.String(), rr.Header().String()))
			}
			if a.Rcode != c.rcode || strings.Join(got, " ") != c.want {
				t.Errorf("%s %s %s @%s: %s %v; want %s %s", c.network, c.name, dns.TypeToString[c.typ], server,
					dns.RcodeToString[a.Rcode], got, dns.RcodeToString[c.rcode], c.want)
			}
			if d := time.Since(start); c.rcode == dns.RcodeRefused && d > deniedWithin {
				t.Errorf("refused after %v", d)
			}
			if c.name == "silent.test." {
				break // once is two seconds
			}
		}
	}
	// Too long for UDP: truncated, so that the guest comes back by TCP.
	if a, err := w.ask(open, "udp", "8.8.8.8:53", "many.test.", dns.TypeA); err != nil || !a.Truncated {
		t.Errorf("100 addresses by UDP: %v, %v", a, err)
	}
	for name := range asked() {
		if strings.HasPrefix(name, "refused") {
			t.Errorf("the upstream was asked for %s", name)
		}
	}
	if _, err := w.ask(ruled, "udp", "8.8.8.8:53", "refused.test.", dns.TypeA); err != nil {
		t.Error(err)
	}
	if asked()["refused.test."] {
		t.Error("a query of a sandbox without names reached the upstream")
	}
}

// hostNS is the network namespace of this process.
func hostNS(t *testing.T) vns.NsHandle {
	t.Helper()
	ns, err := vns.Get()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}
