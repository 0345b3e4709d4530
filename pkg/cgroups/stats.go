package cgroups

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/cgroups/v3/cgroup1"
	v1 "github.com/containerd/cgroups/v3/cgroup1/stats"
	"github.com/containerd/cgroups/v3/cgroup2"
)

// Usage is the resource use of a sandbox, its runtime's own processes included.
type Usage struct {
	MemoryBytes     uint64    // now, page cache included
	MemoryPeakBytes uint64    // the maximum since the start
	CPUMicros       uint64    // µs of CPU since the start
	Time            time.Time // when CPUMicros was read
	ThrottledMicros uint64    // µs that tasks waited because of the CPU limit
	Pids            uint64    // tasks now, threads included
	OOMKills        uint64    // processes killed at the memory limit
}

// stats reads counters through containerd/cgroups, each from the hierarchy that has its
// controller.
type stats struct {
	lay                      *layout
	memory, pids, cpu, usage v1Stat // nil: v2 has it
}

type v1Stat interface {
	Stat(path string, m *v1.Metrics) error
}

func newStats(lay *layout) *stats {
	s := &stats{lay: lay}
	parent := func(ctrl string) string { // checkLinks checked that <parent>/<ctrl> is the mount
		h := lay.of[ctrl]
		if h == nil || h.v2 {
			return ""
		}
		return filepath.Dir(h.mount)
	}
	if p := parent("memory"); p != "" {
		s.memory = cgroup1.NewMemory(p, cgroup1.IgnoreModules("memsw", "kmem", "kmem.tcp"))
	}
	if p := parent("pids"); p != "" {
		s.pids = cgroup1.NewPids(p)
	}
	if p := parent("cpu"); p != "" {
		s.cpu = cgroup1.NewCpu(p)
	}
	if p := parent("cpuacct"); p != "" {
		s.usage = cgroup1.NewCpuacct(p)
	}
	return s
}

// read fills u from group, a path below the mounts such as "/sandboxd-a/<id>".
func (s *stats) read(group string, u *Usage) error {
	m := v1.Metrics{CPU: &v1.CPUStat{Throttling: &v1.Throttle{}, Usage: &v1.CPUUsage{}}}
	for _, c := range []v1Stat{s.memory, s.pids, s.cpu, s.usage} {
		if c == nil {
			continue
		}
		if err := c.Stat(group, &m); err != nil {
			return err
		}
	}
	u.Time = time.Now()
	u.CPUMicros, u.ThrottledMicros = m.CPU.Usage.Total/1000, m.CPU.Throttling.ThrottledTime/1000
	if m.Memory != nil {
		u.MemoryBytes, u.MemoryPeakBytes = m.Memory.Usage.Usage, m.Memory.Usage.Max
	}
	if m.Pids != nil {
		u.Pids = m.Pids.Current
	}
	if s.lay.v2 == nil {
		return nil
	}
	// Every v2 cgroup counts its CPU time, even without the controller: a hybrid host
	// needs no group in cpuacct.
	mask := cgroup2.StatCPU
	if s.memory == nil {
		mask |= cgroup2.StatMemory
	}
	if s.pids == nil {
		mask |= cgroup2.StatPids
	}
	g, err := cgroup2.Load(group, cgroup2.WithMountpoint(s.lay.v2.mount))
	if err != nil {
		return err
	}
	if _, err := os.Stat(s.lay.v2.mount + group); err != nil {
		return err // the library reads zeros from a group that is gone
	}
	m2, err := g.StatFiltered(mask)
	if err != nil {
		return err
	}
	u.Time = time.Now()
	u.CPUMicros = m2.CPU.UsageUsec
	if s.cpu == nil {
		u.ThrottledMicros = m2.CPU.ThrottledUsec
	}
	if s.memory == nil {
		u.MemoryBytes, u.MemoryPeakBytes = m2.Memory.Usage, m2.Memory.MaxUsage
	}
	if s.pids == nil {
		u.Pids = m2.Pids.Current
	}
	return nil
}

// throttled reads how long the tasks of group were throttled.
func (s *stats) throttled(group string) (uint64, error) {
	if s.cpu != nil {
		m := v1.Metrics{CPU: &v1.CPUStat{Throttling: &v1.Throttle{}}}
		err := s.cpu.Stat(group, &m)
		return m.CPU.Throttling.ThrottledTime / 1000, err
	}
	text, err := readFile(s.lay.v2.mount + group + "/cpu.stat")
	n, _ := field(text, "throttled_usec")
	return n, err
}

// Usage reads the counters of id (0.25 ms on v1, whose memory.stat is long). An id
// without cgroups is fs.ErrNotExist.
func (t *Tree) Usage(id string) (Usage, error) {
	var u Usage
	if err := t.check(id); err != nil {
		return u, err
	}
	group := "/" + t.root + "/" + id
	err := t.stats.read(group, &u)
	if err == nil {
		// Both levels have the same quota: the level whose quota runs out first
		// throttles.
		var below uint64
		below, err = t.stats.throttled(group + "/" + leaf)
		u.ThrottledMicros = max(u.ThrottledMicros, below)
	}
	if err == nil {
		u.OOMKills, err = t.OOMKills(id)
	}
	if gone(err) {
		err = fs.ErrNotExist
	}
	if err != nil {
		return Usage{}, fmt.Errorf("read usage of %s: %w", id, err)
	}
	return u, nil
}

// InitTasks counts the tasks of the process of id that is PID 1 inside the sandbox; 0
// if there is none. Usage counts these tasks, too. That process enters the cgroup
// first, so InitTasks rarely reads a second process.
func (t *Tree) InitTasks(id string) (uint64, error) {
	if err := t.check(id); err != nil {
		return 0, err
	}
	list, err := pids(t.leafIn(t.layout.of["pids"], id))
	if err != nil && !gone(err) {
		return 0, fmt.Errorf("find PID 1 of %s: %w", id, err)
	}
	for _, p := range list {
		text, err := readFile(fmt.Sprintf("/proc/%d/status", p))
		if err != nil {
			continue // it has ended
		}
		ns, tasks := statusLine(text, "NSpid"), statusLine(text, "Threads")
		if len(ns) == 2 && ns[1] == "1" && len(tasks) == 1 { // its id here, and in a namespace below this one
			return strconv.ParseUint(tasks[0], 10, 64)
		}
	}
	return 0, nil
}

// statusLine returns the words of a line of proc_pid_status(5).
func statusLine(text, name string) []string {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.Fields(rest)
		}
	}
	return nil
}

// OOMKills counts the processes of id that the kernel killed at its memory limit; an id
// without cgroups has 0. Call it before Remove. It reads one file, 3 µs, because the
// handling of a death waits for it; the library reads all files of a controller.
func (t *Tree) OOMKills(id string) (uint64, error) {
	if err := t.check(id); err != nil {
		return 0, err
	}
	h := t.layout.of["memory"]
	file := t.dir(h, id) + "/memory.events" // includes the groups below
	if !h.v2 {
		file = t.leafIn(h, id) + "/memory.oom_control" // v1 counts a kill in the victim's cgroup, whichever limit was hit
	}
	text, err := readFile(file)
	if gone(err) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("count OOM kills of %s: %w", id, err)
	}
	n, ok := field(text, "oom_kill")
	if !ok {
		return 0, fmt.Errorf("count OOM kills of %s: no oom_kill in %s", id, file)
	}
	return n, nil
}

// MemoryLimitHit reports whether id ever had all the memory that its limit allows. If the kernel has killed
// there and it is false, the host had no memory left, or a group above had none. Call it before Remove.
func MemoryLimitHit(t *Tree, id string) (bool, error) {
	if err := t.check(id); err != nil {
		return false, err
	}
	h := t.layout.of["memory"]
	if h.v2 {
		text, err := readFile(t.dir(h, id) + "/memory.events")
		if gone(err) {
			return false, nil
		}
		n, ok := field(text, "oom")
		if err == nil && !ok {
			err = errors.New("no oom in memory.events")
		}
		if err != nil {
			return false, fmt.Errorf("read whether %s hit its memory limit: %w", id, err)
		}
		return n > 0, nil
	}
	// Not every v1 kernel counts failures at the limit with swap, which is the same. So the peak tells: a charge
	// that failed leaves it below the limit by as much as it asked for, 2 MiB at most for a huge page.
	limit, err := readNumber(t.dir(h, id) + "/memory.limit_in_bytes")
	for _, file := range []string{"memory.memsw.max_usage_in_bytes", "memory.max_usage_in_bytes"} {
		peak, perr := readNumber(t.dir(h, id) + "/" + file)
		switch {
		case gone(err), gone(perr): // without swap there is one of the two
		case err != nil || perr != nil:
			return false, fmt.Errorf("read whether %s hit its memory limit: %w", id, errors.Join(err, perr))
		case peak >= limit-max(limit/8, 2<<20):
			return true, nil
		}
	}
	return false, nil
}

// SocketMemory is what v1 counts of the messages in TCP and UDP sockets of id, in bytes. It is 0 on v2, which counts
// it as memory, and for an id without cgroups.
func SocketMemory(t *Tree, id string) (int64, error) {
	if err := t.check(id); err != nil {
		return 0, err
	}
	h := t.layout.of["memory"]
	if h.v2 {
		return 0, nil
	}
	n, err := readNumber(t.dir(h, id) + "/memory.kmem.tcp.usage_in_bytes")
	if gone(err) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the memory of the sockets of %s: %w", id, err)
	}
	return n, nil
}
