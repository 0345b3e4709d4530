package admission

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// TestCPU: a sandbox waits while too many threads want the CPUs, and is refused in the end.
func TestCPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 2 * perCPU
		c := CPU{CPUs: 2, Runnable: func() (int, error) { return n, nil }}
		start := time.Now()
		if err := c.Await(t.Context()); err != nil || time.Since(start) != 0 {
			t.Errorf("after %s: %v", time.Since(start), err)
		}

		n++
		time.AfterFunc(5*time.Second, func() { n-- })
		if err := c.Await(t.Context()); err != nil || time.Since(start) < 5*time.Second || time.Since(start) > 6*time.Second {
			t.Errorf("after %s: %v", time.Since(start), err)
		}

		n, start = 588, time.Now()
		err := c.Await(t.Context())
		if !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(), "588 now want 2") || time.Since(start) < busyLimit {
			t.Errorf("after %s: %v", time.Since(start), err)
		}

		ctx, cancel := context.WithCancelCause(t.Context())
		left := errors.New("the client left")
		time.AfterFunc(time.Second, func() { cancel(left) })
		if start = time.Now(); !errors.Is(c.Await(ctx), left) || time.Since(start) > 2*time.Second {
			t.Errorf("it waited for %s", time.Since(start))
		}
		n = 0
		if err := c.Await(ctx); !errors.Is(err, left) {
			t.Errorf("without a client: %v", err)
		}
		lost := errors.New("no /proc")
		c.Runnable = func() (int, error) { return 0, lost }
		if err := c.Await(t.Context()); !errors.Is(err, lost) {
			t.Error(err)
		}
	})
	if n, err := Runnable(); err != nil || n < 1 { // this one runs
		t.Errorf("%d, %v", n, err)
	}
}
