package cgroups

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	opencontainers "github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/manager"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func testFreeze(t *testing.T, e *env) {
	id := e.create(Limits{})
	e.must(e.Freeze(e.ctx, id)) // the empty freezes, too
	e.must(e.Thaw(e.ctx, id))
	e.sh(id, "while :; do :; done")
	e.sh(id, "while :; do sleep 0.001; done")
	for range 3 {
		for range 2 {
			e.must(e.Freeze(e.ctx, id))
		}
		if yes, err := e.Frozen(id); !yes || err != nil {
			t.Fatal("frozen:", yes, err)
		}
		before := e.usage(id).CPUMicros
		time.Sleep(30 * time.Millisecond) // in which nothing may happen
		// A spinner would use 30,000; the kernel may count the last few late.
		if after := e.usage(id).CPUMicros; after > before+1000 {
			t.Errorf("used %d µs while frozen", after-before)
		}
		for range 2 {
			e.must(e.Thaw(e.ctx, id))
		}
		if yes, err := e.Frozen(id); yes || err != nil {
			t.Fatal("frozen after thaw:", yes, err)
		}
		e.until("work after thaw", func() bool { return e.usage(id).CPUMicros > before })
	}
	ctx, cancel := context.WithCancelCause(e.ctx)
	cancel(errors.New("hung up"))
	if err := e.Freeze(ctx, id); err != nil && !strings.Contains(err.Error(), "hung up") {
		t.Errorf("freeze with a dead context: %v", err)
	}
	e.must(e.Thaw(e.ctx, id))
}

func testForkBomb(t *testing.T, e *env) {
	id := e.create(Limits{Pids: 300})
	e.sh(id, "f() { f | f & }; f 2>/dev/null; wait")
	e.until("a hundred processes", func() bool { return e.usage(id).Pids > 100 })
	for range 2 {
		e.must(e.Kill(e.ctx, id))
	}
	if yes, err := e.Populated(id); yes || err != nil {
		t.Error("populated after kill:", yes, err)
	}
	e.must(e.Remove(e.ctx, id))
}

func testKillFrozen(t *testing.T, e *env) {
	id := e.create(Limits{})
	e.sh(id, "while :; do sleep 0.001; done")
	e.must(e.Freeze(e.ctx, id))
	e.must(e.Kill(e.ctx, id))
	if yes, err := e.Populated(id); yes || err != nil {
		t.Error("populated after kill:", yes, err)
	}
}

// testKillDying: what is killed, and held by the kernel, is ErrDying until it is dead.
func testKillDying(t *testing.T, e *env) {
	id := e.create(Limits{})
	release := hosttest.HoldExit(t, e.sh(id, "exec sleep 1000").Process.Pid)
	ctx, cancel := context.WithTimeout(e.ctx, 50*time.Millisecond)
	defer cancel()
	for range 2 {
		if err := e.Kill(ctx, id); !errors.Is(err, ErrDying) || !strings.Contains(err.Error(), "remaining processes: ") {
			t.Errorf("kill: %v", err)
		}
	}
	if yes, err := e.Populated(id); !yes || err != nil {
		t.Error("populated while it is held:", yes, err)
	}
	release()
	e.must(e.Kill(e.ctx, id))
	if yes, err := e.Populated(id); yes || err != nil {
		t.Error("populated after kill:", yes, err)
	}
}

func testPopulated(t *testing.T, e *env) {
	id := e.create(Limits{})
	cmd := e.sh(id, "exec sleep 1000")
	if yes, err := e.Populated(id); !yes || err != nil {
		t.Error("populated:", yes, err)
	}
	err := e.Remove(e.ctx, id)
	if !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), fmt.Sprintf("kill its processes first: %d (s", cmd.Process.Pid)) {
		t.Errorf("remove: %v", err)
	}
	for _, h := range e.layout.ours {
		if _, err := os.Stat(e.leafIn(h, id)); err != nil {
			t.Errorf("a refused remove removed: %v", err)
		}
	}
	e.must(e.Kill(e.ctx, id))
	for range 2 {
		e.must(e.Remove(e.ctx, id))
	}
}

// testRuntimeLeftovers: runtimes make the leaf in hierarchies we have no use
// for, rule below it, freeze with the v1 freezer, and die half way.
func testRuntimeLeftovers(t *testing.T, e *env) {
	id := e.create(Limits{})
	for _, h := range e.layout.all {
		e.must(os.MkdirAll(e.leafIn(h, id)+"/sub/deeper", 0o755))
		e.must(os.MkdirAll(e.dir(h, id)+"/beside", 0o755))
	}
	stray := exec.Command("/bin/sleep", "1000")
	frozen := exec.Command("/bin/sleep", "1000")
	e.must(e.Start(id, frozen))
	e.must(stray.Start())
	for _, h := range e.layout.all {
		if slices.Contains(h.names, "memory") { // the first that libcontainer enters, nearly
			e.must(writeFile(e.leafIn(h, id)+"/cgroup.procs", itoa(int64(stray.Process.Pid))))
		}
		if slices.Contains(h.names, "freezer") && e.layout.v2 != nil {
			e.must(writeFile(e.leafIn(h, id)+"/cgroup.procs", itoa(int64(frozen.Process.Pid))))
			e.must(writeFile(e.leafIn(h, id)+"/freezer.state", "FROZEN"))
		}
	}
	if e.layout.mode() == "unified" {
		e.must(stray.Process.Kill()) // no second hierarchy to be caught in
	}
	e.must(e.Kill(e.ctx, id))
	e.must(e.Remove(e.ctx, id))
	_, _ = frozen.Process.Wait()
	_, _ = stray.Process.Wait() // for ever, if the stray was forgotten
	// A leftover with no group of ours is listed and removed as well.
	other := record.NewID(inst)
	h := e.layout.all[0]
	e.must(os.MkdirAll(e.leafIn(h, other), 0o755))
	ids, err := e.List(e.ctx)
	e.must(err)
	if !slices.Equal(ids, []string{other}) {
		t.Errorf("list %v, want %s", ids, other)
	}
	e.must(e.Remove(e.ctx, other))
}

// testLibcontainer: the library that sandboxd-runc is made of joins this very
// leaf, and what it makes beside it goes with Remove.
func testLibcontainer(t *testing.T, e *env) {
	if host, err := detect(); err != nil || host.mode() != e.layout.mode() {
		return // it would use the v2 tree that this run pretends not to have
	}
	id := e.create(Limits{MemoryBytes: 64 << 20, Pids: 20})
	m, err := manager.New(&opencontainers.Cgroup{Path: e.CgroupsPath(id), Resources: &opencontainers.Resources{SkipDevices: true}})
	e.must(err)
	var used []string
	for _, p := range m.GetPaths() {
		used = append(used, p)
	}
	for _, h := range e.layout.ours {
		if !slices.Contains(used, e.leafIn(h, id)) {
			t.Errorf("libcontainer would not use %s, but %v", e.leafIn(h, id), used)
		}
	}
	cmd := e.sh(id, "exec sleep 1000")
	e.must(m.Apply(cmd.Process.Pid))
	e.must(e.Kill(e.ctx, id))
	e.must(e.Remove(e.ctx, id)) // the leak check looks into every hierarchy
}

func testWatch(t *testing.T, e *env) {
	const n = 100
	before := runtime.NumGoroutine()
	var ids []string
	var chans []<-chan struct{}
	for range n {
		id := e.create(Limits{})
		cmd := exec.Command("/bin/sleep", "1000")
		e.must(e.Start(id, cmd))
		ch, err := e.Watch(e.ctx, id)
		e.must(err)
		t.Cleanup(func() { e.must(e.Kill(e.ctx, id)); _ = cmd.Wait() })
		ids, chans = append(ids, id), append(chans, ch)
	}
	if more := runtime.NumGoroutine() - before; e.layout.v2 != nil && more > 2 {
		t.Errorf("%d goroutines more for %d watches", more, n)
	}
	ctx, cancel := context.WithCancel(e.ctx)
	ended, err := e.Watch(ctx, ids[0])
	e.must(err)
	open := func(ch <-chan struct{}) bool {
		select {
		case <-ch:
			return false
		default:
			return true
		}
	}
	if !open(ended) || !open(chans[0]) {
		t.Fatal("closed too soon")
	}
	cancel()
	<-ended
	for i, id := range ids {
		if !open(chans[i]) {
			t.Fatalf("watch %d closed before its kill", i)
		}
		e.must(e.Kill(e.ctx, id))
		<-chans[i]
		e.must(e.Remove(e.ctx, id))
	}
	empty, err := e.Watch(e.ctx, e.create(Limits{}))
	e.must(err)
	<-empty
}
