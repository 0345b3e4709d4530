package e2e_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestTopAndTab runs sandboxctl as people do: what uses what, and the Tab key.
func TestTopAndTab(t *testing.T) {
	l := &lab{host: newHost(t, daemontest.Options{}), T: t}
	for _, l.runtime = range runtimes {
		busy := l.make("base", "--name", "busy-"+l.runtime, "--memory", "256Mi", "--", "sh", "-c", "while :; do :; done")
		idle := l.make("base", "--memory", "256Mi")
		var rows []struct {
			ID         string
			Runtime    string
			CPUPercent float64
			Usage      wire.Usage
		}
		eventually(t, 10*time.Second, func() error {
			out := l.ok("top", "-n", "1", "-o", "json")
			if err := json.Unmarshal([]byte(out), &rows); err != nil {
				return err
			}
			if len(rows) != 2 || rows[0].ID != busy || rows[0].CPUPercent < 30 || rows[0].Usage.Pids == nil ||
				rows[1].ID != idle || rows[1].CPUPercent > 30 {
				return fmt.Errorf("%s", out)
			}
			return nil
		})
		if r := rows[0]; r.Runtime != l.runtime || r.Usage.MemoryBytes == 0 || r.Usage.MemoryLimitBytes != 256<<20 || r.Usage.Pids == nil ||
			*r.Usage.Pids == 0 || r.Usage.DiskLimitBytes == 0 {
			t.Errorf("top: %+v", r)
		}
		if out := l.ok("top"); strings.Count(out, "\n") != 3 || !strings.Contains(out, "busy-"+l.runtime) {
			t.Errorf("top: %s", out)
		}
		eventually(t, patience, func() error { // a Tab that takes half a second is given up
			if out := l.ctl("__complete", "exec", "").out; !strings.Contains(out, idle+"\tbase, Running") ||
				!strings.Contains(out, "busy-"+l.runtime+"\t") {
				return fmt.Errorf("Tab: %s", out)
			}
			return nil
		})
		if out := l.ctl("__complete", "resume", "").out; strings.Contains(out, idle) {
			t.Errorf("Tab offers to resume what runs: %s", out)
		}
		l.countsTasks(idle)
		l.ok("rm", "-f", busy, idle)
	}
}

// countsTasks: the processes and threads of the guest are counted and nothing else,
// so that the count can be compared with the limit.
func (l *lab) countsTasks(id string) {
	l.Helper()
	tasks := func() (n int64) {
		eventually(l.T, patience, func() error {
			u := l.usage(id)
			if u.Pids == nil {
				return errors.New("the agent does not count its tasks") // on gVisor it has a second for it
			}
			n = *u.Pids
			return nil
		})
		return n
	}
	before := tasks()
	if before > 2 { // a shell may be ahead
		l.Fatalf("an idle sandbox on %s has %d tasks", l.runtime, before)
	}
	l.ok("exec", id, "--", "sh", "-c", "for i in 1 2 3 4 5 6 7; do sleep 1000 >/dev/null 2>&1 & done")
	if n := tasks(); n-before < 7 || n > 9 {
		l.Errorf("after seven in the background there are %d", n)
	}
	l.ok("pause", id)
	want := "null" // the sentry stands still, and only it knows
	if l.runtime == "runc" {
		want = "[789]"
	}
	if out := l.ok("stats", "--no-stream", "-o", "json", id); !regexp.MustCompile(`"pids": ` + want + `\b`).MatchString(out) {
		l.Errorf("stats of a paused one, want pids %s: %s", want, out)
	}
	if out := l.ok("stats", "--no-stream", id); !regexp.MustCompile(` (-|\d) / 256 `).MatchString(out) {
		l.Errorf("stats of a paused one: %s", out)
	}
	l.ok("resume", id)
}
