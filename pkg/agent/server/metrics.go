package server

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// What a sandbox uses is told by its processes and its tmpfs, which are all that can
// be seen inside: the guest sees no cgroup, and /proc/meminfo and /proc/stat are the
// host's under runc and without CPU times under gVisor. What the kernel holds for it,
// page cache above all, is not in it; the daemon, which reads the cgroup, knows better.

// ticksPerSecond is USER_HZ, 100 on every architecture Go knows.
const ticksPerSecond = 100

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
	used := cpuTime()
	if !m.at.IsZero() {
		pct := 100 * float64(used-m.used) / float64(dt) / cpus
		m.pct = min(max(pct, 0), 100)
	}
	m.at, m.used = now, used
	return m.pct
}

// cpuTime is what all processes of the sandbox have used since it began: each
// counts itself and the children it waited for, and who dies is waited for by
// somebody, at last by this process.
func cpuTime() time.Duration {
	var ticks uint64
	for _, p := range scan() {
		ticks += p.ticks
	}
	return time.Duration(ticks) * time.Second / ticksPerSecond
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
		total = memTotal()
	}
	page := int64(os.Getpagesize())
	for _, p := range scan() {
		b, err := readSmall("/proc/" + strconv.Itoa(p.pid) + "/statm")
		if err != nil {
			continue
		}
		if f := bytes.Fields(b); len(f) > 2 {
			resident, _ := strconv.ParseInt(string(f[1]), 10, 64)
			shared, _ := strconv.ParseInt(string(f[2]), 10, 64)
			used += max(resident-shared, 0) * page
		}
	}
	return total, min(used+tmpfsUsed(), total)
}

func memTotal() int64 {
	b, err := readSmall("/proc/meminfo")
	if err != nil {
		return 0
	}
	_, rest, _ := bytes.Cut(b, []byte("MemTotal:"))
	f := bytes.Fields(rest)
	if len(f) == 0 {
		return 0
	}
	kib, _ := strconv.ParseInt(string(f[0]), 10, 64)
	return kib << 10
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
	return writeJSON(w, http.StatusOK, agent.Tasks{Tasks: tasks()})
}

// tasks counts all threads but the agent's.
func tasks() (n int64) {
	self := os.Getpid()
	for _, p := range scan() {
		if p.pid != self {
			n += int64(p.tasks)
		}
	}
	return n
}

// metrics is GET /metrics.
func (s *Server) metrics(w http.ResponseWriter, _ *http.Request) error {
	return writeJSON(w, http.StatusOK, s.measure())
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
