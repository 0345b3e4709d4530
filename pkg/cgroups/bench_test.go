package cgroups

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestNumbers prints what the comments of this package claim, back to back and
// with the host idle in between, where RCU and cold caches show. It runs when
// it is asked for by name: SANDBOXD_TEST=root go test -v -run Numbers.
func TestNumbers(t *testing.T) {
	hosttest.Root(t)
	if !testing.Verbose() {
		t.Log("say -v to have numbers")
		return
	}
	lay, err := detect()
	if err != nil {
		t.Fatal(err)
	}
	hosttest.Leaks(t, inst)
	e := newEnv(t, lay, "")
	for _, c := range []struct {
		n   int
		gap time.Duration
	}{{300, 0}, {30, 200 * time.Millisecond}} {
		took := map[string][]time.Duration{}
		step := func(name string, f func() error) {
			start := time.Now()
			err := f()
			took[name] = append(took[name], time.Since(start))
			e.must(err)
		}
		for range c.n {
			time.Sleep(c.gap)
			id := record.NewID(inst)
			cmd := exec.Command("/bin/sleep", "1000")
			var u Usage
			step("1 create", func() error {
				return e.Create(e.ctx, id, Limits{MemoryBytes: 64 << 20, HeadroomBytes: 64 << 20, Pids: 100, OOMGroup: true})
			})
			step("2 start", func() error { return e.Start(id, cmd) })
			step("3 limit cpu", func() error { return e.LimitCPU(e.ctx, id, 500) })
			time.Sleep(min(c.gap, 20*time.Millisecond)) // past the kernel's 10 ms between two events
			step("4 freeze", func() error { return e.Freeze(e.ctx, id) })
			step("5 thaw", func() error { return e.Thaw(e.ctx, id) })
			step("6 usage", func() (err error) { u, err = e.Usage(id); return err })
			step("7 oom kills", func() error { _, err := e.OOMKills(id); return err })
			time.Sleep(min(c.gap, 20*time.Millisecond))
			step("8 kill", func() error { return e.Kill(e.ctx, id) })
			_ = cmd.Wait()
			step("9 remove", func() error { return e.Remove(e.ctx, id) })
			if u.Pids != 1 {
				t.Fatalf("usage %+v", u)
			}
		}
		fmt.Printf("%s, gap %v\n", e.Mode(), c.gap)
		for _, name := range slices.Sorted(func(yield func(string) bool) {
			for k := range took {
				if !yield(k) {
					return
				}
			}
		}) {
			d := took[name]
			slices.Sort(d)
			fmt.Printf("  %-12s p50 %8v  p90 %8v\n", name, d[len(d)/2].Round(time.Microsecond), d[len(d)*9/10].Round(time.Microsecond))
		}
	}
	manyWatches(e)
}

// manyWatches prints what 2,000 watches cost.
func manyWatches(e *env) {
	const n = 2000
	var ids []string
	for range n {
		ids = append(ids, e.create(Limits{}))
	}
	var m0, m1 runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m0)
	g0, fd0 := runtime.NumGoroutine(), fds()
	w := e.control.(*unified)
	ctx, cancel := context.WithCancel(e.ctx)
	start := time.Now()
	for _, id := range ids { // none is populated: wait for what does not come
		_, err := w.wait(ctx, e.controlled(id), events.isFrozen)
		e.must(err)
	}
	took := time.Since(start)
	runtime.GC()
	runtime.ReadMemStats(&m1)
	fmt.Printf("%d watches: %v each, %d bytes of heap each, %d goroutines, %d descriptors more\n", n, took/n,
		int64(m1.HeapAlloc-m0.HeapAlloc)/n, runtime.NumGoroutine()-g0, fds()-fd0)
	cancel()
	start = time.Now()
	list, err := e.List(e.ctx)
	e.must(err)
	fmt.Printf("list of %d: %v\n", len(list), time.Since(start))
	id := record.NewID(inst)
	start = time.Now()
	e.must(e.Create(e.ctx, id, Limits{MemoryBytes: 64 << 20, Pids: 100}))
	fmt.Printf("create beside them: %v\n", time.Since(start))
}

func fds() int {
	d, _ := os.ReadDir("/proc/self/fd")
	return len(d)
}
