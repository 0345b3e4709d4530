package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// connects opens a connection. It fails as connect does, and prints when.
const connects = `
import socket, sys, time
try: socket.create_connection((sys.argv[1], int(sys.argv[2])), 8)
except OSError:
    print(time.time())
    sys.exit(1)
`

// hammers is refused as often as it can be, by ever other addresses.
const hammers = `
import socket, sys
n = 0
for i in range(4000):
    c = socket.socket()
    c.setblocking(False)
    c.connect_ex(("198.51.%d.%d" % (100 + i % 2, i // 2 % 250 + 1), 80 + i % 7))
    c.close()
sys.exit(3)
`

// tellNetworkExplained: whoever is refused learns of it: the client of a command that failed,
// readers of events, and people who ask. A guest that hammers floods none of them.
func tellNetworkExplained(t *testing.T, l *lab) {
	id := l.make("python", "--name", "asks")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events := l.stream(ctx)
	for ev := range events { // its creation: from here on nothing is missed
		if ev.ID == id && ev.Type == "running" {
			break
		}
	}
	const target = outsideAddr + ":443"
	const line = "network: denied while this ran: " + target + " (no rule allows it); a rule that allows " + target + " opens it"
	told := l.failure(id, "</dev/tcp/"+outsideAddr+"/443").Traceback
	if len(told) == 0 || told[len(told)-1] != line {
		t.Errorf("the client of a command that was refused is told %q, want %q at the end", told, line)
	}
	if ev := next(events, "denied"); ev.ID != id || ev.Name != "asks" || ev.Message != "tcp "+target+": no rule allows it" {
		t.Errorf("the event is %+v", ev)
	}
	connect := []string{"exec", id, "--", "python3", "-c", connects, outsideAddr}
	port := 79
	soon(t, 100*time.Millisecond, "the event of a denial, after the guest knew", func() time.Duration {
		port++ // the same again is no event
		r := l.ctl(append(connect, fmt.Sprint(port))...)
		l.wants(r, 1, fmt.Sprintf("sandboxctl: note: network: denied while this ran: %s:%d ", outsideAddr, port))
		var refused float64
		if _, err := fmt.Sscan(r.out, &refused); err != nil {
			t.Fatal(err)
		}
		return next(events, "denied").Time.Sub(time.UnixMicro(int64(refused * 1e6)))
	})
	r := l.ctl("exec", id, "--", "bash", "-c", "</dev/tcp/"+outsideAddr+"/80; true")
	if r.code != 0 || strings.Contains(r.errout, "network:") {
		t.Errorf("a command that ended well: %+v", r)
	}
	if out := l.ok("egress", "denials", id); !strings.Contains(out, "--allow "+target) || strings.Count(out, "\n") != port-77 {
		t.Errorf("denials: %s", out)
	}
	r = l.ctl("egress", "test", "asks", target)
	l.wants(r, 1)
	_, command, ok := strings.Cut(r.out, "\n  sandboxctl ")
	if !ok || !strings.HasPrefix(r.out, "not reached: "+target+"/tcp") {
		t.Fatalf("test: %+v", r)
	}
	l.ok(strings.Fields(command)...)
	allowed := "allowed: " + target + "/tcp: by the rule allow " + outsideAddr
	if out := l.ok("egress", "explain", "asks", target); !strings.HasPrefix(out, allowed) {
		t.Errorf("explain: %s", out)
	}
	l.ok(append(connect, "443")...)
	out := l.ok("egress", "explain", id, outsideHost+":22")
	if !strings.Contains(out, "whatever its rules") || !strings.Contains(out, "no rule of the sandbox") {
		t.Errorf("explain, of the host: %s", out)
	}
	l.hammered(t, id, events)
	l.ok("stop", id)
	if out := l.ok("egress", "explain", id, target); !strings.HasPrefix(out, allowed) || !strings.Contains(out, "\nnote: the sandbox is ") {
		t.Errorf("explain, of one that was stopped: %s", out)
	}
	l.byFile(t)
}

// stream reads the events of the last minute and those that come.
func (l *lab) stream(ctx context.Context) <-chan wire.Event {
	events := make(chan wire.Event, 4096)
	go func() {
		defer close(events)
		for ev, err := range l.api.Events(ctx, time.Now().Add(-time.Minute), client.Notices{}) {
			if err != nil {
				return
			}
			events <- ev
		}
	}()
	return events
}

// next is the next event of a type.
func next(events <-chan wire.Event, kind string) (ev wire.Event) {
	for ev = range events {
		if ev.Type == kind {
			break
		}
	}
	return ev
}

// hammered has a guest be refused thousands of flows.
func (l *lab) hammered(t *testing.T, id string, events <-chan wire.Event) {
	start := time.Now()
	told := l.ctl("exec", id, "--", "python3", "-c", hammers)
	took := time.Since(start)
	l.wants(told, 3, "network: denied while this ran", "the last of")
	if strings.Count(told.errout, "\n") != 1 || len(told.errout) > 600 {
		t.Errorf("a command that hammers is told %q", told.errout)
	}
	var all wire.Denials
	err := json.Unmarshal([]byte(l.ok("egress", "denials", "-o", "json", id)), &all)
	if err != nil || len(all.Items) != 64 || all.Total < 65 {
		t.Errorf("%d denials of %d are kept, %v", len(all.Items), all.Total, err)
	}
	l.ok("update", "--label", "end=1", id)
	n := 0
	for ev := range events {
		if ev.Type == "labels" {
			break
		}
		if ev.Type == "lost" {
			t.Error("other events are lost")
		}
		if ev.Type == "denied" {
			n++
		}
	}
	if most := 20 + int(took.Seconds()) + 2; n < 1 || n > most {
		t.Errorf("%d events of %d denials in %v, want at most %d", n, all.Total, took, most)
	}
}

// byFile gives a sandbox a policy as a file, with rules before those of it.
func (l *lab) byFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "policy.json")
	const policy = `{"defaultAction":"deny","egress":[{"action":"allow","target":"203.0.113.0/24"}]}`
	if err := os.WriteFile(file, []byte(policy), 0o600); err != nil {
		t.Fatal(err)
	}
	id := l.make("python", "--policy", file, "--deny", outsideAddr+":443")
	want := map[string]string{"tcp " + outsideAddr + " 443": refusedFlow, "tcp " + outsideAddr + " 80": "ok"}
	l.wantFlows(l.dial(id, keys(want)...), want)
	l.ok("egress", "set", "--allow", outsideAddr+":443", "--deny", "203.0.113.0/24", "--default", "allow", id)
	want = map[string]string{"tcp " + outsideAddr + " 443": "ok", "tcp " + outsideAddr + " 80": refusedFlow}
	l.wantFlows(l.dial(id, keys(want)...), want)
	ordered := l.make("python", "--deny", outsideAddr+":443", "--allow", "203.0.113.0/24")
	want = map[string]string{"tcp " + outsideAddr + " 443": refusedFlow, "tcp " + outsideAddr + " 80": "ok"}
	l.wantFlows(l.dial(ordered, keys(want)...), want)
}
