package egress

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// flushAll does what an operator does who wants a clean firewall.
func flushAll(w *world) {
	w.t.Helper()
	for _, table := range tables {
		w.run("iptables", "-t", table, "-F")
	}
}

// stands waits until the chains do, by themselves.
func stands(t *testing.T, e *Engine, within time.Duration) {
	t.Helper()
	deadline := time.Now().Add(within)
	for time.Now().Before(deadline) {
		e.guarding.Lock()
		ok, err := e.chains.standing()
		e.guarding.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			return
		}
		time.Sleep(5 * time.Millisecond) // the guard is what is waited for
	}
	t.Fatalf("the chains do not stand after %v", within)
}

// TestOpenedMeanwhile: what opened while the chains were gone does not stay
// open; what was allowed does.
func TestOpenedMeanwhile(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	good, err := w.dial(id, "tcp", "203.0.113.1:443", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer good.Close()
	for name, flush := range map[string]func(){
		"filter": func() { w.run("iptables", "-F") },
		"all":    func() { flushAll(w) }, // the kernel tracks nothing then
	} {
		t.Run(name, func(t *testing.T) { openedMeanwhile(t, w, e, id, good, flush) })
	}
}

func openedMeanwhile(t *testing.T, w *world, e *Engine, id string, good net.Conn, flush func()) {
	e.guarding.Lock() // the guard looks away
	flush()
	bad, err := w.dial(id, "tcp", "203.0.113.2:80", time.Second)
	e.guarding.Unlock()
	if err != nil {
		t.Fatalf("with the chains flushed: %v; the test opens nothing", err)
	}
	defer bad.Close()
	e.check(t.Context())
	if err := echo(bad, 300*time.Millisecond); err == nil {
		t.Error("a flow that no rule allows goes on, since it opened while the chains were gone")
	}
	if err := echo(good, time.Second); err != nil {
		t.Errorf("an allowed flow: %v", err)
	}
	w.allowed(id, "tcp", "203.0.113.1:443")
}

// TestGuardHears: nobody waits ten seconds for the chains.
func TestGuardHears(t *testing.T) {
	w := newWorld(t)
	if !strings.Contains(w.run("iptables", "-V"), "nf_tables") {
		t.Fatal("this iptables is not that of nf_tables, of which the kernel tells")
	}
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	for range 3 {
		flushAll(w)
		stands(t, e, 2*time.Second)
		w.refused(id, "tcp", "203.0.113.1:80")
	}
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

// TestInFrontAgain: somebody who put his rule before ours too often is let be,
// but not for the life of the daemon.
func TestInFrontAgain(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	e.guarding.Lock()
	defer e.guarding.Unlock()
	behind := func() int {
		all, err := e.chains.save()
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
	left, err := w.dial(gone, "tcp", "203.0.113.1:443", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer left.Close()
	kept, err := w.dial(stays, "tcp", "203.0.113.1:443", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	if err := e.delSource(gone, addr(0)); err != nil {
		t.Fatal(err)
	}
	e.Close() // and nobody closed its flows
	w.open()
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range flows {
		if f.Forward.SrcIP.String() == addr(0).String() {
			t.Errorf("left: %v", f)
		}
	}
	if err := echo(kept, time.Second); err != nil {
		t.Errorf("a flow of another: %v", err)
	}
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
		for _, c := range []string{"link set lo up", "addr add 192.0.2.2/24 dev eth0", "link set eth0 up", "route add default via 192.0.2.1"} {
			w.run("ip", strings.Fields(c)...)
		}
		w.carries("eth0")
	})
	w.carries("lan0")
	w.write("net/ipv4/conf/lan0/forwarding", "1")
	w.serve(lan, "192.0.2.2", 80)
	in := func() (err error) {
		w.in(w.outside, func() {
			var c net.Conn
			if c, err = net.DialTimeout("tcp", "192.0.2.2:80", 500*time.Millisecond); err == nil {
				err = echo(c, time.Second)
				c.Close()
			}
		})
		return err
	}
	for range 2 {
		for _, links := range [][]string{nil, {"up0"}} {
			w.mu.Lock()
			w.uplinks = links
			w.mu.Unlock()
			e.check(t.Context())
			if err := in(); (err == nil) != (links == nil) {
				t.Errorf("from outside to another network of the host, with %v closed: %v", links, err)
			}
			w.allowed(id, "tcp", "203.0.113.1:443")
		}
	}
	// What leaves by it, and the replies to that, are the business of others.
	w.in(lan, func() {
		c, err := net.DialTimeout("tcp", "198.51.100.2:80", time.Second)
		if err != nil {
			t.Errorf("from another network of the host to outside: %v", err)
			return
		}
		c.Close()
	})
}
