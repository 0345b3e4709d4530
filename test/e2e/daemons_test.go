package e2e_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/snapshottest"
)

// second starts another daemon with the configuration of h and returns what it
// says; it must refuse.
func second(t *testing.T, h host) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), daemontest.Bin("sandboxd"), "serve", "--config", h.Config).CombinedOutput()
	if err == nil {
		t.Fatalf("it did not refuse: %s", out)
	}
	return string(out)
}

// TestSecondDaemon starts a daemon beside one of the same instance.
func TestSecondDaemon(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	sb := h.create(t, spec("runc"))
	var said string
	soon(t, time.Second, "refuse", func() time.Duration { return took(func() { said = second(t, h) }) })
	if !strings.Contains(said, fmt.Sprintf("(pid %d)", h.Pid())) || !strings.Contains(said, fmt.Sprintf("instance %q", h.Instance)) {
		t.Errorf("it says %q; want the pid of the first, %d", said, h.Pid())
	}
	h.answers(t, sb.ID)
}

// seed gives a state directory the images of h, which is stopped for it, and a
// plain pool.
func seed(t *testing.T, h host, dir string) {
	t.Helper()
	id, err := os.ReadFile(filepath.Join(h.StateDir, "pool", "id"))
	if err != nil {
		t.Fatal(err)
	}
	h.Stop()
	if err := os.MkdirAll(filepath.Join(dir, "pool"), 0o700); err != nil {
		t.Fatal(err)
	}
	// A store and the pool it belongs to know each other by this.
	if err := os.WriteFile(filepath.Join(dir, "pool", "id"), id, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "cp", "-a", filepath.Join(h.StateDir, "layers"), filepath.Join(h.StateDir, "sandboxd.db"),
		dir).CombinedOutput()
	if err != nil {
		t.Fatalf("copy the images: %v\n%s", err, out)
	}
	h.Start()
}

// TestTwoInstances has two daemons on one host: neither is touched by what the
// other does, to its end.
func TestTwoInstances(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	dir := filepath.Join(t.TempDir(), "state")
	seed(t, h, dir)
	mine := h.create(t, spec("runsc"))
	before := h.holds()
	t.Run("other", func(t *testing.T) {
		u := connect(t, daemontest.NewWith(t, daemontest.Options{Instance: daemontest.Other, StateDir: dir, Pool: "plain"}))
		for _, runtime := range runtimes {
			theirs := u.create(t, spec(runtime))
			if theirs.ID[0] != byte(daemontest.Other) || mine.ID[0] != byte(daemontest.Instance) {
				t.Errorf("the ids are %s and %s", theirs.ID, mine.ID)
			}
			u.answers(t, theirs.ID)
			if err := h.unknown(t, theirs.ID); err != nil {
				t.Error(err)
			}
		}
		h.Kill()
		if err := h.TryStart(); err != nil { // a recovery beside the sandboxes of u
			t.Fatal(err)
		}
		all, err := u.api.List(t.Context(), client.Filter{})
		if err != nil || len(all) != 2 {
			t.Errorf("%d sandboxes, %v", len(all), err)
		}
		for _, sb := range all {
			u.answers(t, sb.ID)
		}
	}) // u is torn down, with its sandboxes, and checked
	h.answers(t, mine.ID)
	h.holdsOnly(t, before)
}

// TestSocketPath starts a daemon where a socket was left, where somebody else
// serves, and where a file lies.
func TestSocketPath(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	h.Kill() // it leaves its socket
	if _, err := os.Lstat(h.Socket); err != nil {
		t.Fatal(err)
	}
	if err := h.TryStart(); err != nil {
		t.Fatalf("over a stale socket: %v", err)
	}
	if _, err := h.api.Version(t.Context()); err != nil {
		t.Error(err)
	}
	h.Stop()
	_ = os.Remove(h.Socket)
	l, err := net.Listen("unix", h.Socket)
	if err != nil {
		t.Fatal(err)
	}
	if said := second(t, h); !strings.Contains(said, "another program answers there") {
		t.Errorf("beside another program it says %q", said)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(h.Socket, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if said := second(t, h); !strings.Contains(said, "the file there is not a socket") {
		t.Errorf("over a file it says %q", said)
	}
	if b, err := os.ReadFile(h.Socket); err != nil || string(b) != "precious" {
		t.Errorf("the file is %q, %v", b, err)
	}
	if err := os.Remove(h.Socket); err != nil {
		t.Fatal(err)
	}
	h.Start()
}

// TestFailedStart starts a daemon whose port is taken: nothing of it stays on the host,
// as after a teardown. If a sandbox lives, it lives on, confined.
func TestFailedStart(t *testing.T) {
	h := connect(t, daemontest.Prepare(t, daemontest.Options{}))
	clean := h.holds()
	h.Start()
	daemontest.Image(t, h.Daemon, "base")
	fails := func() {
		t.Helper()
		h.Stop()
		l, err := net.Listen("tcp", h.TCP)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		said := second(t, h)
		if !strings.Contains(said, "address already in use") || strings.Contains(said, "level=INFO") { // a service tries for days
			t.Errorf("it says %q", said)
		}
	}
	fails()
	settles(t, func() error {
		if held := h.holds(); !slices.Equal(held, clean) {
			return fmt.Errorf("the host holds %q, want %q", held, clean)
		}
		return nil
	})
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || bytes.Contains(mounts, []byte(" "+h.StateDir+"/pool ")) {
		t.Errorf("the pool is still mounted (%v)", err)
	}
	if _, err := os.Stat(h.Instance.RunDir()); !os.IsNotExist(err) {
		t.Errorf("the run directory is still there: %v", err)
	}
	h.Start() // with the images that it had
	for _, runtime := range runtimes {
		sb := h.create(t, spec(runtime))
		before := h.holds()
		fails()
		h.holdsOnly(t, before)
		h.Start()
		h.answers(t, sb.ID)
	}
}

// TestLostState tears down an instance whose state directory is gone, but for the mount of its
// pool, at which `rm -rf` stops: nothing of it stays on the host. While a sandbox lives, the
// teardown refuses and changes nothing.
func TestLostState(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	h := connect(t, daemontest.Prepare(t, daemontest.Options{StateDir: state, Pool: "btrfs-loop", PoolSize: "1Gi"}))
	clean := h.holds()
	h.Start()
	daemontest.Image(t, h.Daemon, "base")
	sb := h.create(t, spec("runc"))
	move := func(from, to string) {
		t.Helper()
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	h.Stop()
	before := h.holds()
	move(state, state+".lost")
	if err := h.Teardown(); err == nil || !strings.Contains(err.Error(), "the link sb-"+sb.ID) {
		t.Errorf("with a sandbox: %v", err)
	}
	h.holdsOnly(t, before)
	move(state+".lost", state)
	h.Start()
	if err := h.Teardown(); err == nil || !strings.Contains(err.Error(), "stop it") {
		t.Errorf("with a daemon: %v", err)
	}
	h.answers(t, sb.ID)
	h.deleteAll(t)
	h.Stop()
	if err := os.RemoveAll(state); !errors.Is(err, unix.EBUSY) || loopsOf(t, state) != 1 {
		t.Errorf("remove a state directory with a pool that is mounted: %v, and %d loop devices", err, loopsOf(t, state))
	}
	for range 2 {
		if err := h.Teardown(); err != nil {
			t.Error(err)
		}
		settles(t, func() error {
			if held := h.holds(); !slices.Equal(held, clean) {
				return fmt.Errorf("the host holds %q, want %q", held, clean)
			}
			return nil
		})
	}
	if err := snapshottest.StuckLoops(state); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(h.Instance.RunDir()); !os.IsNotExist(err) {
		t.Errorf("%s is there: %v", h.Instance.RunDir(), err)
	}
	if left, err := os.ReadDir(state); err != nil || len(left) > 0 {
		t.Errorf("%s has %v, %v", state, left, err)
	}
}

// loopsOf counts the loop devices over files of a directory, removed ones too.
func loopsOf(t *testing.T, dir string) (n int) {
	t.Helper()
	all, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range all {
		if b, err := os.ReadFile(file); err == nil && strings.HasPrefix(string(b), dir+"/") {
			n++
		}
	}
	return n
}

// TestNewerSchema starts a daemon on the state file of a newer one.
func TestNewerSchema(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	sb := h.create(t, spec("runc"))
	h.Stop()
	path := filepath.Join(h.StateDir, "sandboxd.db")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	restore := func() {
		if err := os.WriteFile(path, good, 0o600); err != nil {
			t.Error(err)
		}
	}
	defer restore()
	// Key and value lie side by side in a page of bbolt.
	newer := regexp.MustCompile(`schema[0-9]`).ReplaceAll(good, []byte("schema9"))
	if bytes.Equal(newer, good) {
		t.Fatal("the schema is not where it was")
	}
	if err := os.WriteFile(path, newer, 0o600); err != nil {
		t.Fatal(err)
	}
	if said := second(t, h); !strings.Contains(said, "schema 9") || !strings.Contains(said, "newer sandboxd") {
		t.Errorf("it says %q", said)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, newer) {
		t.Errorf("it changed the file it refused (%v)", err)
	}
	restore()
	h.Start()
	h.answers(t, sb.ID)
}

// TestLostStore starts a daemon whose state file is gone, beside a pool with
// the disk of a running sandbox: it takes nothing for a stray, says so, and
// when the file is back everything is.
func TestLostStore(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	sb := h.create(t, spec("runc"))
	if _, err := h.exec(t.Context(), sb.ID, "sh", "-c", "echo kept >/root/file"); err != nil {
		t.Fatal(err)
	}
	before := h.holds()
	h.Stop()
	path := filepath.Join(h.StateDir, "sandboxd.db")
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	defer func() { // images are in it, for all tests
		if _, err := os.Stat(path + ".away"); err == nil {
			h.Stop()
			_ = os.Rename(path+".away", path)
		}
	}()
	h.Start()
	if all, err := h.api.List(t.Context(), client.Filter{}); err != nil || len(all) > 0 {
		t.Errorf("%+v, %v", all, err)
	}
	if log := h.Log(); !strings.Contains(log, "is not that of the state") {
		t.Error("the daemon does not say that the pool is not that of its state")
	}
	h.holdsOnly(t, before)
	h.Stop()
	if err := os.Rename(path+".away", path); err != nil {
		t.Fatal(err)
	}
	h.Start()
	if out, err := h.exec(t.Context(), sb.ID, "cat", "/root/file"); err != nil || out != "kept\n" {
		t.Errorf("after the state file came back: %q, %v", out, err)
	}
	h.holdsOnly(t, before)
}

// TestStop ends the daemon while a stream is open: within two seconds, not after
// the ten that requests in flight have to end, and the sandbox goes on.
func TestStop(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		sb := h.create(t, spec(runtime))
		soon(t, 2*time.Second, "stop beside a stream on "+runtime, func() time.Duration {
			p, err := h.api.Start(t.Context(), sb.ID, client.Command{Argv: []string{"sleep", "1000"}})
			if err != nil {
				t.Fatal(err)
			}
			lasted := took(h.Stop)
			p.Close()
			h.Start()
			h.answers(t, sb.ID)
			if st, err := h.api.Commands(sb.ID).Status(t.Context(), p.ID); err != nil || !st.Running {
				t.Errorf("the command did not go on: %+v, %v", st, err)
			}
			return lasted
		})
	}
}

// TestDiskFull fills the file system of the state directory.
func TestDiskFull(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	state := smallDisk(t)
	seed(t, h, state)
	u := connect(t, daemontest.NewWith(t, daemontest.Options{Instance: daemontest.Other, StateDir: state, Pool: "plain"}))
	before := u.empty(t)
	old := u.create(t, spec("runc"))

	fill(t, filepath.Join(state, "fill"))
	for _, runtime := range runtimes {
		sb, err := u.api.Create(t.Context(), spec(runtime), true)
		switch {
		case err != nil && !errs.Is(err, errs.Exhausted):
			t.Errorf("create: %s: %v", errs.CodeOf(err), err)
		case err == nil && (sb.Status.State != wire.Failed || !strings.Contains(sb.Status.Message, "full")):
			t.Errorf("create: %+v", sb.Status)
		}
	}
	u.answers(t, old.ID)
	u.deleteAll(t, old.ID)
	if err := u.api.Delete(t.Context(), old.ID); err != nil {
		t.Errorf("delete on a full disk: %v", err)
	}
	u.holdsOnly(t, before)
	if err := os.Remove(filepath.Join(state, "fill")); err != nil {
		t.Fatal(err)
	}
	for _, runtime := range runtimes {
		u.answers(t, u.create(t, spec(runtime)).ID)
	}
	u.deleteAll(t)
	u.holdsOnly(t, before)
}

// smallDisk is an empty file system of 8 GiB, that takes nothing until it is
// written to.
func smallDisk(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	state := filepath.Join(dir, "state")
	for _, argv := range [][]string{
		{"mkdir", state},
		{"truncate", "-s", "8G", filepath.Join(dir, "fs")}, // sparse: room for every image of the tests
		{"mkfs.ext4", "-q", "-m", "0", filepath.Join(dir, "fs")},
		{"mount", "-o", "loop", filepath.Join(dir, "fs"), state},
	} {
		if out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", argv, err, out)
		}
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(state, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return state
}

// fill writes a file until nothing more fits beside it.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size, end := int64(1<<28), int64(0); size >= 1<<20; size /= 2 { // fast: nothing is written
		for ; syscall.Fallocate(int(f.Fd()), 0, end, size) == nil; end += size {
		}
	}
	if _, err := f.Seek(0, io.SeekEnd); err != nil {
		t.Fatal(err)
	}
	for size := 1 << 20; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}
