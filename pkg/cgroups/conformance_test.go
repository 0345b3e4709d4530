package cgroups

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
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
		{"rouse", testRouse},
		{"memory", testMemory},
		{"head-room", testHeadroom},
		{"cpu", testCPU},
		{"pids", testPids},
		{"files", testFiles},
		{"update", testUpdate},
		{"update below use", testBelowUse},
		{"cpu shares", testShares},
		{"io", testIO},
		{"freeze and thaw", testFreeze},
		{"kill a fork bomb", testForkBomb},
		{"kill the frozen", testKillFrozen},
		{"kill the dying", testKillDying},
		{"remove the populated", testPopulated},
		{"what runtimes leave", testRuntimeLeftovers},
		{"libcontainer", testLibcontainer},
		{"oom group", testOOMGroup},
		{"watch", testWatch},
		{"outliving", testOutliving},
		{"inspecting", testInspecting},
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
	tree, err := open(Config{Instance: inst, Root: root, Disks: []Disk{{Dev: diskOf(t, ".")}}}, lay)
	if err != nil {
		t.Fatal(err)
	}
	e := &env{Tree: tree, t: t, ctx: context.Background()}
	e.must(e.sweep()) // what a killed run left
	t.Cleanup(func() {
		if err := errors.Join(e.sweep(), tree.RemoveRoot(), tree.Close()); err != nil {
			t.Error(err)
		}
	})
	return e
}

func (e *env) sweep() error {
	ids, err := e.List(e.ctx)
	for _, id := range ids {
		err = errors.Join(err, e.Kill(e.ctx, id), e.Remove(e.ctx, id))
	}
	return err
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
	a, b := e.create(Limits{}), e.create(Limits{MemoryBytes: 64 << 20, Pids: 50, OOMGroup: true})
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
	holdParent(t, e, parent)
	n := newEnv(t, e.layout, parent+"/sandboxes")
	t.Cleanup(func() {
		for _, h := range e.layout.all {
			_ = unix.Rmdir(h.mount + "/" + parent + "/sandboxes")
			if err := unix.Rmdir(h.mount + "/" + parent); err != nil && !gone(err) {
				t.Errorf("%s: %v", h.mount, err)
			}
		}
	})
	id := n.create(Limits{MemoryBytes: 32 << 20, Pids: 20})
	n.sh(id, "exec sleep 100")
	if u := n.usage(id); u.Pids == 0 {
		t.Errorf("usage %+v", u)
	}
	n.must(n.Kill(n.ctx, id))
	n.must(n.Remove(n.ctx, id))
}

// holdParent: v2 gives no controllers below a cgroup that holds a process.
func holdParent(t *testing.T, e *env, parent string) {
	if len(e.layout.onV2()) == 0 {
		return
	}
	dir := e.layout.v2.mount + "/" + parent
	e.must(mkdir(dir))
	fd, err := openRaw(dir, unix.O_PATH)
	e.must(err)
	defer unix.Close(fd) //nolint:errcheck // a path
	cmd := exec.Command("/bin/sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd}
	e.must(cmd.Start())
	tree, err := open(Config{Instance: inst, Root: parent + "/sandboxes"}, e.layout)
	if err == nil {
		e.must(tree.Close())
	}
	if err == nil || !strings.Contains(err.Error(), "hold no processes") {
		t.Errorf("open below a cgroup with a process: %v", err)
	}
	e.must(cmd.Process.Kill())
	_ = cmd.Wait()
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
	if hit, err := MemoryLimitHit(e.Tree, id); hit || err != nil {
		t.Error("limit hit:", hit, err)
	}
	ch, err := e.Watch(e.ctx, id)
	e.must(err)
	<-ch
	for what, err := range map[string]error{
		"freeze": e.Freeze(e.ctx, id),
		"start":  e.Start(id, exec.Command("/bin/true")),
		"cpu":    e.LimitCPU(e.ctx, id, 100),
		"usage":  func() error { _, err := e.Usage(id); return err }(),
	} {
		if !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// testRouse: it moves nothing.
func testRouse(t *testing.T, e *env) {
	where := func() string {
		b, err := os.ReadFile("/proc/self/cgroup")
		e.must(err)
		return string(b)
	}
	before := where()
	e.must(e.Rouse())
	if after := where(); after != before {
		t.Errorf("it is in\n%sand was in\n%s", after, before)
	}
}

// testStart: the first instruction of a process is in the leaf of every
// hierarchy, and no thread of ours stays behind.
func testStart(t *testing.T, e *env) {
	id := e.create(Limits{MemoryBytes: 64 << 20, Pids: 20})
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
