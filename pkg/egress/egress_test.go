package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	vns "github.com/vishvananda/netns"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/egress/conntrack"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
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

// golden is testdata/chains.golden, which is of instance e, for the one of the tests.
func golden(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("testdata/chains.golden")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, of := range []func(instance.Instance) any{
		func(i instance.Instance) any { return i.Chain("") },
		func(i instance.Instance) any { return i.Set("") },
		func(i instance.Instance) any { return i.LinkMatch() },
		func(i instance.Instance) any { return i.Queue() },
		func(i instance.Instance) any { return i.BusyQueue() },
		func(i instance.Instance) any { return i.Gateway() },
		func(i instance.Instance) any { return i.Pool() },
	} {
		names = append(names, fmt.Sprint(of('e')), fmt.Sprint(of(inst)))
	}
	return strings.NewReplacer(names...).Replace(string(b))
}

func TestGolden(t *testing.T) {
	w := newWorld(t)
	want := golden(t)
	for range 2 {
		e := w.open()
		if got := rulesNow(w); got != want {
			t.Errorf("iptables-save:\n%s", got)
		}
		got := w.run("ip6tables-save")
		for _, want := range both6 {
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
	before, err := e.chains.save(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	e = w.open()
	after, err := e.chains.save(context.Background())
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

const (
	deniedWithin = 50 * time.Millisecond
	goneWithin   = time.Second
)

func (w *world) allowed(id, network, to string) {
	w.t.Helper()
	c, err := w.dial(id, network, to, patient)
	if err != nil {
		w.t.Errorf("%s: %s %s: %v, want an answer", id, network, to, err)
		return
	}
	c.Close()
}

func (w *world) refused(id, network, to string) {
	w.t.Helper()
	d, err := hosttest.Soonest(deniedWithin, func() error {
		c, err := w.dial(id, network, to, patient)
		if err == nil {
			c.Close()
			return errors.New("it opens")
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			return nil
		}
		return err
	})
	if err != nil || d > deniedWithin {
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
	c, err := w.connect(hostNS(t), "tcp", addr(0).String()+":80", patient)
	if err != nil {
		t.Fatalf("host to sandbox: %v", err)
	}
	defer c.Close()
	if err := echo(c, patient); err != nil {
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

	e.Told()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, want := range []Denial{
		{ID: ruled, Proto: "tcp", Dst: netip.MustParseAddrPort("203.0.113.1:80"), Rule: "default", By: ByPolicy},
		{ID: ruled, Proto: "udp", Dst: netip.MustParseAddrPort("10.99.0.1:8080"), Rule: "private range", By: ByPolicy},
		{ID: open, Proto: "tcp", Dst: netip.MustParseAddrPort("203.0.113.3:80"), Rule: "deny 203.0.113.3/32", By: ByPolicy},
		{ID: open, Proto: "tcp", Dst: netip.MustParseAddrPort("169.254.169.254:80"), Rule: "metadata service", By: ByBlock},
		{ID: open, Proto: "udp", Dst: netip.MustParseAddrPort(addr(0).String() + ":80"), Rule: "another sandbox", By: ByBlock},
		{ID: open, Proto: "udp", Dst: netip.MustParseAddrPort("192.0.2.99:8080"), Rule: "host address", By: ByBlock},
		{ID: none, Proto: "tcp", Dst: netip.MustParseAddrPort("203.0.113.1:443"), Rule: "network none", By: ByPolicy},
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
	if err := e.Register(t.Context(), id, addr(0), all, nil); err != nil {
		t.Fatal(err)
	}
	c, err := w.dial(id, "tcp", "203.0.113.1:443", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if ids, err := e.ListRegistered(t.Context()); err != nil || !slices.Equal(ids, []string{id}) {
		t.Errorf("registered: %v, %v", ids, err)
	}
	unregister := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), patient)
		defer cancel()
		return errors.Join(e.Unregister(ctx, id), e.Gone(ctx, id))
	}
	if err := errors.Join(unregister(), unregister()); err != nil {
		t.Fatal(err)
	}
	if err := echo(c, 300*time.Millisecond); err == nil {
		t.Error("an established flow survives Unregister")
	}
	w.silent(id, "tcp", "203.0.113.1:443")
	if ids, err := e.ListRegistered(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("registered: %v, %v", ids, err)
	}
	if out := inConntrack(t, w); strings.Contains(out, addr(0).String()) {
		t.Errorf("conntrack still has\n%s", out)
	}
	if d, err := hosttest.Soonest(goneWithin, func() error {
		if err := e.Register(t.Context(), id, addr(0), all, nil); err != nil {
			return err
		}
		w.allowed(id, "tcp", "203.0.113.1:443")
		return unregister()
	}); err != nil || d > goneWithin {
		t.Errorf("its flows were gone after %v (%v), want %v", d, err, goneWithin)
	}
	// Two of one address, and addresses that are nobody's.
	if err := e.Register(t.Context(), id, addr(0), all, nil); err != nil {
		t.Fatal(err)
	}
	if err := e.Register(t.Context(), "eotherotherx", addr(0), all, nil); err == nil {
		t.Error("two sandboxes have one address")
	}
	if err := e.Register(t.Context(), id, netip.MustParseAddr("10.1.1.1"), all, nil); err == nil {
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

// TestCutWithoutItsFile: what keeps the leases of a sandbox from being removed does not keep
// it from being cut off; and it may come again.
func TestCutWithoutItsFile(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	e := w.openWith(func(c *Config) { c.Leases = dir })
	id, file := w.sandbox(e, 0, rules(t, "open")), filepath.Join(dir, id(0))
	c, err := w.dial(id, "tcp", "203.0.113.1:443", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(file, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := e.Unregister(t.Context(), id); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("%v; want an error that names %s", err, file)
	}
	if err := e.Gone(t.Context(), id); err != nil {
		t.Error(err)
	}
	if ids, err := e.ListRegistered(t.Context()); err != nil || len(ids) > 0 || e.lookup(addr(0)) != nil {
		t.Errorf("registered: %v, %v", ids, err)
	}
	w.silent(id, "tcp", "203.0.113.1:443")
	if err := echo(c, 300*time.Millisecond); err == nil {
		t.Error("an open flow goes on")
	}
	if err := os.RemoveAll(file); err != nil {
		t.Fatal(err)
	}
	if err := e.Unregister(t.Context(), id); err != nil {
		t.Error(err)
	}
	if err := e.Register(t.Context(), id, addr(0), rules(t, "open"), nil); err != nil {
		t.Fatal(err)
	}
	e.lookup(addr(0)).leases.Add("again.test", []netip.Addr{netip.MustParseAddr("203.0.113.9")}, 0, time.Now())
	if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), " again.test ") {
		t.Errorf("of a sandbox that came again nothing is kept: %q, %v", text, err)
	}
}

// TestForgotten: of a sandbox that is gone no entry is left, whoever opened the flow, and
// others keep theirs, also on a kernel that compares no addresses.
func TestForgotten(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	for i, lists := range []bool{false, true} {
		e.flows.lists = lists // no flush is under way
		gone, stays := w.sandbox(e, 2*i, rules(t, "open")), w.sandbox(e, 2*i+1, rules(t, "open"))
		at := addr(2 * i)
		w.allowed(gone, "tcp", "203.0.113.1:443")
		w.allowed(stays, "tcp", "203.0.113.1:443")
		w.knock(at)
		if n := w.touching(e, at); n < 2 {
			t.Fatalf("%d entries before; the test shows nothing", n)
		}
		if err := errors.Join(e.Unregister(t.Context(), gone), e.Gone(t.Context(), gone)); err != nil {
			t.Fatal(err)
		}
		if n := w.touching(e, at); n != 0 {
			t.Errorf("lists=%t: %d entries of a sandbox that is gone", lists, n)
		}
		if _, n := w.entries(e, addr(2*i+1)); n == 0 {
			t.Errorf("lists=%t: a neighbour lost its flow", lists)
		}
		if e.flows.lists != lists {
			t.Log("this kernel compares no addresses")
		}
	}
}

// knock has the host open a flow to a sandbox. Nothing need listen: an entry of UDP stays.
func (w *world) knock(a netip.Addr) {
	w.t.Helper()
	c, err := net.Dial("udp", netip.AddrPortFrom(a, 9).String())
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("knock")); err != nil {
		w.t.Fatal(err)
	}
}

// touching counts the entries from a sandbox or to it.
func (w *world) touching(e *Engine, a netip.Addr) (n int) {
	w.t.Helper()
	if err := conntrack.Each(func() { n = 0 }, func(f conntrack.Entry) {
		if f.Src == a || f.Dst == a {
			n++
		}
	}); err != nil {
		w.t.Fatal(err)
	}
	return n
}

func inConntrack(t *testing.T, w *world) string {
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
	c, err := w.dial(id, "tcp", "203.0.113.1:443", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := echo(c, patient); err != nil {
			t.Fatalf("an established flow, the daemon gone: %v", err)
		}
	}
	w.silent(id, "tcp", "203.0.113.1:443")
	w.silent(id, "udp", "203.0.113.1:80")
	w.refused(id, "tcp", "198.51.100.1:8080")
	for _, network := range []string{"tcp", "udp"} {
		w.refused(id, network, "8.8.8.8:53") // names
	}

	e = w.open()
	// Not yet registered with the new daemon: silence, so that guests try again.
	w.silent(id, "tcp", "203.0.113.1:443")
	if err := e.Register(t.Context(), id, addr(0), all, nil); err != nil {
		t.Fatal(err)
	}
	w.allowed(id, "tcp", "203.0.113.1:443")
	if err := echo(c, patient); err != nil {
		t.Errorf("an established flow after the restart: %v", err)
	}
}

// TestSquatter: while no daemon runs, a program of the host may listen where the resolver and
// the proxy do. Nothing that a guest begins comes there, and the next daemon says that its
// port is taken.
func TestSquatter(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "one.test"))
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	var ports []string
	for _, port := range []uint16{ProxyPort, ResolverPort, policy.DNSPort} {
		ports = append(ports, netip.AddrPortFrom(inst.Gateway(), port).String())
	}
	came := make(chan net.Addr, 100)
	var squat []io.Closer
	for _, at := range ports {
		l, err := net.Listen("tcp4", at)
		if err != nil {
			t.Fatal(err)
		}
		pc, err := net.ListenPacket("udp4", at)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close(); pc.Close() })
		squat = append(squat, l, pc)
		go func() {
			for c, err := l.Accept(); err == nil; c, err = l.Accept() {
				came <- c.RemoteAddr()
				c.Close()
			}
		}()
		go func() {
			buf := make([]byte, 1500)
			for _, from, err := pc.ReadFrom(buf); err == nil; _, from, err = pc.ReadFrom(buf) {
				came <- from
			}
		}()
	}
	w.silent(id, "tcp", "203.0.113.1:443") // by name: the proxy's, if a daemon ran
	w.silent(id, "tcp", "203.0.113.1:80")
	for _, network := range []string{"tcp", "udp"} {
		w.refused(id, network, "8.8.8.8:53")
		for _, at := range ports {
			w.refused(id, network, at)
		}
	}
	for _, at := range ports { // what the host sends comes, and behind what the guest sent
		for _, network := range []string{"tcp", "udp"} {
			c, err := net.Dial(network, at)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Write([]byte("word")); err != nil {
				t.Fatal(err)
			}
			select {
			case from := <-came:
				if from.String() != c.LocalAddr().String() {
					t.Errorf("%s by %s got something from %s", at, network, from)
				}
			case <-time.After(hosttest.Patient(patient)):
				t.Fatalf("%s by %s: what the host sent did not come", at, network)
			}
			c.Close()
		}
	}
	if e, err := Open(t.Context(), Config{Instance: inst}); err == nil {
		e.Close()
		t.Error("the ports are taken, and a daemon begins")
	} else if !errors.Is(err, syscall.EADDRINUSE) {
		t.Error(err)
	}
	for _, c := range squat {
		c.Close()
	}
	w.open()
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

// TestTwoInstances: side by side, apart, and one goes without the other.
func TestTwoInstances(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	here := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))

	before := hosttest.Held(other)
	id, a := other.String()+"instanceaaa", other.Pool().Addr().Next().Next()
	w.run("ip", "addr", "replace", other.Gateway().String()+"/32", "dev", "lo")
	defer w.try("ip", "addr", "del", other.Gateway().String()+"/32", "dev", "lo")
	o, err := Open(t.Context(), Config{Instance: other})
	if err != nil {
		t.Fatal(err)
	}
	w.link(id, a, other.Gateway().String())
	// It names the pool of the first, which for it is a private range like any.
	if err := o.Register(t.Context(), id, a, rules(t, "rules", "203.0.113.1:443", inst.Pool().String()), nil); err != nil {
		t.Fatal(err)
	}
	w.allowed(id, "tcp", "203.0.113.1:443")
	w.allowed(here, "tcp", "203.0.113.1:443")
	w.refused(id, "tcp", addr(0).String()+":80")
	w.refused(here, "tcp", a.String()+":80")

	if err := errors.Join(o.Unregister(t.Context(), id), o.Close(), Purge(t.Context(), other)); err != nil {
		t.Fatal(err)
	}
	if ok, err := e.chains.standing(context.Background()); err != nil || !ok {
		t.Errorf("purging %s changed %s: %v", other, inst, err)
	}
	w.allowed(here, "tcp", "203.0.113.1:443")
	if left := hosttest.Held(other); len(left) != len(before)+1 { // the link
		t.Errorf("left of %s: %v", other, left)
	}
}

// TestOtherPool: a daemon that is given another pool takes the old one's rule away.
func TestOtherPool(t *testing.T) {
	w := newWorld(t)
	if err := w.open().Close(); err != nil {
		t.Fatal(err)
	}
	e, err := Open(t.Context(), Config{Instance: inst, Pool: netip.MustParsePrefix("10.200.0.0/24")})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	got := rulesNow(w)
	if strings.Count(got, "MASQUERADE") != 1 || !strings.Contains(got, "-s 10.200.0.0/24 ") {
		t.Errorf("masquerading:\n%s", got)
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
