package egress

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/egress/conntrack"
)

// TestLedger: each flow counts from the moment it is let in, and until a count that
// began after that does not find it.
func TestLedger(t *testing.T) {
	l := newLedger(Config{MaxOpenFlows: 3, MaxFlows: 5 + dnsInFlight}, nil)
	a, b := addr(0), addr(1)
	admit := func(from netip.Addr, want ...string) {
		t.Helper()
		for i, w := range want {
			if over := l.admit(from); over != w {
				t.Errorf("flow %d: %q, want %q", i+1, over, w)
			}
		}
	}
	const open, all = "limit of 3 open flows", "limit of 69 flows, closed ones included"
	if !l.idle() {
		t.Error("there is something to count before the first flow")
	}
	admit(a, "", "", "", open, open)
	admit(b, "")
	l.begin()
	admit(b, "")
	l.end(map[netip.Addr]tally{a: {open: 1, all: 4}, b: {open: 1, all: 1}}) // two of a are closed, one of those twice
	admit(a, "", all)
	admit(b, "", open) // that which was let in during the count counts on
	l.begin()          // a count that fails forgets nothing
	l.begin()
	admit(a, all)
	admit(b, open)
	l.end(nil)
	if !l.idle() {
		t.Error("no flow is left, and there is something to count")
	}
	admit(a, "", "", "", open)
	// A sandbox that this daemon let nothing in for: its flows are older.
	l.begin()
	l.end(map[netip.Addr]tally{b: {open: 3, all: 3}})
	admit(a, "")
	admit(b, open)
}

// TestLedgerCrawler: 100 short connections a second, each with a DNS query, never
// reach the default limits, if closed flows stay as long as they may.
func TestLedgerCrawler(t *testing.T) {
	l := newLedger(Config{MaxOpenFlows: 2048, MaxFlows: 4096}, nil)
	a := addr(0)
	type flow struct{ query, begin, end int } // milliseconds
	var table []flow
	for now := 0; now < 60_000; now += 10 {
		for query := range 2 {
			if over := l.admit(a); over != "" {
				t.Fatalf("after %d ms: %s", now, over)
			}
			table = append(table, flow{query, now, now + int((countEvery+closedFor+countEvery)/time.Millisecond)})
		}
		if now%int(countEvery/time.Millisecond) == 0 {
			l.begin()
			var n tally
			for _, f := range table {
				if f.end > now {
					n.all++
					n.open += f.query // as UDP, which has no end
				}
			}
			l.end(map[netip.Addr]tally{a: n})
		}
	}
}

// flood opens n flows from a sandbox without waiting for answers, and calls look now and
// then.
func (w *world) flood(id, network, to string, n int, look func()) {
	w.t.Helper()
	ap := netip.MustParseAddrPort(to)
	sa := &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()}
	kind := map[string]int{"tcp": unix.SOCK_STREAM, "udp": unix.SOCK_DGRAM}[network]
	for i := range n {
		w.in(w.guests[id], func() {
			fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				w.t.Fatal(err)
			}
			defer unix.Close(fd)
			if err := unix.Connect(fd, sa); err == nil && network == "udp" {
				unix.Send(fd, []byte("no query"), 0) //nolint:errcheck // a refusal of the one before
			}
		})
		if i%50 == 49 {
			look()
		}
	}
	look()
}

// entries counts the entries of a sandbox in the table of the "host".
func (w *world) entries(e *Engine, a netip.Addr) (open, all int) {
	w.t.Helper()
	err := conntrack.Each(func() { open, all = 0, 0 }, func(f conntrack.Entry) {
		if f.Src == a {
			all++
			if !f.Closed {
				open++
			}
		}
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return open, all
}

// TestFlowLimits: on whatever port, allowed or denied, a sandbox fills the host's table
// of flows only up to its limits; it is told why; its neighbour does not feel it; and
// what is closed leaves the table.
func TestFlowLimits(t *testing.T) {
	w := newWorld(t)
	w.upstream()
	const maxOpen, maxAll = 100, 300
	e := w.openWith(func(c *Config) { c.MaxOpenFlows, c.MaxFlows = maxOpen, maxAll })
	good := w.sandbox(e, 0, rules(t, "open"))
	for i, c := range []struct {
		network, to string
		leaves      bool // its flows have an end
	}{
		{"tcp", inst.Gateway().String() + ":53", true},
		{"tcp", "8.8.8.8:53", true},
		{"udp", "8.8.8.8:53", true},
		{"tcp", "203.0.113.1:443", true},
		{"tcp", "203.0.113.1:80", true},
		{"tcp", inst.Gateway().String() + ":80", true},
		{"udp", "203.0.113.1:443", false},
	} {
		t.Run(c.network+" "+c.to, func(t *testing.T) {
			bad := w.sandbox(e, i+1, rules(t, "rules", "203.0.113.0/24:443"))
			most := 0
			w.flood(bad, c.network, c.to, 600, func() {
				open, all := w.entries(e, addr(i+1))
				if most = max(most, all); open > maxOpen || all > maxAll {
					t.Fatalf("%d entries of open flows, %d in all", open, all)
				}
			})
			t.Logf("at most %d entries", most)
			w.allowed(good, "tcp", "203.0.113.1:443")
			if a, err := w.ask(good, "udp", "8.8.8.8:53", "one.test.", dns.TypeA, patient); err != nil || a.Rcode != dns.RcodeSuccess {
				t.Errorf("a neighbour asks: %v, %v", a, err)
			}
			if !c.leaves {
				w.refused(bad, c.network, c.to)
				if !w.toldOf(bad, "limit of 100 open flows") {
					t.Error("nobody was told of the limit")
				}
			}
		})
	}
	// The kernel's own count: what is out of time and not removed counts there, too.
	since := time.Now()
	for w.tableSize() > maxOpen+10 { // the flows of UDP, which have no end, and what the neighbour just did
		if time.Since(since) > 10*time.Second {
			t.Fatalf("%d entries 10 s after the last flow closed", w.tableSize())
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Logf("closed flows were gone after %v", time.Since(since))
}

// toldOf reports whether a denial of id for that reason was reported.
func (w *world) toldOf(id, why string) bool {
	for since := time.Now(); time.Since(since) < patient; { // it is reported beside the packet path
		w.mu.Lock()
		for _, d := range w.denied {
			if d.ID == id && d.Rule == why {
				w.mu.Unlock()
				return true
			}
		}
		w.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
	return false
}

// tableSize is how many entries the "host" has.
func (w *world) tableSize() int {
	w.t.Helper()
	b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
	if err != nil {
		w.t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}

// TestUpstreamFlows: the resolver's own queries leave no entries, by UDP and TCP,
// answered or not.
func TestUpstreamFlows(t *testing.T) {
	w := newWorld(t)
	w.upstream()
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "open"))
	for _, name := range []string{"one.test.", "many.test.", "absent.test.", "silent.test."} {
		for _, network := range []string{"udp", "tcp"} {
			if _, err := w.ask(id, network, "8.8.8.8:53", name, dns.TypeA, patient); err != nil {
				t.Fatal(err)
			}
		}
	}
	w.noFlows(e, netip.MustParseAddr("203.0.113.53"))
}

// TestUpstreamRefuses: nor do those that an upstream refuses.
func TestUpstreamRefuses(t *testing.T) {
	w := newWorld(t)
	w.in(w.outside, func() {
		pc, err := net.ListenPacket("udp4", "203.0.113.2:53")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { pc.Close() })
		go (&dns.Server{PacketConn: pc, Handler: truncated}).ActivateAndServe() //nolint:errcheck // ends with the test
	})
	e := w.openWith(func(c *Config) { c.Upstreams = []Upstream{{Addr: netip.MustParseAddrPort("203.0.113.2:53")}} })
	id := w.sandbox(e, 0, rules(t, "open"))
	if a, err := w.ask(id, "udp", "8.8.8.8:53", "one.test.", dns.TypeA, patient); err != nil || a.Rcode != dns.RcodeServerFailure {
		t.Errorf("%v, %v", a, err)
	}
	w.noFlows(e, netip.MustParseAddr("203.0.113.2"))
}

// noFlows waits until no flow to upstream is left.
func (w *world) noFlows(e *Engine, upstream netip.Addr) {
	w.t.Helper()
	// The answer reaches the guest before or after the entry is deleted. The kernel itself keeps
	// one without an answer for half a minute, and a closed one of TCP for ten seconds.
	const within = 8 * time.Second
	for since := time.Now(); ; time.Sleep(time.Millisecond) {
		n := 0
		err := conntrack.Each(func() { n = 0 }, func(f conntrack.Entry) {
			if f.Dst == upstream {
				n++
			}
		})
		if err != nil {
			w.t.Fatal(err)
		}
		if n == 0 {
			return
		}
		if time.Since(since) > within {
			w.t.Fatalf("%d entries of queries to the upstream after %v", n, within)
		}
	}
}

// TestBusyQueue: a sandbox that opens many flows leaves the first queue to others.
func TestBusyQueue(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	bad := w.sandbox(e, 0, rules(t, "none"))
	good := w.sandbox(e, 1, rules(t, "rules", "203.0.113.1:443"))
	const flows = 400
	start := time.Now()
	w.flood(bad, "tcp", "203.0.113.1:443", flows, func() {})
	took := time.Since(start)
	if err := hosttest.Settles(t, func() error { // the kernel may deliver the last ones late
		if n := w.queued(inst.Queue()) + w.queued(inst.BusyQueue()); n < flows {
			return fmt.Errorf("%d of %d flows waited in a queue", n, flows)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	// It may take 64 places at once, and 100 a second.
	most := 64 + int(100*took.Seconds()) + 2
	if most > flows/2 {
		t.Fatalf("%d flows took %v: too long to tell who waited in which queue", flows, took)
	}
	if n := w.queued(inst.Queue()); n > most {
		t.Errorf("%d of %d flows waited in the first queue, want at most %d", n, flows, most)
	}
	before := w.queued(inst.BusyQueue())
	if before < flows-most {
		t.Errorf("%d of %d flows waited in the second queue", before, flows)
	}
	w.allowed(good, "tcp", "203.0.113.1:443")
	if n := w.queued(inst.BusyQueue()); n != before {
		t.Errorf("%d flows of another sandbox waited in the second queue", n-before)
	}
}

// queued is how many packets a queue has had.
func (w *world) queued(num uint16) (n int) {
	w.t.Helper()
	b, err := os.ReadFile(queueFile)
	if err != nil {
		w.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 7 && f[0] == strconv.Itoa(int(num)) {
			if n, err = strconv.Atoi(f[7]); err != nil {
				w.t.Fatal(err)
			}
		}
	}
	return n
}
