package admission

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// CPU paces a client that asks for many sandboxes at once. A sandbox that has come up may want a whole CPU, which
// no bound of the gate knows, and the turns of the queue end when it is up: 200 copies of a program that computes
// brought a host of two CPUs to a load of 588.
type CPU struct {
	CPUs     int
	Runnable func() (int, error) // threads of the host that run or could run now
}

const (
	// perCPU is how many threads may want each CPU. Two sandboxes of each CPU that come up want fewer than 8.
	perCPU = 16
	// busyLimit is how long the CPUs may be busy before the next sandbox is refused. The threads of sandboxes that
	// come up end within seconds; those of programs may never.
	busyLimit = 30 * time.Second
	busyEvery = 100 * time.Millisecond
)

// Await returns when the CPUs have room for a sandbox. It fails with errs.Exhausted if that takes longer than
// half a minute, and with the cause of ctx.
func (c CPU) Await(ctx context.Context) error {
	for begun := time.Now(); ; {
		n, err := c.Runnable()
		if err != nil {
			return err
		}
		switch {
		case n <= perCPU*c.CPUs:
			return context.Cause(ctx)
		case time.Since(begun) >= busyLimit:
			text := "no room for another sandbox: for %s, more than %d threads wanted each CPU of this host (%d now want %d); " +
				"delete sandboxes that compute, or wait for some to end"
			return errs.Retry(errs.New(errs.Exhausted, text, busyLimit, perCPU, n, c.CPUs), unknownRetry)
		}
		select {
		case <-time.After(busyEvery): // the kernel sends no event for this
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Runnable reads how many threads of the host run or could run, from proc_loadavg(5).
func Runnable() (int, error) {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, err
	}
	f := strings.Fields(string(b))
	if len(f) < 4 {
		return 0, fmt.Errorf("/proc/loadavg has %d fields, want at least 4", len(f))
	}
	n, _, _ := strings.Cut(f[3], "/")
	return strconv.Atoi(n)
}
