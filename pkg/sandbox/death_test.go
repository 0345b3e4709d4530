package sandbox

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestOldEvidence: what a sandbox survived is not what it dies of, unless that
// was a moment ago or in nobody's sight.
func TestOldEvidence(t *testing.T) {
	oom := func(h *host, id string) { h.ooms[id]++ }
	fork := func(h *host, id string) { h.refused[id]++ }
	for name, c := range map[string]struct {
		met    func(h *host, id string)
		reboot bool // the daemon is another since
		sweeps int  // between that and the end, a minute apart
		reason record.Reason
	}{
		"oom, days ago":              {oom, false, 3, record.Exited},
		"oom, right before a sweep":  {oom, false, 1, record.OOM},
		"pids, days ago":             {fork, false, 3, record.Exited},
		"pids, right before a sweep": {fork, false, 1, record.PidsLimit},
		"oom, another daemon":        {oom, true, 1, record.Exited},
		"oom, no daemon":             {oom, true, 0, record.OOM},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *host, m *Manager) {
				sweep := func() {
					t.Helper()
					if err := m.Recover(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				r := mustCreate(t, m, spec())
				sweep()
				time.Sleep(time.Minute)
				c.met(h, r.ID)
				if c.reboot {
					stop(t, m)
					m, _ = h.boot(t)
					defer func() { stop(t, m) }()
				}
				for range c.sweeps {
					sweep()
					time.Sleep(time.Minute)
				}
				h.exit(r.ID, Obituary{ExitCode: 1})
				if c.reboot && c.sweeps == 0 {
					sweep()
				}
				synctest.Wait()
				if r, _ = m.Get(t.Context(), r.ID); r.State != record.Ended || r.Reason != c.reason {
					t.Errorf("%s %s: %s, want %s", r.State, r.Reason, r.Message, c.reason)
				}
				if err := m.Delete(t.Context(), r.ID); err != nil || len(m.life.past.of) > 0 {
					t.Errorf("%v; %d are remembered", err, len(m.life.past.of))
				}
			})
		})
	}
}
