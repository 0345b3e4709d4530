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

// What a sandbox uses is told by its processes and its tmpfs, which are all that can
// be seen inside: the guest sees no cgroup, and /proc/meminfo and /proc/stat are the
// host's under runc and without CPU times under gVisor. What the kernel holds for it,
// page cache above all, is not in it; the daemon, which reads the cgroup, knows better.

// cpuMeter turns CPU time into a percentage since the reading before.
type cpuMeter struct {
	mu   sync.Mutex
	at   time.Time
	used time.Duration
	pct  float64
}

// read returns the use since the last reading, or that reading if it was less
// than 100 ms ago, when clock ticks are too coarse.
func (m *cpuMeter) read(cpus float64) float64 {
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

func (s *Server) cpuCount() float64 {
	if s.limits.Load().CPUMillis > 0 {
		return float64(s.limits.Load().CPUMillis) / 1000
	}
	return float64(runtime.NumCPU())
}

// memory returns the limit and what all processes hold for themselves and the
// files in tmpfs, in bytes.
func (s *Server) memory() (total, used int64) {
	total = s.limits.Load().MemoryBytes
	if total <= 0 {
		total = proc.MemTotal()
	}
	return total, min(proc.Private()+files.TmpfsUsed(), total)
}

func (s *Server) measure() agent.Metrics {
	total, used := s.memory()
	cpus := s.cpuCount()
	return agent.Metrics{
		CPUCount:  cpus,
		CPUPct:    s.cpu.read(cpus),
		MemTotal:  float64(total) / (1 << 20),
		MemUsed:   float64(used) / (1 << 20),
		Timestamp: time.Now().UnixMilli(),
	}
}

// countTasks is GET /tasks: what the limit of pids is about. The host can not count
// it on gVisor.
func countTasks(w http.ResponseWriter, _ *http.Request) error {
	return reply.JSON(w, http.StatusOK, agent.Tasks{Tasks: proc.Tasks()})
}

// metrics is GET /metrics.
func (s *Server) metrics(w http.ResponseWriter, _ *http.Request) error {
	return reply.JSON(w, http.StatusOK, s.measure())
}

// watchMetrics is GET /metrics/watch: a line each second.
func (s *Server) watchMetrics(w http.ResponseWriter, r *http.Request) error {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-cache")
	w.Header().Set("X-Accel-Buffering", "no")
	rc := http.NewResponseController(w)
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		b, err := json.Marshal(s.measure())
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
