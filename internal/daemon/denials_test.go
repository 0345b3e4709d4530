package daemon

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/internal/history"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/egress/flowlog"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestDenials: a guest that is refused a hundred flows a second, each to another
// address than the last, gets few lines; its neighbour gets its own, none goes
// uncounted, and its history has what it had.
func TestDenials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var said bytes.Buffer
		recorder, err := flowlog.NewRecorder("", "sb-", slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		d := &Daemon{
			log: slog.New(slog.NewTextHandler(&said, nil)), history: history.New(), egress: &egress.Engine{FlowLog: recorder},
		}
		d.denials = newDenials(d.log)
		var told atomic.Int64
		d.denials.toReaders(func(id, text string) {
			if id == "flood" && strings.Contains(text, "no rule allows it") {
				told.Add(1)
			}
		})
		for _, id := range []string{"flood", "quiet"} {
			d.onEvent(events.Event{ID: id, Type: string(record.Creating)})
		}
		deny := func(id string, i int) {
			d.onDeny(egress.Denial{
				ID: id, Proto: "tcp", Dst: netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(i % 2)}), 80),
				Rule: "default", By: egress.ByPolicy,
			})
		}
		const seconds, each = 60, 100
		for i := range seconds * each {
			deny("flood", i)
			if i%(20*each) == 0 {
				deny("quiet", i/each/20)
			}
			time.Sleep(time.Second / each)
		}
		time.Sleep(2 * moreEvery)
		synctest.Wait()
		lines := map[string]int{}
		more := 0
		for line := range strings.Lines(said.String()) {
			var id string
			for _, f := range strings.Fields(line) {
				if v, ok := strings.CutPrefix(f, "sandbox="); ok {
					id = v
				}
			}
			lines[id]++
			if _, after, ok := strings.Cut(line, `msg="more denied" sandbox=flood n=`); ok {
				var n int
				if _, err := fmt.Sscan(after, &n); err != nil {
					t.Fatal(err)
				}
				more += n
				lines["more"]++
			}
		}
		if most := denialBurst + seconds + 1 + lines["more"]; lines["flood"] > most || lines["more"] > seconds/10+1 {
			t.Errorf("%d lines for one sandbox in %d s, %d of them about more; want at most %d", lines["flood"], seconds, lines["more"],
				most)
		}
		if got := lines["flood"] - lines["more"] + more; got != seconds*each {
			t.Errorf("%d denials are told of, %d were", got, seconds*each)
		}
		if n := int(told.Load()); n != lines["flood"]-lines["more"] {
			t.Errorf("readers of events got %d, the log %d", n, lines["flood"]-lines["more"])
		}
		if lines["quiet"] != 3 {
			t.Errorf("the neighbour has %d lines, want 3", lines["quiet"])
		}
		if entries, dropped := d.history.Of("flood", history.Network); len(entries)+dropped != seconds*each {
			t.Errorf("the history knows %d", len(entries)+dropped)
		}
		d.onDeny(egress.Denial{ID: "quiet", Proto: "udp", Name: "pypi.org", Rule: policy.Default, By: egress.ByDNS})
		entries, _ := d.history.Of("quiet", history.Network)
		const words = "denied dns pypi.org: no rule allows this name"
		if got := entries[len(entries)-1].Text; got != words || !strings.Contains(said.String(), `reason="no rule allows this name"`) {
			t.Errorf("a refused name is told of as %q, want %q", got, words)
		}
		d.onEvent(events.Event{ID: "flood", Type: events.Deleted})
		deny("flood", 1) // late
		if len(d.denials.ofs) != 1 {
			t.Errorf("remembered are %d sandboxes, one is there", len(d.denials.ofs))
		}
	})
}

// TestDenialsKept: what is remembered is bounded, repeated denials are counted wherever
// they stand, and the line for a failed command tells the last one.
func TestDenialsKept(t *testing.T) {
	d := newDenials(slog.New(slog.DiscardHandler))
	d.open("a")
	dst := netip.MustParseAddrPort("203.0.113.7:443")
	note := func(n egress.Denial) { d.note("a", denialOf(n, time.Now())) }
	if d.of("a").Line(0) != "" || d.of("gone").Line(0) != "" || len(d.of("gone").Items) != 0 {
		t.Error("something is told of sandboxes that were refused nothing")
	}
	for i := range 3 * deniedKept {
		other := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 80)
		note(egress.Denial{Proto: "tcp", Dst: other, Rule: "default", By: egress.ByPolicy})
		note(egress.Denial{Proto: "tcp", Dst: dst, Name: "pypi.org", Rule: "default", By: egress.ByProxy})
	}
	all := d.of("a")
	if len(all.Items) != deniedKept || all.Total != 6*deniedKept || d.count("a") != all.Total {
		t.Errorf("%d kept of %d", len(all.Items), all.Total)
	}
	last := all.Items[deniedKept-1]
	if last.Times != 3*deniedKept || last.Name != "pypi.org" || last.First.After(last.Time) {
		t.Errorf("the repeated one is %+v", last)
	}
	for _, c := range []struct {
		n     egress.Denial
		line  string
		allow string
	}{
		{
			egress.Denial{Proto: "tcp", Dst: dst, Name: "pypi.org", Rule: "default", By: egress.ByProxy},
			"pypi.org:443 (203.0.113.7) (no rule allows it)", "pypi.org:443",
		},
		{
			egress.Denial{Proto: "udp", Name: "evil\x1b[2J\u202e.example" + strings.Repeat("x", 300), Rule: "default", By: egress.ByDNS},
			"evil?[2J?.example", "evil?[2J?.example",
		},
		{egress.Denial{Proto: "udp", Dst: dst, Rule: "default", By: egress.ByPolicy}, "203.0.113.7:443 (no", "203.0.113.7:443/udp"},
		{
			egress.Denial{Proto: "icmp", Dst: netip.AddrPortFrom(dst.Addr(), 0), Rule: "default", By: egress.ByPolicy},
			"203.0.113.7 (no", "203.0.113.7/icmp",
		},
		{egress.Denial{Proto: "132", Dst: netip.AddrPortFrom(dst.Addr(), 0), Rule: "default", By: egress.ByPolicy}, "203.0.113.7 (no", ""},
		{
			egress.Denial{
				Proto: "tcp", Dst: netip.MustParseAddrPort("10.0.0.1:443"), Name: "in.example", Rule: "private range", By: egress.ByPolicy,
			},
			"a private address", "10.0.0.1:443",
		},
		{
			egress.Denial{Proto: "udp", Dst: dst, Name: "pypi.org", Rule: "default", By: egress.ByPolicy},
			"pypi.org:443 (203.0.113.7) (no", "",
		},
		{
			egress.Denial{Proto: "tcp", Dst: dst, Rule: policy.NoName, By: egress.ByProxy},
			"no server name was sent", "203.0.113.7:443",
		},
		{
			egress.Denial{Proto: "tcp", Dst: dst, Name: "pypi.org", Rule: "203.0.113.7 is not an address of pypi.org", By: egress.ByProxy},
			"is not an address of", "",
		},
		{egress.Denial{Proto: "tcp", Dst: dst, Rule: "deny 203.0.113.0/24", By: egress.ByPolicy}, "by the rule deny 203.0.113.0/24", ""},
		{egress.Denial{Proto: "tcp", Dst: dst, Rule: "network none", By: egress.ByPolicy}, "network mode none", ""},
		{egress.Denial{Proto: "tcp", Dst: dst, Rule: "metadata service", By: egress.ByBlock}, "whatever its rules: metadata service", ""},
		{egress.Denial{Proto: "tcp", Dst: dst, Rule: "2048 open flows", By: egress.ByLimit}, "over a limit: 2048 open flows", ""},
	} {
		before := d.count("a")
		note(c.n)
		line := d.of("a").Line(before)
		if !strings.HasPrefix(line, "network: denied while this ran: ") || !strings.Contains(line, c.line) ||
			strings.Contains(line, "last of") {
			t.Errorf("%+v: %s", c.n, line)
		}
		items := d.of("a").Items
		if allow := items[len(items)-1].Allow; (allow == "") != (c.allow == "") || !strings.HasPrefix(allow, c.allow) {
			t.Errorf("%+v: opened by %q", c.n, allow)
		}
		if line := d.of("a").Line(before - 2); !strings.Contains(line, ", the last of 3") {
			t.Errorf("three: %s", line)
		}
		if len(line) > 700 {
			t.Errorf("%d bytes", len(line))
		}
	}
}

// TestExplanationOf: the verdict in words, and a rule only where one would open the target.
func TestExplanationOf(t *testing.T) {
	name := spec.Target{Name: "pypi.org", Port: 443, Proto: "tcp"}
	addr := spec.Target{Addr: netip.MustParseAddr("203.0.113.7"), Port: 123, Proto: "udp"}
	for _, c := range []struct {
		x                        egress.Explanation
		t                        spec.Target
		verdict, by, allow, says string
	}{
		{egress.Explanation{Allowed: true, Rule: "allow pypi.org:443", Resolves: true}, name, "allow", "policy", "", "by the rule allow"},
		{egress.Explanation{Allowed: true, Rule: "default", Resolves: true}, name, "allow", "policy", "", "the default is to allow"},
		{
			egress.Explanation{Allowed: true, Rule: "allow GET pypi.org", Judged: true},
			name, "allow", "policy", "",
			"by the rule allow GET pypi.org; requests there are decrypted, and the rules decide on each of them",
		},
		{
			egress.Explanation{Allowed: true, Rule: "allow pypi.org", Bound: true},
			name, "allow", "policy", "",
			"by the rule allow pypi.org; requests there are decrypted, because a credential is bound to this host",
		},
		{
			egress.Explanation{Allowed: true, Rule: "default", Bound: true},
			name, "allow", "policy", "",
			"the default is to allow; requests there are decrypted, because a credential is bound to this host",
		},
		{
			egress.Explanation{Allowed: true, Rule: "allow GET pypi.org", Judged: true, Bound: true},
			name, "allow", "policy", "",
			"the rules decide on each of them, and a credential is bound to this host",
		},
		{egress.Explanation{Rule: "default"}, name, "deny", "policy", "pypi.org:443", "no rule allows it, so the name is not resolved"},
		{egress.Explanation{Rule: "deny pypi.org", Resolves: true}, name, "deny", "policy", "pypi.org:443", "by the rule deny pypi.org"},
		{egress.Explanation{Rule: "deny pypi.org", Fixed: true}, name, "deny", "policy", "", "by the rule deny pypi.org"},
		{egress.Explanation{Rule: "default"}, addr, "deny", "policy", "203.0.113.7:123/udp", "no rule allows it"},
		{egress.Explanation{Rule: "host address", Fixed: true, Block: true}, addr, "deny", "block", "", "whatever its rules: host address"},
		{
			egress.Explanation{Rule: policy.NoName, ByName: true},
			spec.Target{Addr: addr.Addr, Port: 443, Proto: "tcp"},
			"deny", "policy",
			"203.0.113.7:443", "decides; if it sends none: no server name",
		},
		{egress.Explanation{Rule: "default", ByName: true, Allowed: true}, addr, "allow", "policy", "", "if it sends none: no rule"},
		{egress.Explanation{Allowed: true, Resolver: true}, addr, "allow", "dns", "", "answered by sandboxd's resolver"},
		{egress.Explanation{Rule: "network none", Fixed: true}, addr, "deny", "policy", "", "network mode none"},
		{egress.Explanation{Rule: "deny 203.0.113.7/32", Fixed: true}, addr, "deny", "policy", "", "by the rule deny"},
		{egress.Explanation{Rule: "default"}, spec.Target{Name: "pypi.org", Port: 443, Proto: "udp"}, "deny", "policy", "", "no rule"},
	} {
		got := explanationOf(c.x, c.t, "lab")
		if got.Verdict != c.verdict || got.By != c.by || got.Allow != c.allow || !strings.Contains(got.Reason, c.says) ||
			(got.Command != "") != (c.allow != "") || got.Target != c.t.String() {
			t.Errorf("%+v %s: %+v", c.x, c.t, got)
		}
	}
}
