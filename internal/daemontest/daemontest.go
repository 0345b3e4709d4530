// Package daemontest runs the real daemon for end-to-end tests. It starts and kills the
// daemon as a process; tests use the daemon through its sockets.
//
// Tests share the state directory of an instance, so that each image is imported once.
// A lock prevents two processes from using one instance at the same time. Test runs side
// by side have instances of their own (SANDBOXD_TEST_INSTANCE).
package daemontest

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/instance"
)

// Instance is the instance of test daemons, unless Options name another. Other is the
// instance of a second daemon.
var Instance, Other = hosttest.Instances()

// Options change how a test daemon is set up. New uses the zero Options.
type Options struct {
	Instance instance.Instance // Instance if zero
	StateDir string            // the instance's own if empty
	Pool     string            // "auto" if empty
	PoolSize string            // "4Gi" if empty
	Recipes  string            // directory of image recipes; rootfs if empty
	Programs string            // directory of the daemon and what it starts; that of make build if empty
	Root     string            // directory of versions, whose current one runs with its own programs; none if empty
	Wrap     []string          // a command that runs the daemon, as prlimit(1)
	TCP      string            // address of its TCP listener; a free port of loopback if empty
	Key      string            // API key; Key if empty
	Listen   []string          // lines of the [listen] table
	Storage  []string          // lines of the [storage] table of the configuration
	Prepared int               // prepared slots of each runtime; none unless a test is about them
	Config   []string          // lines after the [log] table of the configuration
}

// Key is the API key of test daemons.
const Key = "key-of-a-test-daemon"

// Daemon is one test daemon; it may be stopped and started again.
type Daemon struct {
	Socket string // path of the Unix socket
	TCP    string // address of the TCP listener
	Config string // path of the configuration file

	Instance instance.Instance
	StateDir string

	t       testing.TB
	recipes string // directory of image recipes
	program string // the daemon's
	wrap    []string
	cmd     *exec.Cmd
	done    chan struct{}
	log     *os.File // in memory: what the daemon has written is there when it goes on
}

// Bin returns the path of a program that make build made.
func Bin(name string) string {
	dir := os.Getenv("SANDBOXD_BIN")
	if dir == "" {
		dir = filepath.Join(root(), "build", "bin")
	}
	return filepath.Join(dir, name)
}

// root is the top of the checkout. A test runs in the directory of its package, and does
// not know the place of its source: it may be compiled with -trimpath.
func root() string {
	dir, err := os.Getwd()
	for ; err == nil; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil || dir == "/" {
			break
		}
	}
	return dir
}

// New starts a daemon with the given additions to its configuration, and at
// the end of the test stops it, tears the instance down and checks that
// nothing is left on the host. It needs root (hosttest.Root).
func New(t testing.TB, config ...string) *Daemon {
	t.Helper()
	return NewWith(t, Options{Config: config})
}

// NewWith is New with Options.
func NewWith(t testing.TB, o Options) *Daemon {
	t.Helper()
	d := Prepare(t, o)
	d.Start()
	return d
}

// Prepare is NewWith without the start.
func Prepare(t testing.TB, o Options) *Daemon {
	t.Helper()
	hosttest.Root(t)
	o.Programs = cmp.Or(o.Programs, Bin(""))
	program := filepath.Join(o.Programs, "sandboxd")
	if o.Root != "" {
		program = filepath.Join(o.Root, "current/bin/sandboxd")
	}
	if _, err := os.Stat(program); err != nil {
		t.Fatalf("the daemon is not built: run make build (%v)", err)
	}
	if o.Instance == 0 {
		o.Instance = Instance
	}
	lock(t, o.Instance)
	must(t, claimState(o.Instance.StateDir()))
	d := &Daemon{
		t:        t,
		Instance: o.Instance,
		StateDir: cmp.Or(o.StateDir, o.Instance.StateDir()),
		Socket:   filepath.Join(o.Instance.RunDir(), "sandboxd.sock"),
		TCP:      o.TCP,
		Config:   filepath.Join(t.TempDir(), "config.toml"),
		recipes:  cmp.Or(o.Recipes, filepath.Join(root(), "rootfs")),
		program:  program,
		wrap:     o.Wrap,
		log:      memory(t, "sandboxd.log"),
	}
	if d.TCP == "" {
		d.TCP = hosttest.FreePort(t).String()
	}
	d.configure(o)
	d.teardown() // a killed test run may have left something
	hosttest.Leaks(t, d.Instance)
	t.Cleanup(func() {
		d.Stop()
		d.teardown()
		if t.Failed() {
			t.Logf("the daemon said:\n%s", d.Log())
		}
	})
	return d
}

func (d *Daemon) configure(o Options) {
	d.t.Helper()
	key := filepath.Join(filepath.Dir(d.Config), "key")
	must(d.t, os.WriteFile(key, []byte(cmp.Or(o.Key, Key)+"\n"), 0o600))
	programs := fmt.Sprintf("libexec_dir = %q\nrecipes_dir = %q", o.Programs, d.recipes)
	if o.Root != "" {
		programs = ""
	}
	text := fmt.Sprintf(`instance = %q
state_dir = %q
%s
[listen]
socket_group = "root"
tcp = %q
api_key_file = %q
%s
[storage]
pool = %q
pool_size = %q
%s
[prepared]
runsc = %d
runc = %d
[log]
level = "debug"
`, d.Instance, d.StateDir, programs, d.TCP, key, strings.Join(o.Listen, "\n"),
		cmp.Or(o.Pool, "auto"), cmp.Or(o.PoolSize, "4Gi"), strings.Join(o.Storage, "\n"), o.Prepared, o.Prepared)
	must(d.t, os.WriteFile(d.Config, []byte(text+strings.Join(o.Config, "\n")), 0o600))
}

// Start starts the daemon and returns when the daemon serves.
func (d *Daemon) Start(env ...string) {
	d.t.Helper()
	if err := d.TryStart(env...); err != nil {
		d.t.Fatalf("start the daemon: %v; it said:\n%s", err, d.Log())
	}
}

// TryStart is Start for daemons that may refuse to start.
func (d *Daemon) TryStart(env ...string) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	argv := append(append([]string(nil), d.wrap...), d.program, "serve", "--config", d.Config)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = d.log, d.log
	cmd.ExtraFiles = []*os.File{w}
	cmd.Env = append(append(os.Environ(), "SANDBOXD_READY_FD=3"), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		w.Close()
		return err
	}
	w.Close()
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	d.cmd, d.done = cmd, done
	said, _ := io.ReadAll(io.LimitReader(r, 8))
	if string(said) != "READY=1\n" {
		<-done
		return fmt.Errorf("it ended before it served: %v", cmd.ProcessState)
	}
	return nil
}

// StartArmed starts the daemon with a failpoint, as "up:cgroup=kill".
func (d *Daemon) StartArmed(point string) error {
	return d.TryStart(failpoint.Env + "=" + point)
}

// Pid is the daemon's process ID.
func (d *Daemon) Pid() int { return d.cmd.Process.Pid }

// Kill kills the daemon with SIGKILL.
func (d *Daemon) Kill() {
	_ = d.cmd.Process.Signal(syscall.SIGKILL)
	<-d.done
}

// Stop asks the daemon to end, and waits until it has ended.
func (d *Daemon) Stop() {
	if d.cmd == nil {
		return
	}
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-d.done:
	case <-time.After(30 * time.Second):
		d.t.Error("the daemon did not end within 30 s of SIGTERM")
		d.Kill()
	}
}

// Ended is closed when the daemon's process has ended.
func (d *Daemon) Ended() <-chan struct{} { return d.done }

// Log is the daemon's log so far: all that it had written when it answered a request, or ended.
func (d *Daemon) Log() string {
	d.t.Helper()
	fi, err := d.log.Stat()
	must(d.t, err)
	b := make([]byte, fi.Size())
	_, err = d.log.ReadAt(b, 0) // its own offset is where the daemon writes
	must(d.t, err)
	return string(b)
}

func (d *Daemon) teardown() {
	if err := d.Teardown(); err != nil {
		d.t.Error(err)
	}
}

// Teardown runs sandboxd teardown, whose error says what it printed.
func (d *Daemon) Teardown() error {
	out, err := exec.Command(d.program, "teardown", "--config", d.Config).CombinedOutput()
	if err != nil {
		return fmt.Errorf("teardown: %w\n%s", err, out)
	}
	return nil
}

// lock prevents two test processes from using one instance.
func lock(t testing.TB, inst instance.Instance) {
	t.Helper()
	f, err := os.OpenFile("/run/lock/sandboxd-test-"+inst.String(), os.O_CREATE|os.O_RDWR, 0o600)
	must(t, err)
	must(t, syscall.Flock(int(f.Fd()), syscall.LOCK_EX))
	t.Cleanup(func() { f.Close() })
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// memory makes a file that is on no disk (memfd_create(2)).
func memory(t testing.TB, name string) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	must(t, os.NewSyscallError("memfd_create", err))
	f := os.NewFile(uintptr(fd), name)
	t.Cleanup(func() { f.Close() })
	return f
}
