package egress

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sandboxd/sandboxd/pkg/egress/flowlog"
)

// linkTraffic is what the kernel says of a sandbox's link, from the sandbox's side.
func (w *world) linkTraffic(id string) (t flowlog.Traffic) {
	w.t.Helper()
	for name, n := range map[string]*uint64{
		"rx_bytes": &t.TxBytes, "tx_bytes": &t.RxBytes, "rx_packets": &t.TxPackets, "tx_packets": &t.RxPackets,
	} {
		b, err := os.ReadFile("/sys/class/net/sb-" + id + "/statistics/" + name)
		if err == nil {
			_, err = fmt.Sscan(string(b), n)
		}
		if err != nil {
			w.t.Fatal(err)
		}
	}
	return t
}

// wantTraffic compares a log with the link's own counters, to which links that are gone
// have added.
func (w *world) wantTraffic(e *Engine, id string, gone flowlog.Traffic) {
	w.t.Helper()
	least := w.linkTraffic(id)
	got := e.FlowLog.Report(id).Traffic
	w.between(got, least, w.linkTraffic(id), gone)
}

// between holds that traffic is what a link's counters had between two looks, since the last
// packets of a connection come late, and what links that are gone have added.
func (w *world) between(got, least, most, gone flowlog.Traffic) {
	w.t.Helper()
	for _, n := range [][4]uint64{
		{least.RxBytes, got.RxBytes, most.RxBytes, gone.RxBytes},
		{least.TxBytes, got.TxBytes, most.TxBytes, gone.TxBytes},
		{least.RxPackets, got.RxPackets, most.RxPackets, gone.RxPackets},
		{least.TxPackets, got.TxPackets, most.TxPackets, gone.TxPackets},
	} {
		if n[1] < n[0]+n[3] || n[1] > n[2]+n[3] || n[0] == 0 {
			w.t.Errorf("the log has %+v; the link %+v, then %+v, and links before it %+v", got, least, most, gone)
			return
		}
	}
}

// wantFlows holds that a log has exactly these destinations, as "203.0.113.1:443/tcp +" for
// one that was allowed, "-" for one that was denied, and that no connection is missing in
// its total. A SYN that is sent again counts again, so more of them are no fault.
func wantFlows(t *testing.T, r flowlog.Report, want ...string) {
	t.Helper()
	var allowed, denied uint64
	var got []string
	for _, f := range r.Flows {
		allowed, denied = allowed+f.Allowed, denied+f.Denied
		to := f.Name
		if to == "" {
			to = f.Addr.String()
		}
		line := fmt.Sprintf("%s:%d/%s ", to, f.Port, map[uint8]string{6: "tcp", 17: "udp", 1: "icmp"}[f.Proto])
		if f.Allowed > 0 {
			line += "+"
		}
		if f.Denied > 0 {
			line += "-"
		}
		got = append(got, line)
		if f.First.IsZero() || f.Last.Before(f.First) {
			t.Errorf("%s: from %v to %v", line, f.First, f.Last)
		}
	}
	if strings.Join(got, ", ") != strings.Join(want, ", ") {
		t.Errorf("the log has %q, want %q", got, want)
	}
	if r.Total.Allowed != allowed || r.Total.Denied != denied {
		t.Errorf("%d allowed and %d denied in all, %d and %d of destinations", r.Total.Allowed, r.Total.Denied, allowed, denied)
	}
}

// TestFlowLog: what a sandbox does is counted, over a killed daemon and over its link.
func TestFlowLog(t *testing.T) {
	w := newWorld(t)
	dir, killed := t.TempDir(), t.TempDir()
	policy := rules(t, "rules", "203.0.113.1", "203.0.113.3")
	e := w.openWith(func(c *Config) { c.FlowLogs = dir })
	id, at := w.sandbox(e, 0, policy), netip.MustParseAddr("203.0.113.3")
	w.allowed(id, "tcp", "203.0.113.1:443")
	w.allowed(id, "udp", "203.0.113.1:443")
	w.refused(id, "tcp", "203.0.113.2:443")
	w.refused(id, "tcp", "169.254.169.254:80")
	s := e.lookup(addr(0))
	s.leases.Add("one.test", []netip.Addr{at}, time.Minute, time.Now())
	w.allowed(id, "tcp", "203.0.113.3:443")
	s.leases.Add("two.test", []netip.Addr{at}, time.Minute, time.Now()) // now nobody can tell which is meant
	w.allowed(id, "tcp", "203.0.113.3:443")
	flows := []string{
		"203.0.113.3:443/tcp +", "one.test:443/tcp +", "169.254.169.254:80/tcp -", "203.0.113.2:443/tcp -",
		"203.0.113.1:443/udp +", "203.0.113.1:443/tcp +",
	}
	wantFlows(t, e.FlowLog.Report(id), flows...)
	if _, err := w.ask(id, "udp", "203.0.113.53:53", "evil.test.", dns.TypeA, patient); err != nil {
		t.Fatal(err)
	}
	flows = append([]string{"evil.test:53/udp -"}, flows...)
	wantFlows(t, e.FlowLog.Report(id), flows...)
	w.wantTraffic(e, id, flowlog.Traffic{})

	// The daemon is killed: its files stay as the last Save left them.
	if err := e.FlowLog.Book.Save(false); err != nil {
		t.Fatal(err)
	}
	saved := e.FlowLog.Report(id)
	if err := os.CopyFS(killed, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	w.allowed(id, "tcp", "203.0.113.1:80") // is lost, but its bytes are not
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	e = w.openWith(func(c *Config) { c.FlowLogs = killed })
	if err := e.Register(t.Context(), id, addr(0), policy, nil); err != nil {
		t.Fatal(err)
	}
	r := e.FlowLog.Report(id)
	wantFlows(t, r, flows...)
	if r.Total.Allowed != saved.Total.Allowed || !r.Since.Equal(saved.Since) {
		t.Errorf("after a restart %+v since %v, before it %+v since %v", r.Total, r.Since, saved.Total, saved.Since)
	}
	w.wantTraffic(e, id, flowlog.Traffic{})

	// The sandbox is stopped, and started with another link.
	least := w.linkTraffic(id)
	if err := e.Unregister(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	gone := e.FlowLog.Report(id).Traffic
	w.between(gone, least, w.linkTraffic(id), flowlog.Traffic{})
	w.run("ip", "link", "del", "sb-"+id)
	ns := w.guests[id]
	ns.Close()
	for range 2 {
		if err := e.FlowLog.Save(false); err != nil { // it leaves memory
			t.Fatal(err)
		}
		if r := e.FlowLog.Report(id); r.Traffic != gone {
			t.Errorf("without a link: %+v, want %+v", r.Traffic, gone)
		}
	}
	w.sandbox(e, 0, policy)
	w.allowed(id, "tcp", "203.0.113.1:8080")
	wantFlows(t, e.FlowLog.Report(id), append([]string{"203.0.113.1:8080/tcp +"}, flows...)...)
	w.wantTraffic(e, id, gone)
	if err := e.FlowLog.Save(false); err != nil { // as every ten seconds: all sandboxes at once
		t.Fatal(err)
	}
	if all := e.FlowLog.Traffic(); all.TxBytes <= gone.TxBytes-saved.Traffic.TxBytes {
		t.Errorf("the daemon has counted %+v", all)
	}

	if err := e.Unregister(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := e.FlowLog.Forget(id); err != nil {
		t.Fatal(err)
	}
	if ids, err := e.FlowLog.List(); err != nil || len(ids) != 0 {
		t.Errorf("of a sandbox that is deleted: %v, %v", ids, err)
	}
}

// TestFlowLogByName: what passes the proxy is counted under the name that the guest said.
func TestFlowLogByName(t *testing.T) {
	w := newWorld(t)
	w.sites()
	e := w.open()
	id := w.named(e, 0, rules(t, "rules", byName...))
	c, err := w.tls(id, site+":443", "allowed.test")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := w.tls(id, site+":443", "other.test"); err == nil {
		t.Error("another name at the address opens")
	}
	if got, err := w.raw(id, site+":5432", ""); err != nil || got != "hello\n" {
		t.Errorf("a server that speaks first: %q, %v", got, err)
	}
	// This one is counted when it ends: until then the guest may say a name.
	w.proxyEnds(e, func() (left int) { return 2 - int(e.FlowLog.Report(id).Total.Allowed) })
	wantFlows(t, e.FlowLog.Report(id), "allowed.test:5432/tcp +", "other.test:443/tcp -", "allowed.test:443/tcp +")
}
