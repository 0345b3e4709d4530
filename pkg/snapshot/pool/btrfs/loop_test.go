package btrfs

import (
	"errors"
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
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// newLoop returns the driver of the smallest pool below dir, with an empty directory to
// mount it at.
func newLoop(t *testing.T, dir string) *LoopPool {
	t.Helper()
	b := NewLoop(filepath.Join(dir, "pool.img"), minPool, false)
	b.dir = filepath.Join(dir, "pool")
	if err := os.Mkdir(b.dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
	return b
}

// names lists dir.
func names(t *testing.T, dir string) string {
	t.Helper()
	found, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, f := range found {
		all = append(all, f.Name())
	}
	return strings.Join(all, " ")
}

// mustBeWhole fails unless the file of b is one that a pool can rely on: allocated in full,
// with a file system in which `btrfs check` finds nothing, and nothing beside it.
func mustBeWhole(t *testing.T, b *LoopPool) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(b.image, &st); err != nil {
		t.Fatal(err)
	}
	if st.Size != b.bytes || st.Blocks*512 < b.bytes {
		t.Errorf("the file has %d bytes, of which %d are allocated, want %d", st.Size, st.Blocks*512, b.bytes)
	}
	if out, err := exec.CommandContext(t.Context(), "btrfs", "check", "--readonly", b.image).CombinedOutput(); err != nil {
		t.Errorf("btrfs check: %v\n%s", err, out)
	}
	if got := names(t, filepath.Dir(b.image)); got != "pool pool.img" {
		t.Errorf("there is %s", got)
	}
}

// makes makes the pool below dir in a process of its own.
func makes(t *testing.T, dir string, env ...string) (state *os.ProcessState, out []byte) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledInMake$")
	cmd.Env = append(append(os.Environ(), makeEnv+"="+dir), env...)
	out, _ = cmd.CombinedOutput() // the state says how it ended
	if cmd.ProcessState == nil {
		t.Fatalf("%s did not start", cmd)
	}
	return cmd.ProcessState, out
}

const (
	makeEnv  = "BTRFS_TEST_MAKE"  // where makes makes a pool
	limitEnv = "BTRFS_TEST_LIMIT" // RLIMIT_FSIZE then, in bytes
)

// made is the process of makes: it makes a pool below dir.
func made(t *testing.T, dir string) {
	t.Helper()
	if s := os.Getenv(limitEnv); s != "" {
		var n uint64
		if _, err := fmt.Sscan(s, &n); err != nil {
			t.Fatal(err)
		}
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			t.Fatal(err)
		}
	}
	if err := newLoop(t, dir).make(t.Context()); err != nil {
		t.Fatal(errs.CodeOf(err), err)
	}
}

// TestKilledInMake: a process is killed in each step of making a pool, and the next one
// makes a whole pool of what it finds.
func TestKilledInMake(t *testing.T) {
	hosttest.Root(t)
	if dir := os.Getenv(makeEnv); dir != "" {
		made(t, dir)
		return
	}
	for _, point := range FailpointNames() {
		if point == "pool:mount" {
			continue // test/e2e kills the daemon there
		}
		dir := t.TempDir()
		state, out := makes(t, dir, failpoint.Env+"="+point+"=kill")
		if ws := state.Sys().(syscall.WaitStatus); !ws.Signaled() || ws.Signal() != unix.SIGKILL {
			t.Fatalf("%s: %v\n%s", point, state, out)
		}
		if got := names(t, dir); got != "pool pool.img.new" {
			t.Errorf("%s: the process that was killed has left %s", point, got)
		}
		b := newLoop(t, dir)
		if err := b.make(t.Context()); err != nil {
			t.Fatalf("%s: %v", point, err)
		}
		mustBeWhole(t, b)
	}
}

// TestKilledInMkfs: mkfs ends with the process that ran it, and what it would still write
// goes to a file that the next process does not use.
func TestKilledInMkfs(t *testing.T) {
	hosttest.Root(t)
	dir, bin := t.TempDir(), t.TempDir()
	alive := filepath.Join(bin, "alive") // open for writing as long as mkfs lives
	const mkfs = `#!/bin/sh
exec 9>"$(dirname "$0")/alive"
kill -9 $PPID
exec sleep 1000
`
	if err := errors.Join(unix.Mkfifo(alive, 0o600), os.WriteFile(filepath.Join(bin, "mkfs.btrfs"), []byte(mkfs), 0o700)); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		f, err := os.Open(alive)
		if err == nil {
			_, err = io.Copy(io.Discard, f)
			f.Close()
		}
		ended <- err
	}()
	state, out := makes(t, dir, "PATH="+bin+":"+os.Getenv("PATH"))
	if ws := state.Sys().(syscall.WaitStatus); !ws.Signaled() || ws.Signal() != unix.SIGKILL {
		t.Fatalf("%v\n%s", state, out)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(5 * time.Minute): // only if it does not end
		t.Fatal("mkfs lives on without the process that ran it")
	}
	old, err := os.OpenFile(filepath.Join(dir, "pool.img.new"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	b := newLoop(t, dir)
	if err := b.make(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := old.WriteAt(make([]byte, 8<<20), 0); err != nil { // as a mkfs in the kernel's hands would
		t.Fatal(err)
	}
	mustBeWhole(t, b)
}

// TestMakeOnFullDisk: a pool is made on a disk that it fills to the last block: nothing that
// follows the allocation needs another one. With a block less it is refused, and nothing of
// it is left.
func TestMakeOnFullDisk(t *testing.T) {
	hosttest.Root(t)
	dir := hosttest.SmallDisk(t, fmt.Sprintf("size=%d", minPool))
	b := newLoop(t, dir)
	if err := b.make(t.Context()); err != nil {
		t.Fatal(err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil || st.Bfree != 0 {
		t.Errorf("%d blocks are free, %v", st.Bfree, err)
	}
	mustBeWhole(t, b)

	dir = hosttest.SmallDisk(t, fmt.Sprintf("size=%d", minPool-os.Getpagesize()))
	err := newLoop(t, dir).make(t.Context())
	if !errs.Is(err, errs.Exhausted) || !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "lower pool_size or free space") {
		t.Errorf("with a block less: %v", err)
	}
	if got := names(t, dir); got != "pool" {
		t.Errorf("with a block less it leaves %s", got)
	}
}

// smallExt4 mounts an ext4 of so many bytes until t ends. It has direct I/O, which tmpfs has
// since Linux 6.6 only.
func smallExt4(t *testing.T, bytes int64) (dir string) {
	t.Helper()
	image, dir := filepath.Join(t.TempDir(), "ext4.img"), t.TempDir()
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, bytes)); err != nil {
		t.Fatal(err)
	}
	for _, argv := range [][]string{{"mkfs.ext4", "-q", image}, {"mount", "-o", "loop", image, dir}} {
		if out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount the ext4 at %s: %v", dir, err)
		}
	})
	return dir
}

// TestFullWhileWritten: the disk is full while the first part of a file is written, which is
// possible where an allocation is no promise (thin provisioning): writeFirst says so. Where
// make is refused although there was room, its error says by what, and nothing is left.
func TestFullWhileWritten(t *testing.T) {
	hosttest.Root(t)
	sparse := filepath.Join(smallExt4(t, 16<<20), "sparse")
	if err := os.WriteFile(sparse, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := writeFirst(t.Context(), sparse, minPool, time.Hour); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("the first 32 of 256 MiB on a disk of 16: %v", err)
	}
	dir := t.TempDir()
	state, out := makes(t, dir, fmt.Sprintf("%s=%d", limitEnv, minPool/2))
	for _, want := range []string{string(errs.Exhausted), unix.EFBIG.Error(), "does not take 256 MiB (pool_size)", "MiB free"} {
		if state.Success() || !strings.Contains(string(out), want) {
			t.Errorf("with a limit of file sizes: %v, and no word of %q:\n%s", state, want, out)
		}
	}
	if got := names(t, dir); got != "pool" {
		t.Errorf("with a limit of file sizes it leaves %s", got)
	}
}
