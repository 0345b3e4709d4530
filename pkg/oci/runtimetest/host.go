// Package runtimetest is the conformance suite that every runtime of sandboxd passes:
// it puts the same questions to runsc and runc, from inside the sandbox.
//
// It makes namespaces, cgroups and root file systems itself, in the simplest way that
// works: a runtime is tested against the kernel, not against other packages.
package runtimetest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/oci/trust"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// inst is the instance whose names the suite uses.
const inst = instance.Instance('r')

// A Runtime is the interface under test: sandbox.Runtime, and Close.
type Runtime interface {
	Start(ctx context.Context, id string, stdin *os.File) error
	Forget(ctx context.Context, id string) error
	List(ctx context.Context) ([]string, error)
	Close() error
}

// A Host is the environment of a runtime under test.
type Host struct {
	Root string // for its state
	Bin  string // build/bin
	// Libexec has the agent of the test, as a version of sandboxd has.
	Libexec string

	runtime string // oci.Runsc or oci.Runc
	dir     string
	agent   string
	slots   chan int
}

// NewHost makes the directories of a test. When the test ends it checks that nothing is
// left on the host.
func NewHost(t testing.TB, name string) *Host {
	t.Helper()
	hosttest.Root(t)
	lock(t) // two test binaries would report each other's sandboxes as leaks
	hosttest.Leaks(t, inst)
	h := &Host{runtime: name, dir: inst.RunDir(), slots: make(chan int, 64)}
	for i := range cap(h.slots) {
		h.slots <- i
	}
	h.Root = filepath.Join(h.dir, name)
	bin, err := filepath.Abs("../../../build/bin")
	must(t, err)
	h.Bin = bin
	must(t, os.MkdirAll(h.Root, 0o700))
	must(t, os.Chmod(h.dir, 0o711)) // mapped roots must pass through
	t.Cleanup(func() {
		for _, d := range []string{h.Root, filepath.Join(h.dir, "ns"), filepath.Join(h.dir, "bundles")} {
			must(t, os.RemoveAll(d))
		}
		os.Remove(h.dir) // the other runtime's test may still use it
		for _, c := range hierarchies(t) {
			os.Remove(filepath.Join(c, inst.CgroupRoot()))
		}
	})
	must(t, os.MkdirAll(filepath.Join(h.dir, "ns"), 0o700))
	h.Libexec = t.TempDir()
	h.agent = filepath.Join(h.Libexec, "agent")
	must(t, os.Mkdir(h.agent, 0o755))
	must(t, errors.Join(os.Chmod(h.Libexec, 0o755), os.Chmod(h.agent, 0o755)))
	for _, target := range trust.AgentFiles { // as `make build` does
		must(t, os.WriteFile(filepath.Join(h.agent, filepath.Base(target)), nil, 0o644))
	}
	build := exec.Command("go", "build", "-o", filepath.Join(h.agent, "sandbox-agent"), "../runtimetest/guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the guest: %v\n%s", err, out)
	}
	return h
}

func lock(t testing.TB) {
	t.Helper()
	f, err := os.OpenFile("/run/sandboxd-runtimetest.lock", os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	must(t, err)
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	t.Cleanup(func() { f.Close() })
}

// Bundle is where the bundle of id lies.
func (h *Host) Bundle(id string) string { return filepath.Join(h.dir, "bundles", id) }

// StartInCgroup starts cmd in the leaf of id. On v1 a child starts in the cgroup of the
// thread that forked it; v2 has CLONE_INTO_CGROUP.
func (h *Host) StartInCgroup(id string, cmd *exec.Cmd) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: a thread left in a cgroup ends with the goroutine
		done <- h.startInCgroup(id, cmd)
	}()
	return <-done
}

func (h *Host) startInCgroup(id string, cmd *exec.Cmd) (err error) {
	_, v2, err := mounts()
	if err != nil {
		return err
	}
	join := func(m, group string) error {
		return os.WriteFile(filepath.Join(m, group, "tasks"), []byte("0"), 0)
	}
	home, err := os.ReadFile("/proc/thread-self/cgroup")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(home)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch m := filepath.Join("/sys/fs/cgroup", f[1]); f[1] {
		case "cpu", "memory", "pids": // cpuset needs cpus first; the others limit nothing
			if err := join(m, leaf(id)); err != nil {
				return err
			}
			defer func() { err = errors.Join(err, join(m, f[2])) }()
		}
	}
	dir, err := os.Open(filepath.Join(v2, leaf(id)))
	if err != nil {
		return err
	}
	defer dir.Close()
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.UseCgroupFD = true
	cmd.SysProcAttr.CgroupFD = int(dir.Fd())
	return cmd.Start()
}

// Processes lists the processes in the leaf of id.
func (h *Host) Processes(id string) (pids []int, err error) {
	_, v2, err := mounts()
	if err != nil {
		return nil, err
	}
	b, err := os.ReadFile(filepath.Join(v2, leaf(id), "cgroup.procs"))
	if err != nil {
		return nil, err
	}
	for f := range strings.FieldsSeq(string(b)) {
		pid, err := strconv.Atoi(f)
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// A Box is one sandbox and the near end of its stdin.
type Box struct {
	ID     string
	Config oci.Config

	h     *Host
	slot  int
	rt    Runtime
	near  *os.File
	stdin *os.File
	in    *bufio.Reader
	once  sync.Once
}

// NewBox makes everything a sandbox needs before its runtime starts. It is
// removed when the test ends, or by Kill and Remove.
func (h *Host) NewBox(t testing.TB, rt Runtime) *Box {
	t.Helper()
	b := &Box{ID: record.NewID(inst), h: h, rt: rt, slot: <-h.slots}
	t.Cleanup(func() { b.Remove(t) })
	dir := filepath.Join(h.dir, b.ID)
	rootfs := filepath.Join(dir, "rootfs")
	base := 0
	if h.runtime == oci.Runc {
		base = int(inst.UIDBase(b.slot))
	}
	// runsc mounts its own tmpfs on an empty /tmp. It mounts none on this one, which
	// has an entry like pkg/snapshot's scaffold.
	for _, d := range []string{"dev", "etc", "opt/opensandbox", "proc", "run", "sys", "tmp/.X11-unix"} {
		must(t, os.MkdirAll(filepath.Join(rootfs, d), 0o755))
	}
	for _, f := range []string{"resolv.conf", "hosts", "hostname"} {
		must(t, os.WriteFile(filepath.Join(rootfs, "etc", f), nil, 0o644))
	}
	must(t, filepath.WalkDir(rootfs, func(p string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Chown(p, base, base))
	}))
	must(t, os.Chown(dir, 0, base))
	must(t, os.Chmod(dir, 0o710))
	for _, m := range hierarchies(t) {
		must(t, os.MkdirAll(filepath.Join(m, leaf(b.ID)), 0o755))
	}
	b.makeNamespaces(t, base)

	nofile, err := oci.HostNoFile()
	must(t, err)
	b.Config = oci.Config{
		ID: b.ID, Hostname: "lab", RootFS: rootfs, NetNS: b.ns("net"), CgroupsPath: "/" + leaf(b.ID),
		AgentDir: h.agent, Env: []string{"ANSWER=42"},
		MemoryBytes: 256 << 20, CPUMillis: 1000, Pids: 100, NoFile: nofile,
	}
	if base != 0 {
		b.Config.UserNS = b.ns("user")
	}
	for name, path := range map[string]*string{
		"resolv.conf": &b.Config.ResolvConf, "hosts": &b.Config.Hosts,
		"hostname": &b.Config.HostnameFile, "boot_id": &b.Config.BootID,
	} {
		must(t, os.MkdirAll(h.Bundle(b.ID), 0o700))
		must(t, oci.WriteFile(h.Bundle(b.ID), name, []byte("# "+name+" of sandboxd\n"), 0o644))
		*path = filepath.Join(h.Bundle(b.ID), name)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	must(t, unix.SetNonblock(pair[0], true)) // so that deadlines work
	b.near, b.stdin = os.NewFile(uintptr(pair[0]), "near"), os.NewFile(uintptr(pair[1]), "stdin")
	b.in = bufio.NewReader(b.near)
	return b
}

func (b *Box) ns(kind string) string { return filepath.Join(b.h.dir, "ns", b.ID+"."+kind) }

// makeNamespaces pins a network namespace and, above base 0, the user
// namespace that owns it.
func (b *Box) makeNamespaces(t testing.TB, base int) {
	t.Helper()
	cmd := exec.Command("cat") // lives until its stdin ends
	hold, err := cmd.StdinPipe()
	must(t, err)
	kinds := []string{"net"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	if base != 0 {
		kinds = append(kinds, "user")
		ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: base, Size: 65536}}
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings, cmd.SysProcAttr.GidMappings = ids, ids
	}
	must(t, cmd.Start())
	for _, k := range kinds {
		must(t, os.WriteFile(b.ns(k), nil, 0o600))
		must(t, unix.Mount(fmt.Sprintf("/proc/%d/ns/%s", cmd.Process.Pid, k), b.ns(k), "", unix.MS_BIND, ""))
	}
	hold.Close()
	must(t, cmd.Wait())
}

// Start writes the bundle and starts the sandbox.
func (b *Box) Start(ctx context.Context) error {
	if err := oci.Write(b.h.Bundle(b.ID), oci.NewSpec(b.h.runtime, b.Config)); err != nil {
		return err
	}
	return b.rt.Start(ctx, b.ID, b.stdin)
}

// Ask puts one question to PID 1 and decodes the answer into v.
func (b *Box) Ask(question string, v any) error {
	if err := b.near.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return err
	}
	if _, err := b.near.WriteString(question + "\n"); err != nil {
		return err
	}
	line, err := b.in.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("ask %s for %s: %w", b.ID, question, err)
	}
	return json.Unmarshal(line, v)
}

// Kill kills every process of the sandbox and waits until they are gone.
func (b *Box) Kill(t testing.TB) {
	t.Helper()
	_, v2, err := mounts()
	must(t, err)
	dir := filepath.Join(v2, filepath.Dir(leaf(b.ID)))
	if err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	b.AwaitDead(t)
}

// AwaitDead waits until no process of the sandbox lives.
func (b *Box) AwaitDead(t testing.TB) {
	t.Helper()
	_, v2, err := mounts()
	must(t, err)
	events := filepath.Join(v2, filepath.Dir(leaf(b.ID)), "cgroup.events")
	f, err := os.Open(events)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	must(t, err)
	defer f.Close()
	buf := make([]byte, 256)
	for deadline := time.Now().Add(10 * time.Second); ; {
		n, err := f.ReadAt(buf, 0)
		if n == 0 {
			must(t, err)
		}
		if strings.Contains(string(buf[:n]), "populated 0") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not die", b.ID)
		}
		fds := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}
		unix.Poll(fds, 1000) //nolint:errcheck // the file is read again in any case
	}
}

// hostSide returns the kernel's view of every host process of the sandbox: the fields
// of its status, oom_score_adj, its user namespace as userns, and its limits on core files as
// core.
func (b *Box) hostSide(t testing.TB) map[string]map[string]string {
	t.Helper()
	_, v2, err := mounts()
	must(t, err)
	pids, err := os.ReadFile(filepath.Join(v2, leaf(b.ID), "cgroup.procs"))
	must(t, err)
	all := map[string]map[string]string{}
	for _, pid := range strings.Fields(string(pids)) {
		status, err := os.ReadFile("/proc/" + pid + "/status")
		score, scoreErr := os.ReadFile("/proc/" + pid + "/oom_score_adj")
		userns, usernsErr := os.Readlink("/proc/" + pid + "/ns/user")
		limits, limitsErr := os.ReadFile("/proc/" + pid + "/limits")
		if errors.Join(err, scoreErr, usernsErr, limitsErr) == nil { // otherwise it has just ended
			all[pid] = fields(string(status))
			all[pid]["oom_score_adj"], all[pid]["userns"] = strings.TrimSpace(string(score)), userns
			core, _ := find(string(limits), "Max core file size")
			all[pid]["core"] = strings.Join(strings.Fields(core), " ")
		}
	}
	if len(all) == 0 {
		t.Errorf("%s has no process in its cgroup", b.ID)
	}
	return all
}

// Remove ends the sandbox and removes everything that NewBox made.
func (b *Box) Remove(t testing.TB) {
	t.Helper()
	b.once.Do(func() {
		b.Kill(t)
		must(t, b.rt.Forget(context.Background(), b.ID))
		b.near.Close()
		b.stdin.Close()
		for _, k := range []string{"net", "user"} {
			if err := unix.Unmount(b.ns(k), unix.MNT_DETACH); err == nil {
				must(t, os.Remove(b.ns(k)))
			}
		}
		for _, m := range hierarchies(t) {
			for _, g := range []string{leaf(b.ID), filepath.Dir(leaf(b.ID))} {
				rmdir(t, filepath.Join(m, g))
			}
		}
		must(t, oci.Remove(b.h.Bundle(b.ID)))
		must(t, os.RemoveAll(filepath.Join(b.h.dir, b.ID)))
		b.h.slots <- b.slot
	})
}

// rmdir removes a cgroup. v1 releases dead tasks a moment late, without an event.
func rmdir(t testing.TB, dir string) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); ; {
		err := os.Remove(dir)
		if err == nil || errors.Is(err, os.ErrNotExist) {
			return
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
}

func leaf(id string) string { return filepath.Join(inst.CgroupRoot(), id, "run") }

// mounts lists the mount points of the v1 hierarchies and of v2.
func mounts() (v1 []string, v2 string, err error) {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, "", err
	}
	for line := range strings.Lines(string(b)) {
		switch f := strings.Fields(line); f[2] {
		case "cgroup":
			v1 = append(v1, f[1])
		case "cgroup2":
			v2 = f[1]
		}
	}
	if v2 == "" {
		return nil, "", errors.New("no cgroup2 file system is mounted")
	}
	return v1, v2, nil
}

func hierarchies(t testing.TB) []string {
	t.Helper()
	v1, v2, err := mounts()
	must(t, err)
	return append(v1[:len(v1):len(v1)], v2)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
