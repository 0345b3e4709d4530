package admission

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// CPU paces a client that asks for many sandboxes at once. A sandbox that has come up may want a whole CPU, which
// no bound of the gate knows, and the turns of the queue end when it is up: 200 copies of a program that computes
// brought a host of two CPUs to a load of 588.
type CPU struct {
	Load func() (threads, cpus int, err error) // of the host: threads that run or could run now, and CPUs online
}

const (
	// perCPU is how many threads may want each CPU. Two sandboxes of each CPU that come up want fewer than 8.
	perCPU = 16
	// busyLimit is how long the next sandbox waits for the CPUs at most. The threads of sandboxes that come up end
	// within seconds; those of programs may never, and they may be another client's.
	busyLimit = 30 * time.Second
	busyEvery = 100 * time.Millisecond
)

// Await returns when the CPUs have room for a sandbox, or after half a minute in which they had none: then they are
// busy. It fails with the cause of ctx.
func (c CPU) Await(ctx context.Context) (busy bool, err error) {
	for begun := time.Now(); ; {
		threads, cpus, err := c.Load()
		if err != nil {
			return false, fmt.Errorf("find out whether the CPUs have room for a sandbox: %w", err)
		}
		if busy = threads > perCPU*cpus; !busy || time.Since(begun) >= busyLimit {
			return busy, context.Cause(ctx)
		}
		select {
		case <-time.After(busyEvery): // the kernel sends no event for this
		case <-ctx.Done():
			return busy, context.Cause(ctx)
		}
	}
}

// Load reads how many threads of the host run or could run, from proc_loadavg(5), and how many CPUs are online, from
// proc_stat(5). The daemon itself may be bound to fewer (sched_setaffinity).
func Load() (threads, cpus int, err error) {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, 0, err
	}
	f := strings.Fields(string(b))
	if len(f) < 4 {
		return 0, 0, fmt.Errorf("/proc/loadavg has %d fields, want at least 4", len(f))
	}
	n, _, _ := strings.Cut(f[3], "/")
	if threads, err = strconv.Atoi(n); err != nil {
		return 0, 0, fmt.Errorf("/proc/loadavg: %w", err)
	}
	if b, err = os.ReadFile("/proc/stat"); err != nil {
		return 0, 0, err
	}
	if cpus = countCPUs(string(b)); cpus == 0 {
		return 0, 0, errors.New("/proc/stat names no CPU")
	}
	return threads, cpus, nil
}

// countCPUs counts the lines of single CPUs. The line of all has no number.
func countCPUs(stat string) (n int) {
	for l := range strings.Lines(stat) {
		if number, ok := strings.CutPrefix(l, "cpu"); ok && number != "" && number[0] >= '0' && number[0] <= '9' {
			n++
		}
	}
	return n
}
