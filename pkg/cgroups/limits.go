package cgroups

import (
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Limits are the limits of a whole sandbox from its first process on; zero is
// unlimited. For CPU time see LimitCPU.
type Limits struct {
	MemoryBytes int64 // what the guest is told; swap is not lent
	Pids        int64 // tasks, threads included
	// OOMGroup lets one OOM kill all (a sentry can not lose a part). cgroup v1
	// has no such switch: there the kernel kills one process, and the sandbox
	// ends because that was its sentry or agent.
	OOMGroup bool
	// HeadroomBytes is the runtime's own need on top of MemoryBytes.
	HeadroomBytes int64
}

// The bounds of what a limit may say. More is a slip of units.
const (
	maxMemory = 1 << 50 // 1 PiB
	maxCPU    = 1 << 20 // about a thousand CPUs; the kernel refuses quotas a little above
	maxPids   = 1 << 22 // PID_MAX_LIMIT; pids.max of v1 refuses more

	// period is the kernel's default period of a CPU quota, and what runtimes
	// use. It is written where a file wants both.
	period    = 100_000 // µs
	minMillis = 10      // 1 ms in a period, min_cfs_quota_period
)

func (l Limits) check() error {
	for _, x := range []struct {
		name     string
		v, bound int64
		unit     string
	}{
		{"memory", l.MemoryBytes, maxMemory, "bytes"},
		{"memory head-room", l.HeadroomBytes, maxMemory, "bytes"},
		{"pids", l.Pids, maxPids, "tasks"},
	} {
		if x.v < 0 || x.v > x.bound {
			return errs.New(errs.Invalid, "limit of %s is %d: want 0 (unlimited) to %d %s", x.name, x.v, x.bound, x.unit)
		}
	}
	return nil
}

// enforced is the memory limit with head-room; 0 is unlimited.
func (l Limits) enforced() int64 {
	if l.MemoryBytes == 0 {
		return 0
	}
	return l.MemoryBytes + l.HeadroomBytes
}

// A write is one line written to one file of one cgroup.
type write struct{ file, value string }

// A flavour says which files a host has, beyond v1 or v2.
type flavour struct {
	v2   bool
	swap bool // swap is accounted: memory.swap.max, memory.memsw.limit_in_bytes
}

// writes lists, in order, what makes ctrl of one cgroup obey l. It is pure, so
// that v2 is tested on hosts without v2. It is for a cgroup without limits yet:
// v1 wants memory ≤ memory+swap to hold after each single write.
//
// Sources: Documentation/admin-guide/cgroup-v2.rst ("memory.max",
// "memory.oom.group", "memory.swap.max", "pids.max"); cgroup-v1/memory.rst §8.
func (l Limits) writes(ctrl string, f flavour) []write {
	switch ctrl {
	case "memory":
		if f.v2 {
			return l.memoryV2(f)
		}
		return l.memoryV1(f)
	case "pids":
		return []write{{"pids.max", orMax(l.Pids)}}
	}
	return nil
}

// cpuQuota makes a cgroup use at most millis thousandths of a CPU; 0 is no limit.
//
// Sources: cgroup-v2.rst ("cpu.max"); Documentation/scheduler/sched-bwc.rst.
func cpuQuota(millis int64, v2 bool) write {
	quota := max(millis, minMillis) * (period / 1000)
	switch {
	case v2 && millis == 0:
		return write{"cpu.max", "max " + itoa(period)}
	case v2:
		return write{"cpu.max", itoa(quota) + " " + itoa(period)}
	case millis == 0:
		return write{"cpu.cfs_quota_us", "-1"}
	}
	return write{"cpu.cfs_quota_us", itoa(quota)} // the period is its default
}

func (l Limits) memoryV2(f flavour) []write {
	w := []write{{"memory.max", orMax(l.enforced())}}
	if f.swap {
		w = append(w, write{"memory.swap.max", "0"})
	}
	group := "0"
	if l.OOMGroup {
		group = "1"
	}
	return append(w, write{"memory.oom.group", group})
}

func (l Limits) memoryV1(f flavour) []write {
	value := "-1"
	if n := l.enforced(); n > 0 {
		value = itoa(n)
	}
	limit, both := write{"memory.limit_in_bytes", value}, write{"memory.memsw.limit_in_bytes", value}
	if !f.swap {
		// Without swap accounting there is no limit to swap, only this.
		return []write{limit, {"memory.swappiness", "0"}}
	}
	return []write{limit, both}
}

func orMax(n int64) string {
	if n == 0 {
		return "max"
	}
	return itoa(n)
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }
