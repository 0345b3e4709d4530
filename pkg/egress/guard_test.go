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
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	vns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// flushAll does what an operator does who wants a clean firewall.
func flushAll(w *world) {
	w.t.Helper()
	for _, table := range tables {
		w.run("iptables", "-t", table, "-F")
	}
}

// stands waits until the chains do, by themselves: the guard does not look until
// it hears of something.
func stands(t *testing.T, e *Engine) {
	t.Helper()
	deadline := time.Now().Add(patient)
	for time.Now().Before(deadline) {
		e.guarding.Lock()
		ok, err := e.chains.standing(context.Background())
		e.guarding.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			return
		}
		time.Sleep(5 * time.Millisecond) // the guard is what is waited for
	}
	t.Fatalf("the chains do not stand after %v", patient)
}

// TestLocked: with every chain gone and nobody to see it, nothing opens that was
// not allowed: not outside, not the host, not a neighbour. What was open goes on.
func TestLocked(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id, other := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443")), w.sandbox(e, 1, rules(t, "open"))
	good, err := w.dial(id, "tcp", "203.0.113.1:443", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer good.Close()
	l, err := net.Listen("tcp4", "198.51.100.1:8443")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	e.guarding.Lock() // the guard looks away
	for name, flush := range map[string]func(){
		"filter": func() { w.run("iptables", "-F") },
		"all":    func() { flushAll(w) },
	} {
		t.Run(name, func(t *testing.T) {
			flush()
			for _, to := range []string{"203.0.113.2:80", "198.51.100.1:8443", addr(1).String() + ":80"} {
				if c, err := w.dial(id, "tcp", to, 300*time.Millisecond); err == nil {
					c.Close()
					t.Errorf("%s opened", to)
				}
			}
			if c, err := w.dial(other, "tcp", addr(0).String()+":80", 300*time.Millisecond); err == nil {
				c.Close()
				t.Error("a neighbour opened")
			}
			if err := echo(good, patient); err != nil {
				t.Errorf("a flow from before: %v", err)
			}
		})
	}
	e.guarding.Unlock()
	stands(t, e)
	w.allowed(id, "tcp", "203.0.113.1:443")
	w.refused(id, "tcp", "203.0.113.2:80")
	if err := echo(good, patient); err != nil {
		t.Errorf("a flow from before, with the chains back: %v", err)
	}
}

// TestLockedResolver: without the rules that redirect port 53, a flow to the resolver does
// not become a flow to the server that it names.
func TestLockedResolver(t *testing.T) {
	w := newWorld(t)
	w.upstream()
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "none"))
	e.guarding.Lock() // the guard looks away
	defer e.guarding.Unlock()
	// So that what opens is answered.
	masquerade := []string{"POSTROUTING", "-s", inst.Pool().String(), "-j", "MASQUERADE"}
	for _, table := range []string{"nat", "filter"} { // without both, the lock is left
		w.run("iptables", "-t", table, "-F")
		w.run("iptables", append([]string{"-t", "nat", "-A"}, masquerade...)...)
		defer w.try("iptables", append([]string{"-t", "nat", "-D"}, masquerade...)...)
		if c, err := w.dial(id, "tcp", "203.0.113.53:53", 300*time.Millisecond); err == nil {
			c.Close()
			t.Errorf("without the table %s a name server outside opened", table)
		}
	}
}

// TestLockComesBack: after `nft flush ruleset`, which takes all.
func TestLockComesBack(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	flushRuleset(t)
	stands(t, e)
	if err := locked(e); err != nil {
		t.Error(err)
	}
	w.carries("sb-" + id) // its link was down
	w.in(w.guests[id], func() { w.carries("eth0") })
	w.allowed(id, "tcp", "203.0.113.1:443")
	w.refused(id, "tcp", "203.0.113.2:80")
}

// TestLockBeforeChains: whenever in a check all is flushed, the chains do not stand again
// before the lock does.
func TestLockBeforeChains(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	w.sandbox(e, 0, rules(t, "none"))
	for i := range 20 {
		var checking sync.WaitGroup
		checking.Go(func() { e.check(t.Context()) })
		time.Sleep(time.Duration(i) * 200 * time.Microsecond) // so that some fall between two looks
		flushRuleset(t)
		stands(t, e)
		if err := locked(e); err != nil {
			t.Errorf("flushed after %d x 0.2 ms: the chains stand: %v", i, err)
		}
		checking.Wait()
	}
}

// flushRuleset is `nft flush ruleset`: it takes the lock and, unless they are legacy, the
// chains.
func flushRuleset(t *testing.T) {
	t.Helper()
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	c.FlushRuleset()
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
}

// locked fails if the lock does not stand now.
func locked(e *Engine) error {
	e.guarding.Lock()
	defer e.guarding.Unlock()
	if ok, _, err := e.lock.standing(); !ok || err != nil {
		return fmt.Errorf("the lock does not stand: %v", err)
	}
	return nil
}

// TestSetsComeBack: emptied, and destroyed together with the chains that hold
// them. Cut off is not open, and does not last.
func TestSetsComeBack(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id, left := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443")), w.sandbox(e, 1, rules(t, "open"))
	for name, deed := range map[string]func(){
		"flush": func() { w.run("ipset", "flush") },
		"destroy": func() {
			flushAll(w)
			for _, table := range tables {
				w.run("iptables", "-t", table, "-X")
			}
			w.run("ipset", "destroy")
		},
	} {
		t.Run(name, func(t *testing.T) {
			e.guarding.Lock()
			deed()
			e.guarding.Unlock()
			e.check(t.Context())
			stands(t, e)
			w.allowed(id, "tcp", "203.0.113.1:443")
			w.refused(id, "tcp", "203.0.113.2:80")
		})
	}
	if err := e.Unregister(t.Context(), left); err != nil {
		t.Fatal(err)
	}
	e.check(t.Context())
	if ids, err := e.ListRegistered(t.Context()); err != nil || len(ids) != 1 || ids[0] != id {
		t.Errorf("registered are %v, %v", ids, err)
	}
}

// TestOpenedMeanwhile: what opened while chains and lock were gone does not
// stay open; what was allowed does.
func TestOpenedMeanwhile(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443", "allowed.test:8080"))
	good, err := w.dial(id, "tcp", "203.0.113.1:443", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer good.Close()
	const none, byName = "203.0.113.2:80", "203.0.113.1:8080" // no rule; one whose name nobody has heard
	for name, c := range map[string]struct {
		flush func()
		to    []string
	}{
		"filter":            {func() { w.run("iptables", "-F") }, []string{none}},
		"filter and mangle": {func() { w.run("iptables", "-F"); w.run("iptables", "-t", "mangle", "-F") }, []string{none, byName}},
		"all":               {func() { flushAll(w) }, []string{none, byName}}, // the kernel tracks nothing then
	} {
		t.Run(name, func(t *testing.T) { openedMeanwhile(t, w, e, id, good, c.flush, c.to) })
	}
}

func openedMeanwhile(t *testing.T, w *world, e *Engine, id string, good net.Conn, flush func(), opens []string) {
	e.guarding.Lock() // the guard looks away
	if err := e.lock.remove(); err != nil {
		t.Error(err)
	}
	flush()
	bad := map[string]net.Conn{}
	for _, to := range opens {
		c, err := w.dial(id, "tcp", to, patient)
		if err != nil {
			e.guarding.Unlock()
			t.Fatalf("with the chains flushed: %v; the test opens nothing", err)
		}
		defer c.Close()
		bad[to] = c
	}
	e.guarding.Unlock()
	e.check(t.Context())
	for to, c := range bad {
		if err := echo(c, 300*time.Millisecond); err == nil {
			t.Errorf("a flow to %s that is not allowed so goes on, since it opened while the chains were gone", to)
		}
	}
	if err := echo(good, patient); err != nil {
		t.Errorf("an allowed flow: %v", err)
	}
	w.allowed(id, "tcp", "203.0.113.1:443")
}

// TestOpenedWhileDown: without its link a sandbox has no route, and what comes for it
// leaves by another one. The flows that this makes do not let the sandbox answer later.
func TestOpenedWhileDown(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	listen := func(ns vns.NsHandle, at string) (c net.PacketConn) {
		t.Helper()
		var err error
		w.in(ns, func() { c, err = net.ListenPacket("udp4", at) })
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	inside, outside := listen(w.guests[id], "0.0.0.0:4000"), listen(w.outside, "203.0.113.2:4001")
	to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr(0), 4000))
	stop := make(chan struct{})
	var flood sync.WaitGroup
	flood.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				outside.WriteTo([]byte("knock"), to) //nolint:errcheck // it is dropped on its way anyhow
				time.Sleep(50 * time.Microsecond)
			}
		}
	})
	t.Cleanup(func() { close(stop); flood.Wait() })
	for range 5 {
		e.guarding.Lock() // the guard looks away
		err := e.lock.remove()
		flushAll(w)
		e.guarding.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		e.check(t.Context())
		if _, err := inside.WriteTo([]byte("secret"), outside.LocalAddr()); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
		outside.SetReadDeadline(time.Now().Add(200 * time.Millisecond)) //nolint:errcheck // shows in the read
		if n, _, err := outside.ReadFrom(make([]byte, 100)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("a sandbox sent %d bytes to where it may not, as an answer (%v)", n, err)
		}
	}
}

// TestGuardHears: nobody waits ten seconds for the chains.
func TestGuardHears(t *testing.T) {
	w := newWorld(t)
	if !strings.Contains(w.run("iptables", "-V"), "nf_tables") {
		t.Fatal("this iptables is not that of nf_tables, of which the kernel tells")
	}
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	least := never
	for range 3 {
		flushAll(w)
		start := time.Now()
		stands(t, e)
		least = min(least, time.Since(start))
		w.refused(id, "tcp", "203.0.113.1:80")
	}
	if least > 2*time.Second { // each may be late on a busy host, not all
		t.Errorf("mended after %v at the soonest", least)
	}
}

// TestGuardLooks: what it does not hear of is mended all the same.
func TestGuardLooks(t *testing.T) {
	w := newWorld(t)
	e := w.openEvery(20 * time.Millisecond)
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	if err := e.watch.close(); err != nil { // it is deaf
		t.Fatal(err)
	}
	flushAll(w)
	stands(t, e)
	w.refused(id, "tcp", "203.0.113.1:80")
	e.watch = nil // for Close
}

// TestHeldLinksAreTriedAgain: a link that did not come up is not forgotten.
func TestHeldLinksAreTriedAgain(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "open"))
	e.guarding.Lock()
	down, err := e.linksDown()
	if err != nil || len(down) != 1 {
		t.Fatal(down, err)
	}
	routes := down[0].routes
	down[0].routes = []netlink.Route{{LinkIndex: down[0].link.Attrs().Index}} // one that the kernel refuses
	e.held = down
	e.guarding.Unlock()
	if err := e.restore(t.Context()); err == nil {
		t.Fatal("a link without its route counts as up")
	}
	down[0].routes = routes
	if err := e.restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.carries("sb-" + id)
	w.allowed(id, "tcp", "203.0.113.1:443")
}

// instead has the Engine make its chains by a script of sh, until mend is called.
func (w *world) instead(e *Engine, script string) (mend func()) {
	w.t.Helper()
	path := filepath.Join(w.t.TempDir(), "iptables-restore")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o700); err != nil {
		w.t.Fatal(err)
	}
	set := func(to string) string {
		e.guarding.Lock()
		defer e.guarding.Unlock()
		was := e.chains.restorer
		e.chains.restorer = to
		return was
	}
	whole := set(path)
	return func() { set(whole) }
}

// breakIptables has the Engine make no chains until mend is called. tries is how
// often it tried.
func (w *world) breakIptables(e *Engine) (mend func(), tries func() int) {
	w.t.Helper()
	tried := filepath.Join(w.t.TempDir(), "tried")
	return w.instead(e, "echo try >>"+tried+"; echo broken >&2; exit 4\n"), func() int {
		b, err := os.ReadFile(tried)
		if err != nil && !os.IsNotExist(err) {
			w.t.Fatal(err)
		}
		return strings.Count(string(b), "try")
	}
}

// TestCut: where nothing keeps sandboxes in and the chains cannot be made, the
// links are down and whoever would raise one is told so, also by Close; what
// only this Engine knows of them is given back where that is safe.
func TestCut(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	up := func() bool { return strings.Contains(w.run("ip", "link", "show", "sb-"+id), ",UP") }
	mend, _ := w.breakIptables(e)
	e.guarding.Lock()
	if err := e.lock.remove(); err != nil {
		t.Fatal(err)
	}
	flushAll(w)
	e.guarding.Unlock()
	if err := e.restore(t.Context()); err == nil {
		t.Fatal("chains were made without iptables")
	}
	if up() || !e.Cut() {
		t.Fatalf("with nothing to keep it in: up %v, cut %v", up(), e.Cut())
	}
	mend()
	stands(t, e)
	if !up() || e.Cut() {
		t.Errorf("with the chains back: up %v, cut %v", up(), e.Cut())
	}
	w.carries("sb-" + id)
	w.in(w.guests[id], func() { w.carries("eth0") })
	w.allowed(id, "tcp", "203.0.113.1:443")

	// One that did not come up, and a daemon that ends.
	e.guarding.Lock()
	down, err := e.linksDown()
	e.held = down
	e.guarding.Unlock()
	if err != nil || len(down) != 1 {
		t.Fatal(down, err)
	}
	e.Close()
	if !up() {
		t.Error("a link that only the ended Engine knew of stays down")
	}
	w.open()
	w.carries("sb-" + id)
}

// TestInFrontAgain: somebody who put his rule before ours too often is let be,
// but not for the life of the daemon.
func TestInFrontAgain(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	e.guarding.Lock()
	defer e.guarding.Unlock()
	behind := func() int {
		all, err := e.chains.save(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		_, n := e.chains.ours(all)
		return n
	}
	look := func() {
		e.guarding.Unlock()
		defer e.guarding.Lock()
		if err := e.restore(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for range maxMoves {
		w.run("iptables", "-I", "FORWARD", "-j", "RETURN")
		look()
		if n := behind(); n != 0 {
			t.Fatalf("behind %d rules", n)
		}
		w.run("iptables", "-D", "FORWARD", "-j", "RETURN")
	}
	w.run("iptables", "-I", "FORWARD", "-j", "RETURN")
	defer w.try("iptables", "-D", "FORWARD", "-j", "RETURN")
	look()
	if behind() == 0 {
		t.Fatal("no end of putting the hooks in front")
	}
	e.chains.moved = e.chains.moved.Add(-2 * movesPause)
	look()
	if n := behind(); n != 0 {
		t.Errorf("behind %d rules an hour later", n)
	}
}

// TestLeftovers: a daemon that died between unregistering a sandbox and
// closing its flows leaves none to the next owner of the address.
func TestLeftovers(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	gone, stays := w.sandbox(e, 0, rules(t, "open")), w.sandbox(e, 1, rules(t, "open"))
	left, err := w.dial(gone, "tcp", "203.0.113.1:443", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer left.Close()
	kept, err := w.dial(stays, "tcp", "203.0.113.1:443", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	e.mu.Lock()
	e.byID[gone].leaving = true // as Unregister does first: the guard does not put it back
	e.mu.Unlock()
	if err := e.delSource(gone, addr(0)); err != nil {
		t.Fatal(err)
	}
	e.Close() // and nobody closed its flows
	if err := Recovered(w.open()); err != nil {
		t.Fatal(err)
	}
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range flows {
		if f.Forward.SrcIP.String() == addr(0).String() {
			t.Errorf("left: %v", f)
		}
	}
	if err := echo(kept, patient); err != nil {
		t.Errorf("a flow of another: %v", err)
	}
}

// line connects a guest with a server outside that the test is, and returns both ends.
func (w *world) line(id, at string) (near, far net.Conn) {
	w.t.Helper()
	accepted := make(chan net.Conn, 1)
	w.in(w.outside, func() {
		l, err := net.Listen("tcp4", at)
		if err != nil {
			w.t.Fatal(err)
		}
		w.t.Cleanup(func() { l.Close() })
		go func() {
			defer close(accepted)
			if c, err := l.Accept(); err == nil {
				accepted <- c
			}
		}()
	})
	near, err := w.connect(w.guests[id], "tcp", at, patient)
	if err != nil {
		w.t.Fatal(err)
	}
	select {
	case far = <-accepted:
	case <-time.After(hosttest.Patient(patient)):
	}
	if far == nil {
		w.t.Fatalf("the guest is connected, and the server at %s accepted no connection", at)
	}
	w.t.Cleanup(func() { near.Close(); far.Close() })
	return near, far
}

// hears fails the test unless what one end of a connection says comes to the other.
func hears(t *testing.T, what string, from, to net.Conn) {
	t.Helper()
	to.SetReadDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in the read
	word := make([]byte, 4)
	if _, err := from.Write([]byte("word")); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if _, err := io.ReadFull(to, word); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// TestServerSpeaks: the server of an allowed connection may be the first that sends after
// chains and sets were destroyed. Without an entry in conntrack's table its packet would be
// the host's own, which resets the connection.
func TestServerSpeaks(t *testing.T) {
	t.Run("while no daemon ran", func(t *testing.T) {
		w := newWorld(t)
		e := w.open()
		all := rules(t, "rules", "203.0.113.1:9090")
		id := w.sandbox(e, 0, all)
		near, far := w.line(id, "203.0.113.1:9090")
		hears(t, "before", far, near)
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		flushAll(w)
		for _, table := range tables {
			w.run("iptables", "-t", table, "-X")
		}
		w.run("ipset", "destroy")
		hears(t, "without chains", far, near)
		e = w.open()
		hears(t, "before the next daemon knows the sandbox", far, near)
		if err := e.Register(t.Context(), id, addr(0), all, nil); err != nil {
			t.Fatal(err)
		}
		if err := Recovered(e); err != nil {
			t.Fatal(err)
		}
		hears(t, "after that", far, near)
		hears(t, "the other way", near, far)
	})
	for _, c := range []struct {
		name, opens, then string
		answered          time.Time // when DNS answered with the address
	}{
		{"through the proxy", "allowed.test:9090", "allowed.test:9090", time.Now()},
		{"by a lease that has ended", "203.0.113.1:9090", "allowed.test", time.Now().Add(-3 * time.Hour)},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			e := w.open()
			id := w.sandbox(e, 0, rules(t, "rules", c.opens))
			e.lookup(addr(0)).leases.Add("allowed.test", []netip.Addr{netip.MustParseAddr("203.0.113.1")}, time.Hour, c.answered)
			near, far := w.line(id, "203.0.113.1:9090")
			if err := e.Register(t.Context(), id, addr(0), rules(t, "rules", c.then), nil); err != nil {
				t.Fatal(err)
			}
			hears(t, "before", far, near)
			e.guarding.Lock()
			flushAll(w)
			e.guarding.Unlock()
			e.check(t.Context())
			hears(t, "after a flush", far, near)
			hears(t, "the other way", near, far)
		})
	}
	t.Run("by a lease that is lost", func(t *testing.T) {
		w := newWorld(t)
		e := w.open()
		byName := rules(t, "rules", "allowed.test")
		id := w.sandbox(e, 0, byName)
		e.lookup(addr(0)).leases.Add("allowed.test", []netip.Addr{netip.MustParseAddr("203.0.113.1")}, time.Hour, time.Now())
		near, far := w.line(id, "203.0.113.1:9090")
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		e = w.open()
		if err := e.Register(t.Context(), id, addr(0), byName, nil); err != nil {
			t.Fatal(err)
		}
		hears(t, "before", far, near)
		e.guarding.Lock()
		flushAll(w)
		e.guarding.Unlock()
		e.check(t.Context())
		hears(t, "after a flush", far, near)
	})
}

// TestLeasesWithoutLock: while neither chains nor lock stood, a flow may have opened after the
// lease that would allow it had ended.
func TestLeasesWithoutLock(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "allowed.test"))
	e.lookup(addr(0)).leases.Add("allowed.test", []netip.Addr{netip.MustParseAddr("203.0.113.1")}, time.Hour, time.Now().Add(-3*time.Hour))
	e.guarding.Lock() // the guard looks away
	near, far := func() (near, far net.Conn) {
		defer e.guarding.Unlock()
		if err := e.lock.remove(); err != nil {
			t.Fatal(err)
		}
		w.run("iptables", "-F")
		w.run("iptables", "-t", "mangle", "-F")
		return w.line(id, "203.0.113.1:9090")
	}()
	hears(t, "without chains and lock", near, far)
	if n := w.touching(e, addr(0)); n != 1 {
		t.Fatalf("the kernel tracks %d flows of the sandbox", n)
	}
	e.check(t.Context())
	if n := w.touching(e, addr(0)); n != 0 {
		t.Errorf("it goes on: the kernel tracks %d flows of the sandbox", n)
	}
}

// TestFlushedInRecovery: chains that are gone while the daemon registers its sandboxes cost no
// sandbox a flow, because the lock stands. When recovery ends, the flows of addresses that no
// sandbox has end.
func TestFlushedInRecovery(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	all := rules(t, "rules", "203.0.113.1:9090", "203.0.113.1:9091")
	first, second := w.sandbox(e, 0, all), w.sandbox(e, 1, all)
	near, far := w.line(first, "203.0.113.1:9090")
	near2, far2 := w.line(second, "203.0.113.1:9091")
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	e = w.open()
	if err := e.Register(t.Context(), first, addr(0), all, nil); err != nil {
		t.Fatal(err)
	}
	flush := func() {
		e.guarding.Lock()
		flushAll(w)
		e.guarding.Unlock()
		e.check(t.Context())
	}
	flush()
	hears(t, "of the first", far, near)
	hears(t, "of one that is not registered yet", far2, near2)
	if err := e.delSource(second, addr(1)); err != nil { // it has ended
		t.Fatal(err)
	}
	if err := Recovered(e); err != nil {
		t.Fatal(err)
	}
	hears(t, "of the first, after the recovery", near, far)
	if n := w.touching(e, addr(1)); n != 0 {
		t.Errorf("the kernel tracks %d flows of no sandbox", n)
	}
}

// TestLockTranslates: the lock's chain of NAT comes back. Without it the lock stands.
func TestLockTranslates(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	e.guarding.Lock()
	defer e.guarding.Unlock()
	c.DelChain(&nftables.Chain{Name: natChain, Table: e.lock.table()})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	if there, err := e.lock.translates(); there || err != nil {
		t.Fatalf("the chain was deleted: %v, %v", there, err)
	}
	if !e.keepLock() {
		t.Error("without the chain of NAT the lock does not count as standing")
	}
	if there, err := e.lock.translates(); !there || err != nil {
		t.Errorf("after the guard has looked: %v, %v", there, err)
	}
}

// TestLockKeepsTranslation: while a lock is replaced, and its chain of NAT is the only one of
// the host, the packets of an open connection are translated.
func TestLockKeepsTranslation(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:9090"))
	near, far := w.line(id, "203.0.113.1:9090")
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	w.run("sh", "-c", `printf '*filter\nCOMMIT\n*nat\nCOMMIT\n*mangle\nCOMMIT\n*raw\nCOMMIT\n' | iptables-restore`)
	hears(t, "without chains", near, far)
	replaced := make(chan error, 1)
	go func() {
		for range 30 {
			if _, err := e.lock.install(nil); err != nil {
				replaced <- err
				return
			}
		}
		replaced <- nil
	}()
	for done := false; !done; {
		hears(t, "while the lock is replaced", near, far)
		hears(t, "the other way", far, near)
		select {
		case err := <-replaced:
			if done = true; err != nil {
				t.Fatal(err)
			}
		default:
		}
	}
}

// name has Config.Uplinks name these.
func (w *world) name(links ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.uplinks = links
}

// TestEachSet destroys sets one by one, each with only those chains that hold it.
func TestEachSet(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	sets := strings.Fields(w.run("ipset", "list", "-n"))
	if len(sets) == 0 {
		t.Fatal("no sets")
	}
	for _, deed := range append(sets, "as the review did it") {
		t.Run(deed, func(t *testing.T) {
			e.guarding.Lock()
			w.run("iptables", "-F")
			if slices.Contains(sets, deed) {
				w.run("iptables", "-t", "raw", "-F")
				w.run("ipset", "destroy", deed)
			} else {
				w.run("sh", "-c", "for s in $(ipset list -n); do ipset destroy $s || :; done")
			}
			e.guarding.Unlock()
			stands(t, e)
			e.check(t.Context()) // sets nobody hears of
			w.allowed(id, "tcp", "203.0.113.1:443")
			w.refused(id, "tcp", "203.0.113.2:80")
		})
	}
}

// TestBackOff: chains that cannot be made are not tried several times a second,
// what is left of the old ones stays in place, and they are made when they can be.
func TestBackOff(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	mend, tries := w.breakIptables(e)
	w.run("iptables", "-F", "FORWARD")
	time.Sleep(3 * time.Second) // the guard tries: at 0, 0.2, 0.6, 1.4, 3.0 s
	if n := tries(); n < 2 || n > 5 {
		t.Errorf("tried %d times in three seconds", n)
	}
	for table, chain := range map[string]string{"raw": "RAW", "mangle": "PRE", "nat": "NAT"} {
		if have := w.run("iptables", "-t", table, "-S", "PREROUTING"); !strings.Contains(have, "-j "+inst.Chain(chain)) {
			t.Errorf("table %s lost its hook:\n%s", table, have)
		}
	}
	mend()
	if wait := e.untilRetry(); wait > 5*time.Second {
		t.Errorf("the next try is in %v", wait)
	}
	stands(t, e)
	w.allowed(id, "tcp", "203.0.113.1:443")
	w.refused(id, "tcp", "203.0.113.2:80")
}

// TestFlushedMeanwhile: what somebody takes away while the chains are made is
// not taken for what they should be.
func TestFlushedMeanwhile(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	mend := w.instead(e, "iptables-restore \"$@\" && exec iptables -t mangle -F\n")
	w.run("iptables", "-F", "FORWARD")
	if err := e.restore(t.Context()); err == nil {
		t.Error("half of the chains count as installed")
	}
	mend()
	stands(t, e)
	w.allowed(id, "tcp", "203.0.113.1:443")
	w.refused(id, "tcp", "203.0.113.2:80")
}

// TestOlderChains: what an older version had, and this one has not, goes.
func TestOlderChains(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	e.Close()
	chain, set := inst.Chain("UPLINK"), inst.Set(oldUplinks)
	for _, c := range []string{
		"ipset create " + set + " hash:net,iface", "iptables -N " + chain,
		"iptables -A " + chain + " -m set --match-set " + set + " src,src -j DROP",
		"iptables -I FORWARD ! -i sb-+ ! -o sb-+ -j " + chain,
	} {
		f := strings.Fields(c)
		w.run(f[0], f[1:]...)
	}
	e = w.open()
	stands(t, e)
	if left := w.run("iptables-save") + w.run("ipset", "list", "-n"); strings.Contains(left, chain) || strings.Contains(left, set) {
		t.Errorf("left:\n%s", left)
	}
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	w.allowed(id, "tcp", "203.0.113.1:443")
}

// TestUplink: a link that forwards for the sake of sandboxes makes the host no
// router for others.
func TestUplink(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "open"))
	lan := w.newNS()
	defer lan.Close()
	defer w.try("ip", "link", "del", "lan0")
	w.ip(lan, "link add lan0 type veth peer name eth0 netns NS")
	w.run("ip", "addr", "add", "192.0.2.1/24", "dev", "lan0")
	w.run("ip", "link", "set", "lan0", "up")
	w.in(lan, func() {
		for _, c := range []string{
			"link set lo up", "addr add 192.0.2.2/24 dev eth0", "link set eth0 up",
			"route add default via 192.0.2.1",
		} {
			w.run("ip", strings.Fields(c)...)
		}
		w.carries("eth0")
	})
	w.carries("lan0")
	w.write("net/ipv4/conf/lan0/forwarding", "1")
	w.serve(lan, "192.0.2.2", 80)
	const short = 500 * time.Millisecond // what is dropped takes all of it
	in := func(within time.Duration) error {
		c, err := w.connect(w.outside, "tcp", "192.0.2.2:80", within)
		if err != nil {
			return err
		}
		defer c.Close()
		return echo(c, patient)
	}
	for range 2 {
		for _, links := range [][]string{nil, {"up0"}} {
			w.name(links...)
			e.check(t.Context())
			within := patient
			if links != nil {
				within = short
			}
			if err := in(within); (err == nil) != (links == nil) {
				t.Errorf("from outside to another network of the host, with %v closed: %v", links, err)
			}
			w.allowed(id, "tcp", "203.0.113.1:443")
		}
	}
	closed := func(when string) {
		t.Helper()
		if err := in(short); err == nil {
			t.Errorf("from outside to another network of the host, %s: it opens", when)
		}
	}
	e.guarding.Lock() // the guard looks away
	flushAll(w)
	closed("with all chains flushed")
	e.guarding.Unlock()
	stands(t, e)

	// One that comes to forward is closed before it does, not ten seconds later.
	w.name()
	e.check(t.Context())
	if err := in(patient); err != nil {
		t.Fatalf("with nothing closed: %v", err)
	}
	many := []string{"up0"}
	for i := range 100 {
		many = append(many, fmt.Sprintf("gone%d", i))
	}
	w.name(many...)
	if err := e.CloseUplinks(); err != nil {
		t.Fatal(err)
	}
	closed("with a hundred links closed")
	w.mu.Lock()
	w.unread = errors.New("no such file")
	w.mu.Unlock()
	if err := e.CloseUplinks(); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("what cannot be read counts as closed: %v", err)
	}
	if err := e.lock.remove(); err != nil {
		t.Fatal(err)
	}
	e.check(t.Context())
	closed("with names that cannot be read and the lock taken away")
	e.Close()
	flushAll(w)
	closed("with all chains flushed and nobody there")
	w.mu.Lock()
	w.unread = nil
	w.mu.Unlock()
	w.open()
	closed("after the next start")
	// What leaves by it, and the replies to that, are the business of others.
	w.in(lan, func() {
		c, err := net.DialTimeout("tcp", "198.51.100.2:80", patient)
		if err != nil {
			t.Errorf("from another network of the host to outside: %v", err)
			return
		}
		c.Close()
	})
}

// TestFlushStorm: who takes away all that iptables has, again and again, also while
// it is made, breaks no connection by it.
func TestFlushStorm(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	kept, err := w.dial(id, "tcp", "203.0.113.1:443", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	storm := make(chan struct{})
	t.Cleanup(func() { <-storm })
	go func() {
		defer close(storm)
		for i := 0; i < 60 && t.Context().Err() == nil; i++ {
			w.try("sh", "-c", `printf '*filter\nCOMMIT\n*nat\nCOMMIT\n*mangle\nCOMMIT\n*raw\nCOMMIT\n' | iptables-restore`)
			time.Sleep(time.Duration(i) * time.Millisecond) // so that some fall into an install
		}
	}()
	for over := false; !over; {
		select {
		case <-storm:
			over = true
		default:
		}
		if err := echo(kept, patient); err != nil {
			t.Fatalf("a connection broke: %v", err)
		}
	}
	stands(t, e)
	w.allowed(id, "tcp", "203.0.113.1:443")
	w.refused(id, "tcp", "203.0.113.2:80")
}
