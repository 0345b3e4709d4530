package egress

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

// TestQueueCounts reads the kernel's table as this kernel writes it.
func TestQueueCounts(t *testing.T) {
	const table = " 7100  12345     7 2    64     3     4       99  1\n 7101   2345     0 2    64     0     0        0  1\n" +
		" 7200   2346     1 2    64     5     6        7  1\n"
	if c, err := parseQueueCounts([]byte(table), 7100); err != nil || c != (QueueCounts{7, 3, 4}) {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err := parseQueueCounts([]byte(table), 7100, 7200); err != nil || c != (QueueCounts{8, 8, 10}) {
		t.Errorf("two queues: %+v, %v", c, err)
	}
	if c, err := parseQueueCounts([]byte(table), 7102); err != nil || c != (QueueCounts{}) {
		t.Errorf("a queue that is not there: %+v, %v", c, err)
	}
	if _, err := parseQueueCounts([]byte("7100 x"), 7100); err == nil {
		t.Error("a table of another kernel is taken for ours")
	}
}

// TestFlowCounts holds that every verdict is counted, under its kind of reason.
func TestFlowCounts(t *testing.T) {
	e := &Engine{}
	e.flowCounts.add(passed, policy.ByRule)
	e.flowCounts.add(refused, policy.ByBlock)
	e.flowCounts.add(refused, policy.ByBlock)
	e.verdict([]byte("no packet"))
	got := map[string]uint64{}
	for _, c := range e.FlowCounts() {
		got[c.Verdict+" "+c.Cause] = c.Count
	}
	for k, want := range map[string]uint64{
		"allow rule": 1, "allow mode": 0, "deny blocked": 2, "deny limit": 0, "deny fault": 1, "drop fault": 0,
	} {
		if n, ok := got[k]; !ok || n != want {
			t.Errorf("%s: %d (%v), want %d", k, n, ok, want)
		}
	}
	if len(got) != 10 {
		t.Errorf("counts: %v", got)
	}
}

func BenchmarkCount(b *testing.B) {
	e := &Engine{}
	b.ReportAllocs()
	for b.Loop() {
		e.flowCounts.add(refused, policy.ByBlock)
	}
}

// TestSilentServers: the log says once that no name server answers, and once that they do again. A name
// whose own servers are silent is no sign.
func TestSilentServers(t *testing.T) {
	var out strings.Builder
	log := slog.New(slog.NewTextHandler(&out, nil))
	var s servers
	now := time.Unix(1e9, 0)
	said := func(want ...string) {
		t.Helper()
		if lines := strings.Count(out.String(), "\n"); lines != len(want) {
			t.Errorf("%d lines: %s", lines, &out)
		}
		for _, w := range want {
			if !strings.Contains(out.String(), w) {
				t.Errorf("%q does not say %q", &out, w)
			}
		}
		out.Reset()
	}
	for i := range 100 { // a guest asks for one dead name
		s.heard(i%4 == 3, now, log)
		now = now.Add(2 * time.Second)
	}
	said()
	for range 100 { // at once: one try that is lost
		s.heard(false, now, log)
	}
	said()
	now = now.Add(silentTime)
	for range 3 {
		s.heard(false, now, log)
	}
	said("no name server answers")
	now = now.Add(time.Minute)
	for range 3 {
		s.heard(true, now, log)
	}
	said("answer again")
	if a, u := s.answered.Load(), s.unanswered.Load(); a != 25+3 || u != 75+100+3 {
		t.Errorf("%d answered, %d not", a, u)
	}
}
