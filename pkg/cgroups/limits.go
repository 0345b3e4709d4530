package cgroups

import (
	"fmt"
	"math"
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Limits are the limits of a whole sandbox from its first process on; zero is
// unlimited. LimitCPU limits CPU time.
type Limits struct {
	MemoryBytes int64 // the limit that the guest sees; there is no swap on top
	Pids        int64 // tasks, threads included
	// CPUShares is the weight against other sandboxes when CPU time is short, as docker
	// and the OCI spec define it: 2 to 262144; 0 is the default, 1024.
	CPUShares int64
	// Bytes and operations per second, on each of Config.Disks.
	IOReadBps, IOWriteBps, IOReadIOPS, IOWriteIOPS int64
	// OOMGroup makes one OOM kill end all processes (a sentry cannot lose a part of
	// itself). cgroup v1 has no such switch: there the kernel kills one process, the
	// sentry or the agent, and that ends the sandbox.
	OOMGroup bool
	// HeadroomBytes is what the runtime itself needs on top of MemoryBytes.
	HeadroomBytes int64
	// KeepMemory makes Limit leave the memory limit as it is.
	KeepMemory bool
}

// The bounds of limits. A larger number is a mistaken unit.
const (
	maxMemory = 1 << 50 // 1 PiB
	maxCPU    = 1 << 20 // about a thousand CPUs; the kernel refuses slightly larger quotas
	maxPids   = 1 << 22 // PID_MAX_LIMIT; pids.max of v1 refuses more
	maxShares = 1 << 18 // MAX_SHARES of the scheduler
	minShares = 2
	maxIOPS   = 1<<32 - 1 // the kernel keeps 32 bits

	// period is the kernel's default period of a CPU quota, and the one runtimes use.
	// It is written to files that take quota and period.
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
		{"cpu shares", l.CPUShares, maxShares, "shares"},
		{"reading", l.IOReadBps, maxMemory, "bytes/s"},
		{"writing", l.IOWriteBps, maxMemory, "bytes/s"},
		{"reads", l.IOReadIOPS, maxIOPS, "operations/s"},
		{"writes", l.IOWriteIOPS, maxIOPS, "operations/s"},
	} {
		if x.v < 0 || x.v > x.bound {
			return errs.New(errs.Invalid, "limit of %s is %d: want 0 (unlimited) to %d %s", x.name, x.v, x.bound, x.unit)
		}
	}
	return nil
}

// enforced is the memory limit including headroom; 0 is unlimited.
func (l Limits) enforced() int64 {
	if l.MemoryBytes == 0 {
		return 0
	}
	return l.MemoryBytes + l.HeadroomBytes
}

func (l Limits) limitsIO() bool { return l.IOReadBps|l.IOWriteBps|l.IOReadIOPS|l.IOWriteIOPS != 0 }

// A write is one line written to one file of one cgroup.
type write struct{ file, value string }

// A flavour says which files a host has, in addition to v1 or v2.
type flavour struct {
	v2    bool
	swap  bool   // swap is accounted: memory.swap.max, memory.memsw.limit_in_bytes
	disks []Disk // on which I/O is limited
}

// A Disk is a whole block device; the kernel accepts no partition.
type Disk struct {
	Dev string // major:minor, as "254:0"
	// ReadsOnly: writes to this disk are not limited. Set it for a disk with a loop
	// file that is a Disk too. A write that waits at this disk blocks the file system
	// in the loop file, and with it all its users: a neighbour's fsync took 2 to 3 s
	// instead of 0.05 (measured here, btrfs on 6.18, limit 1 MiB/s). A write that waits
	// in front of the loop device blocks nobody else.
	ReadsOnly bool
}

// writes lists, in order, the writes that make ctrl of one cgroup obey l. It is pure,
// so that v2 is tested on hosts without v2. The cgroup must have no limits yet: v1
// requires memory ≤ memory+swap after each single write.
//
// Sources: Documentation/admin-guide/cgroup-v2.rst ("memory.max",
// "memory.oom.group", "memory.swap.max", "pids.max", "cpu.weight", "io.max");
// cgroup-v1/memory.rst §8, blkio-controller.rst ("Throttling/Upper limit").
func (l Limits) writes(ctrl string, f flavour) []write {
	switch ctrl {
	case "memory":
		if f.v2 {
			return l.memoryV2(f)
		}
		return l.memoryV1(f)
	case "pids":
		return []write{{"pids.max", orMax(l.Pids)}}
	case "cpu":
		if l.CPUShares == 0 {
			return nil
		}
		if f.v2 {
			return []write{{"cpu.weight", itoa(weight(l.CPUShares))}}
		}
		return []write{{"cpu.shares", itoa(l.CPUShares)}}
	case "io":
		return l.io(f)
	}
	return nil
}

// weight converts docker's shares to cpu.weight of v2 (1 to 10000, default 100). It
// uses the curve through (2, 1), (1024, 100) and (262144, 10000) that runtimes agreed
// on (opencontainers/cgroups, ConvertCPUSharesToCgroupV2Value).
func weight(shares int64) int64 {
	l := math.Log2(float64(min(max(shares, minShares), maxShares)))
	return int64(math.Ceil(math.Pow(10, (l*l+125*l)/612-7.0/34.0)))
}

// io limits each disk separately. If a file system is in a loop file, its reads pass
// two disks.
func (l Limits) io(f flavour) (w []write) {
	for _, d := range f.disks {
		l := l
		if d.ReadsOnly {
			l.IOWriteBps, l.IOWriteIOPS = 0, 0
		}
		if f.v2 {
			w = append(w, write{"io.max", fmt.Sprintf("%s rbps=%s wbps=%s riops=%s wiops=%s",
				d.Dev, orMax(l.IOReadBps), orMax(l.IOWriteBps), orMax(l.IOReadIOPS), orMax(l.IOWriteIOPS))})
			continue
		}
		w = append(w, // 0 is no limit here
			write{"blkio.throttle.read_bps_device", d.Dev + " " + itoa(l.IOReadBps)},
			write{"blkio.throttle.write_bps_device", d.Dev + " " + itoa(l.IOWriteBps)},
			write{"blkio.throttle.read_iops_device", d.Dev + " " + itoa(l.IOReadIOPS)},
			write{"blkio.throttle.write_iops_device", d.Dev + " " + itoa(l.IOWriteIOPS)})
	}
	return w
}

// cpuQuota limits a cgroup to millis thousandths of a CPU; 0 is no limit.
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
		// Without swap accounting swap cannot be limited, only discouraged.
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
