package cgroups

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func gettid() int { return unix.Gettid() }

const inst = instance.Instance('g')

// TestConformance is what a Tree must do, on whatever the host has; where
// there are v1 hierarchies, once more as if there were no v2 tree. It knows no
// file of v1 or v2 by name: `go test -c` it and run it on any host.
func TestConformance(t *testing.T) {
	hosttest.Root(t)
	lay, err := detect()
	if err != nil {
		t.Fatal(err)
	}
	t.Run(lay.mode(), func(t *testing.T) { conformance(t, lay) })
	if lay.mode() == "hybrid" {
		hs := slices.DeleteFunc(slices.Clone(lay.all), func(h *hierarchy) bool { return h.v2 })
		legacy, err := newLayout(hs, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Run("legacy", func(t *testing.T) { conformance(t, legacy) })
	}
}

func conformance(t *testing.T, lay *layout) {
	for _, tt := range []struct {
		name string
		f    func(*testing.T, *env)
	}{
		{"make, list, remove", testMake},
		{"foreign names", testForeign},
		{"nested root", testNested},
		{"nothing there", testNothing},
		{"start", testStart},
		{"memory", testMemory},
		{"head-room", testHeadroom},
		{"cpu", testCPU},
		{"pids", testPids},
		{"update", testUpdate},
		{"freeze and thaw", testFreeze},
		{"kill a fork bomb", testForkBomb},
		{"kill the frozen", testKillFrozen},
		{"remove the populated", testPopulated},
		{"what runtimes leave", testRuntimeLeftovers},
		{"watch", testWatch},
	} {
		t.Run(tt.name, func(t *testing.T) {
			hosttest.Leaks(t, inst)
			tt.f(t, newEnv(t, lay, ""))
		})
	}
}

// env is a tree and the processes that a test put into it.
type env struct {
	*Tree
	t   *testing.T
	ctx context.Context
}

func newEnv(t *testing.T, lay *layout, root string) *env {
	t.Helper()
	tree, err := open(Config{Instance: inst, Root: root}, lay)
	if err != nil {
		t.Fatal(err)
	}
	e := &env{Tree: tree, t: t, ctx: context.Background()}
	t.Cleanup(func() {
		ids, err := tree.List(e.ctx)
		for _, id := range ids {
			err = errors.Join(err, tree.Kill(e.ctx, id), tree.Remove(e.ctx, id))
		}
		if err = errors.Join(err, tree.RemoveRoot(), tree.Close()); err != nil {
			t.Error(err)
		}
	})
	return e
}

func (e *env) must(err error) {
	e.t.Helper()
	if err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) create(l Limits) string {
	e.t.Helper()
	id := record.NewID(inst)
	e.must(e.Create(e.ctx, id, l))
	return id
}

// sh starts a script in id. It is reaped when it ends.
func (e *env) sh(id, script string) *exec.Cmd {
	e.t.Helper()
	cmd := exec.Command("/bin/sh", "-c", script)
	e.must(e.Start(id, cmd))
	e.t.Cleanup(func() { e.must(e.Kill(e.ctx, id)); _ = cmd.Wait() })
	return cmd
}

func (e *env) usage(id string) Usage {
	e.t.Helper()
	u, err := e.Usage(id)
	e.must(err)
	return u
}

// until waits for something that gives no event to a test.
func (e *env) until(what string, f func() bool) {
	e.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			e.t.Fatalf("in vain waited for: %s", what)
		}
	}
}

func testMake(t *testing.T, e *env) {
	a, b := e.create(Limits{}), e.create(Limits{MemoryBytes: 64 << 20, CPUMillis: 100, Pids: 50, OOMGroup: true})
	want := []string{a, b}
	slices.Sort(want)
	ids, err := e.List(e.ctx)
	e.must(err)
	if !slices.Equal(ids, want) {
		t.Errorf("list %v, want %v", ids, want)
	}
	if err := e.Create(e.ctx, a, Limits{}); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second create: %v", err)
	}
	for _, h := range e.layout.ours {
		if _, err := os.Stat(e.leafIn(h, b)); err != nil {
			t.Error(err)
		}
	}
	for range 2 {
		e.must(e.Remove(e.ctx, a))
		e.must(e.Remove(e.ctx, b))
	}
	if ids, err = e.List(e.ctx); len(ids) > 0 || err != nil {
		t.Errorf("list after remove: %v %v", ids, err)
	}
	e.must(e.RemoveRoot())
	e.must(e.RemoveRoot())
	c := e.create(Limits{Pids: 10}) // the root comes back by itself
	e.sh(c, "exec sleep 100")
	if err := e.Create(e.ctx, record.NewID(inst), Limits{Pids: -1}); !errs.Is(err, errs.Invalid) {
		t.Errorf("negative limit: %v", err)
	}
}

func testForeign(t *testing.T, e *env) {
	h := e.layout.ours[0]
	for _, name := range []string{"not-an-id", record.NewID('d')} {
		d := e.rootDir(h) + "/" + name
		e.must(mkdir(d))
		defer unix.Rmdir(d) //nolint:errcheck // the leak check looks
		if err := e.Remove(e.ctx, name); !errs.Is(err, errs.Invalid) {
			t.Errorf("remove %s: %v", name, err)
		}
	}
	if ids, err := e.List(e.ctx); len(ids) > 0 || err != nil {
		t.Errorf("list: %v %v", ids, err)
	}
}

func testNested(t *testing.T, e *env) {
	const parent = "sandboxd-g-test.slice"
	n := newEnv(t, e.layout, parent+"/sandboxes")
	t.Cleanup(func() { // after those that n registers for its own processes, before n's root: order by hand
		for _, h := range e.layout.all {
			_ = unix.Rmdir(h.mount + "/" + parent + "/sandboxes")
			if err := unix.Rmdir(h.mount + "/" + parent); err != nil && !gone(err) {
				t.Errorf("%s: %v", h.mount, err)
			}
		}
	})
	id := n.create(Limits{MemoryBytes: 32 << 20, CPUMillis: 500, Pids: 20})
	n.sh(id, "exec sleep 100")
	if u := n.usage(id); u.Pids == 0 {
		t.Errorf("usage %+v", u)
	}
	n.must(n.Kill(n.ctx, id))
	n.must(n.Remove(n.ctx, id))
}

func testNothing(t *testing.T, e *env) {
	id := record.NewID(inst)
	for range 2 {
		e.must(e.Kill(e.ctx, id))
		e.must(e.Thaw(e.ctx, id))
		e.must(e.Remove(e.ctx, id))
	}
	if yes, err := e.Populated(id); yes || err != nil {
		t.Error("populated:", yes, err)
	}
	if yes, err := e.Frozen(id); yes || err != nil {
		t.Error("frozen:", yes, err)
	}
	if n, err := e.OOMKills(id); n != 0 || err != nil {
		t.Error("oom kills:", n, err)
	}
	ch, err := e.Watch(e.ctx, id)
	e.must(err)
	<-ch
	for what, err := range map[string]error{
		"freeze": e.Freeze(e.ctx, id),
		"start":  e.Start(id, exec.Command("/bin/true")),
		"update": e.Update(e.ctx, id, Limits{}),
		"lift":   e.Lift(id),
		"usage":  func() error { _, err := e.Usage(id); return err }(),
	} {
		if !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// testStart: the first instruction of a process is in the leaf of every
// hierarchy, and no thread of ours stays behind.
func testStart(t *testing.T, e *env) {
	id := e.create(Limits{MemoryBytes: 64 << 20, CPUMillis: 100, Pids: 20})
	var out bytes.Buffer
	cmd := exec.Command("/bin/cat", "/proc/self/cgroup")
	cmd.Stdout = &out
	e.must(e.Start(id, cmd))
	e.must(cmd.Wait())
	in := strings.Count(out.String(), ":"+e.CgroupsPath(id)+"\n")
	if in != len(e.layout.ours) {
		t.Errorf("in %d of %d hierarchies:\n%s", in, len(e.layout.ours), out.String())
	}
	tasks, _ := filepath.Glob("/proc/self/task/*/cgroup")
	for _, p := range tasks {
		if b, _ := os.ReadFile(p); strings.Contains(string(b), e.root) {
			t.Errorf("%s:\n%s", p, b)
		}
	}
	// It may fail, and leaves nothing then either.
	if err := e.Start(id, exec.Command("/nonexistent")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("start of nothing: %v", err)
	}
	e.sh(id, "exec sleep 100")
	e.must(e.Freeze(e.ctx, id))
	if err := e.Start(id, exec.Command("/bin/true")); !errs.Is(err, errs.WrongState) {
		t.Errorf("start in the frozen: %v", err)
	}
	e.must(e.Thaw(e.ctx, id))
	e.must(e.Kill(e.ctx, id))
	e.must(e.Remove(e.ctx, id))
}

// hog is a script that holds n MiB of memory and says so.
func hog(n int) string {
	return fmt.Sprintf(`x=$(head -c %d /dev/zero | tr '\0' x) && echo held ${#x}`, n<<20)
}

func (e *env) output(id, script string) string {
	e.t.Helper()
	var out bytes.Buffer
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Stdout, cmd.Stderr = &out, &out
	e.must(e.Start(id, cmd))
	_ = cmd.Wait() // killed, perhaps
	return out.String()
}

func testMemory(t *testing.T, e *env) {
	const limit = 24 << 20
	id := e.create(Limits{MemoryBytes: limit})
	if out := e.output(id, hog(2)); !strings.Contains(out, "held 2097152") {
		t.Fatalf("below the limit: %s", out)
	}
	if n, err := e.OOMKills(id); n != 0 || err != nil {
		t.Fatal("oom kills before:", n, err)
	}
	if out := e.output(id, hog(64)); strings.Contains(out, "held") {
		t.Fatalf("above the limit: %s", out)
	}
	u := e.usage(id)
	n, err := e.OOMKills(id)
	e.must(err)
	if n == 0 || u.OOMKills != n {
		t.Errorf("oom kills %d, in usage %d", n, u.OOMKills)
	}
	if u.MemoryPeakBytes < limit/2 || u.MemoryPeakBytes > limit {
		t.Errorf("peak %d of %d", u.MemoryPeakBytes, limit)
	}
}

func testHeadroom(t *testing.T, e *env) {
	id := e.create(Limits{MemoryBytes: 24 << 20, HeadroomBytes: 104 << 20})
	if out := e.output(id, hog(24)); strings.Contains(out, "held") {
		t.Errorf("above what is told, before Lift: %s", out)
	}
	for range 2 {
		e.must(e.Lift(id))
	}
	if out := e.output(id, hog(24)); !strings.Contains(out, "held") {
		t.Errorf("within the head-room, after Lift: %s", out)
	}
	if out := e.output(id, hog(256)); strings.Contains(out, "held") {
		t.Errorf("above the head-room: %s", out)
	}
}

func testCPU(t *testing.T, e *env) {
	id := e.create(Limits{CPUMillis: 200})
	for range 4 {
		e.sh(id, "while :; do :; done")
	}
	a := e.usage(id)
	start := time.Now()
	time.Sleep(time.Second) // what a second of wall clock may cost
	b := e.usage(id)
	share := float64(b.CPUMicros-a.CPUMicros) / float64(time.Since(start).Microseconds())
	if share > 0.3 || share < 0.05 {
		t.Errorf("4 spinners used %.3f CPUs, limit 0.2", share)
	}
	if b.ThrottledMicros == 0 {
		t.Error("never throttled")
	}
}

func testPids(t *testing.T, e *env) {
	id := e.create(Limits{Pids: 10})
	out := e.output(id, "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do sleep 1000 >/dev/null 2>&1 & done")
	if !strings.Contains(out, "fork") {
		t.Errorf("15 forks with 10 pids: %q", out)
	}
	if u := e.usage(id); u.Pids > 10 {
		t.Errorf("%d pids", u.Pids)
	}
}

func testUpdate(t *testing.T, e *env) {
	id := e.create(Limits{MemoryBytes: 64 << 20, CPUMillis: 500, Pids: 20})
	steps := []Limits{
		{MemoryBytes: 128 << 20, HeadroomBytes: 32 << 20, CPUMillis: 1500, Pids: 30},
		{MemoryBytes: 32 << 20, CPUMillis: 100, Pids: 5},
		{},
		{MemoryBytes: 48 << 20, CPUMillis: 300, Pids: 20},
	}
	for _, l := range steps {
		for range 2 {
			e.must(e.Update(e.ctx, id, l))
		}
		for _, c := range needed {
			h := e.layout.of[c]
			f := e.flavours[c]
			for _, w := range l.writes(c, f, true) {
				for _, d := range []string{e.dir(h, id), e.leafIn(h, id)} {
					got, err := readFile(d + "/" + w.file)
					e.must(err)
					got = strings.TrimSpace(got)
					if unlimited := w.value == "-1" && len(got) >= 19; got != w.value && !unlimited {
						t.Errorf("%s/%s is %s, want %s", d, w.file, got, w.value)
					}
				}
			}
		}
	}
	if err := e.Update(e.ctx, id, Limits{CPUMillis: -5}); !errs.Is(err, errs.Invalid) {
		t.Errorf("negative: %v", err)
	}
}

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
		if after := e.usage(id).CPUMicros; after != before {
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

func testPopulated(t *testing.T, e *env) {
	id := e.create(Limits{})
	cmd := e.sh(id, "exec sleep 1000")
	if yes, err := e.Populated(id); !yes || err != nil {
		t.Error("populated:", yes, err)
	}
	err := e.Remove(e.ctx, id)
	if !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), fmt.Sprintf("in there: %d (s", cmd.Process.Pid)) {
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
	for _, c := range []*exec.Cmd{stray, frozen} {
		go func() { _ = c.Wait() }()
	}
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
	if err := unix.Kill(stray.Process.Pid, 0); err == nil {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", stray.Process.Pid))
		if !bytes.Contains(comm, []byte(") Z ")) {
			t.Errorf("the stray lives: %s", comm)
		}
	}
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
