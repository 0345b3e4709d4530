package server

import (
	"encoding/json"
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/files"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// The agent measures a sandbox by its processes and its tmpfs, which are all that can
// be seen inside: the guest sees no cgroup, and /proc/meminfo and /proc/stat are the
// host's under runc and without CPU times under gVisor. Memory that the kernel holds
// for the sandbox, mostly page cache, is not counted. The daemon reads the cgroup,
// whose figures are exact.

// meter measures how much of its limits the sandbox uses.
type meter struct {
	limits func() agent.Limits

	mu   sync.Mutex // guards the last reading of CPU time
	at   time.Time
	used time.Duration
	pct  float64
}

// cpu returns the percentage of cpus that was used since the last reading, or that reading if
// it was less than 100 ms ago, when clock ticks are too coarse.
func (m *meter) cpu(cpus float64) float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	dt := now.Sub(m.at)
	if dt < 100*time.Millisecond {
		return m.pct
	}
	used := proc.CPUTime()
	if !m.at.IsZero() {
		pct := 100 * float64(used-m.used) / float64(dt) / cpus
		m.pct = min(max(pct, 0), 100)
	}
	m.at, m.used = now, used
	return m.pct
}

func (m *meter) cpus() float64 {
	if n := m.limits().CPUMillis; n > 0 {
		return float64(n) / 1000
	}
	return float64(runtime.NumCPU())
}

// memory returns the limit and what all processes hold for themselves and the
// files in tmpfs, in bytes.
func (m *meter) memory() (total, used int64) {
	total = m.limits().MemoryBytes
	if total <= 0 {
		total = proc.MemTotal()
	}
	return total, min(proc.Private()+files.TmpfsUsed(), total)
}

func (m *meter) measure() agent.Metrics {
	total, used := m.memory()
	cpus := m.cpus()
	return agent.Metrics{
		CPUCount:  cpus,
		CPUPct:    m.cpu(cpus),
		MemTotal:  float64(total) / (1 << 20),
		MemUsed:   float64(used) / (1 << 20),
		Timestamp: time.Now().UnixMilli(),
	}
}

// countTasks is GET /tasks: the number that the limit of pids bounds. On gVisor the
// host cannot count it.
func countTasks(w http.ResponseWriter, _ *http.Request) error {
	return reply.JSON(w, http.StatusOK, agent.Tasks{Tasks: proc.Tasks()})
}

// now is GET /metrics.
func (m *meter) now(w http.ResponseWriter, _ *http.Request) error {
	return reply.JSON(w, http.StatusOK, m.measure())
}

// watch is GET /metrics/watch: a line each second.
func (m *meter) watch(w http.ResponseWriter, r *http.Request) error {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-cache")
	w.Header().Set("X-Accel-Buffering", "no")
	rc := http.NewResponseController(w)
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		b, err := json.Marshal(m.measure())
		if err != nil {
			return err
		}
		if _, err := w.Write(append(b, '\n', '\n')); err != nil {
			return nil
		}
		if rc.Flush() != nil {
			return nil
		}
		select {
		case <-t.C:
		case <-r.Context().Done():
			return nil
		}
	}
}
