package admission

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// TestCPU: a sandbox waits while too many threads want the CPUs, and half a minute at most.
func TestCPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Int32
		n.Store(2 * perCPU)
		c := CPU{Load: func() (int, int, error) { return int(n.Load()), 2, nil }}
		start := time.Now()
		if busy, err := c.Await(t.Context()); busy || err != nil || time.Since(start) != 0 {
			t.Errorf("after %s: %v, %v", time.Since(start), busy, err)
		}

		n.Add(1)
		time.AfterFunc(5*time.Second, func() { n.Add(-1) })
		if busy, err := c.Await(t.Context()); busy || err != nil || time.Since(start) < 5*time.Second || time.Since(start) > 6*time.Second {
			t.Errorf("after %s: %v, %v", time.Since(start), busy, err)
		}

		n.Store(588)
		start = time.Now()
		if busy, err := c.Await(t.Context()); !busy || err != nil || time.Since(start) < busyLimit ||
			time.Since(start) > busyLimit+time.Second {
			t.Errorf("after %s: %v, %v", time.Since(start), busy, err)
		}

		ctx, cancel := context.WithCancelCause(t.Context())
		left := errors.New("the client left")
		time.AfterFunc(time.Second, func() { cancel(left) })
		start = time.Now()
		if _, err := c.Await(ctx); !errors.Is(err, left) || time.Since(start) > 2*time.Second {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
		n.Store(0)
		if _, err := c.Await(ctx); !errors.Is(err, left) {
			t.Errorf("without a client: %v", err)
		}
		lost := errors.New("no /proc")
		c.Load = func() (int, int, error) { return 0, 0, lost }
		if _, err := c.Await(t.Context()); !errors.Is(err, lost) {
			t.Error(err)
		}
	})
}

// TestLoad: the CPUs are those of the host, also for a daemon that is bound to one of them.
func TestLoad(t *testing.T) {
	online, err := os.ReadFile("/sys/devices/system/cpu/online") // such as 0-3,6
	if err != nil {
		t.Fatal(err)
	}
	want := 0
	for _, part := range strings.Split(strings.TrimSpace(string(online)), ",") {
		from, to, ok := strings.Cut(part, "-")
		if !ok {
			to = from
		}
		a, errA := strconv.Atoi(from)
		b, errB := strconv.Atoi(to)
		if errA != nil || errB != nil {
			t.Fatalf("%q", online)
		}
		want += b - a + 1
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var may, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil {
		t.Fatal(err)
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if may.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
	threads, cpus, err := Load()
	if err != nil || threads < 1 || cpus != want { // this thread runs
		t.Errorf("%d threads, %d CPUs, %v; want %d CPUs", threads, cpus, err, want)
	}
	if err := unix.SchedSetaffinity(0, &may); err != nil {
		t.Fatal(err)
	}
}

// TestCountCPUs: those that are offline have no line.
func TestCountCPUs(t *testing.T) {
	for stat, want := range map[string]int{
		"cpu  1 2\ncpu0 1 1\ncpu2 0 1\nintr 5\nctxt 7\n": 2, "cpu  1 2\ncpu13 1 2": 1, "cpu": 0, "": 0, "cpufreq 1\n": 0,
	} {
		if n := countCPUs(stat); n != want {
			t.Errorf("%q: %d, want %d", stat, n, want)
		}
	}
}
