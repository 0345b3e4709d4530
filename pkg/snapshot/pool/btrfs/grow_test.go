package btrfs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// openLoop makes and mounts the smallest pool below a directory.
func openLoop(t *testing.T, dir string) *LoopPool {
	t.Helper()
	b := newLoop(t, dir)
	if err := b.Open(t.Context(), b.dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func room(t *testing.T, dir string) int64 {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Blocks) * st.Bsize
}

// mustHave fails unless the file of a pool has so many bytes, and all of their blocks.
func mustHave(t *testing.T, b *LoopPool, bytes int64) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(b.image, &st); err != nil || st.Size != bytes || st.Blocks*512 < bytes {
		t.Errorf("the file has %d bytes, of which %d are allocated, want %d; %v", st.Size, st.Blocks*512, bytes, err)
	}
}

// TestGrowUnderLoad: a disk that is written to without a pause goes on while its pool grows, keeps each
// byte, and then has the new space.
func TestGrowUnderLoad(t *testing.T) {
	hosttest.Root(t)
	b := openLoop(t, t.TempDir())
	disk := filepath.Join(b.dir, "disk")
	if err := b.Create(disk, 0); err != nil {
		t.Fatal(err)
	}
	written, stop := make(chan [sha256.Size]byte, 1), make(chan struct{})
	started := make(chan struct{})
	go func() { // it writes over 16 MiB again and again, and then says what must be there
		sum := [sha256.Size]byte{}
		defer func() { written <- sum }()
		f, err := os.Create(filepath.Join(disk, "file"))
		if err != nil {
			t.Error(err)
			close(started)
			return
		}
		defer f.Close()
		for i := 0; ; i++ {
			text := bytes.Repeat(fmt.Appendf(nil, "%015d\n", i), 1<<20)
			if _, err := f.WriteAt(text, 0); err != nil {
				t.Errorf("write %d: %v", i, err)
			}
			if err := f.Sync(); err != nil {
				t.Errorf("fsync %d: %v", i, err)
			}
			if sum = sha256.Sum256(text); i == 0 {
				close(started)
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	}()
	<-started
	for _, bytes := range []int64{2 * minPool, 2 * minPool, 3 * minPool} { // the second time it is so large
		if err := GrowLoop(t.Context(), b.image, b.dir, bytes, 0); err != nil {
			t.Fatal(err)
		}
		if got := room(t, b.dir); got != bytes {
			t.Errorf("the file system has %d bytes, want %d", got, bytes)
		}
	}
	close(stop)
	want := <-written
	got, err := os.ReadFile(filepath.Join(disk, "file"))
	if err != nil || sha256.Sum256(got) != want {
		t.Errorf("the file has other bytes, %v", err)
	}
	// More than the old pool held.
	if err := os.WriteFile(filepath.Join(disk, "more"), bytes.Repeat([]byte("x"), minPool+minPool/2), 0o600); err != nil {
		t.Error(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	mustHave(t, b, 3*minPool)
}

// TestGrowRefused: what cannot be is refused, and the file keeps its size.
func TestGrowRefused(t *testing.T) {
	hosttest.Root(t)
	d := hosttest.NewDisk(t, 1<<30)
	b := openLoop(t, d.Dir)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for what, c := range map[string]struct {
		ctx   context.Context
		bytes int64
		keep  int64
		want  string
	}{
		"smaller":       {t.Context(), minPool / 2, 0, "cannot become smaller"},
		"no room":       {t.Context(), 1 << 40, 0, "sandboxd pool move"},
		"no room spare": {t.Context(), 2 * minPool, 1 << 30, "stay free"},
		"interrupted":   {gone, 2 * minPool, 0, "it keeps its size"},
	} {
		if err := GrowLoop(c.ctx, b.image, b.dir, c.bytes, c.keep); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", what, err)
		}
		if fi, err := os.Stat(b.image); err != nil || fi.Size() != minPool {
			t.Errorf("%s: the file has %d bytes, %v", what, fi.Size(), err)
		}
	}
	// A process that was killed between the file and the file system.
	if err := os.Truncate(b.image, minPool+1<<20); err != nil {
		t.Fatal(err)
	}
	if err := GrowLoop(t.Context(), b.image, b.dir, 2*minPool, 0); err != nil || room(t, b.dir) != 2*minPool {
		t.Errorf("the next one: %v, and %d bytes", err, room(t, b.dir))
	}
}

const moveEnv = "BTRFS_TEST_MOVE" // the directory that TestMove's process moves the pool of to

// TestMove moves a pool to another disk and back; a process that is killed in between leaves it whole.
func TestMove(t *testing.T) {
	hosttest.Root(t)
	if dir := os.Getenv(moveEnv); dir != "" {
		if _, err := MoveLoop(t.Context(), filepath.Join(filepath.Dir(dir), "home", "pool.img"), dir, func(int64, int64) {}); err != nil {
			t.Fatal(err)
		}
		return
	}
	dir := t.TempDir()
	home, away := filepath.Join(dir, "home"), filepath.Join(dir, "away")
	for _, d := range []string{home, away} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	b := openLoop(t, home)
	marks := filepath.Join(b.dir, "file")
	if err := os.WriteFile(marks, []byte("of a sandbox\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	holds := func(what string) {
		t.Helper()
		if err := b.Open(t.Context(), b.dir); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if got, err := os.ReadFile(marks); err != nil || string(got) != "of a sandbox\n" {
			t.Errorf("%s: %q, %v", what, got, err)
		}
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
	}
	quiet := func(int64, int64) {}
	if _, err := MoveLoop(t.Context(), b.image, away, quiet); !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "in use") {
		t.Errorf("while it is mounted: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	for _, point := range []string{"pool:copied", "pool:link"} {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestMove$")
		cmd.Env = append(os.Environ(), moveEnv+"="+away, failpoint.Env+"="+point+"=kill")
		out, _ := cmd.CombinedOutput() // the state says how it ended
		if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); !ws.Signaled() {
			t.Fatalf("%s: %v\n%s", point, cmd.ProcessState, out)
		}
		holds(point)
		if err := os.Remove(filepath.Join(away, "sandboxd-pool.img")); err != nil && point == "pool:link" {
			t.Error(err)
		}
	}
	// The link stands, and whether it is on disk is not known: both names lead to a whole pool.
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestMove$")
	cmd.Env = append(os.Environ(), moveEnv+"="+away, failpoint.Env+"=pool:linked=error")
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "failpoint pool:linked") {
		t.Fatalf("%v\n%s", err, out)
	}
	holds("pool:linked")
	if _, err := MoveLoop(t.Context(), b.image, home, quiet); err != nil {
		t.Fatal(err)
	}
	file, err := MoveLoop(t.Context(), b.image, away, quiet)
	if err != nil {
		t.Fatal(err)
	}
	if got := names(t, home) + ", " + names(t, away); got != "pool pool.img, sandboxd-pool.img" {
		t.Errorf("there is %s", got)
	}
	holds("moved")
	if err := os.Rename(file, file+".off"); err != nil {
		t.Fatal(err)
	}
	if err := b.Open(t.Context(), b.dir); !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "mount its disk") {
		t.Errorf("without the disk: %v", err)
	}
	if err := os.Rename(file+".off", file); err != nil {
		t.Fatal(err)
	}
	if _, err := MoveLoop(t.Context(), b.image, home, quiet); err != nil {
		t.Fatal(err)
	}
	if got := names(t, home) + ", " + names(t, away); got != "pool pool.img, " {
		t.Errorf("there is %s", got)
	}
	holds("back")
	mustHave(t, b, minPool)
	if err := os.Chmod(away, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := MoveLoop(t.Context(), b.image, away, quiet); !errs.Is(err, errs.Denied) {
		t.Errorf("to a directory of everybody: %v", err)
	}
}

// TestCheck: a check of a whole pool succeeds; of one with a damaged block it fails, and says so.
func TestCheck(t *testing.T) {
	hosttest.Root(t)
	b := openLoop(t, t.TempDir())
	var out bytes.Buffer
	text := bytes.Repeat([]byte("found in the file of the pool\n"), 1<<15)
	if err := os.WriteFile(filepath.Join(b.dir, "file"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Check(t.Context(), b.dir, &out); err != nil {
		t.Errorf("%v\n%s", err, &out)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(b.image)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(whole, text[:60])
	if at < 0 {
		t.Fatal("the file is not in the pool")
	}
	f, err := os.OpenFile(b.image, os.O_RDWR, 0)
	if err == nil {
		_, err = f.WriteAt([]byte("lost"), int64(at))
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Open(t.Context(), b.dir); err != nil {
		t.Fatal(err)
	}
	if err := Check(t.Context(), b.dir, &out); !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("with a damaged block: %v\n%s", err, &out)
	}
}

// TestSizeFor: a new pool leaves a quarter of a small disk free, and none is made on a tiny one.
func TestSizeFor(t *testing.T) {
	hosttest.Root(t)
	d := hosttest.NewDisk(t, 600<<20)
	var st unix.Statfs_t
	if err := unix.Statfs(d.Dir, &st); err != nil {
		t.Fatal(err)
	}
	free := int64(st.Bavail) * st.Bsize
	dir := filepath.Join(d.Dir, "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	b := newLoop(t, dir)
	b.bytes = 0
	if err := b.make(t.Context()); err != nil {
		t.Fatal(err)
	}
	if want := free / 4 * 3; b.bytes > want || b.bytes < want-1<<20 {
		t.Errorf("of %d bytes it has taken %d", free, b.bytes)
	}
	mustBeWhole(t, b)
	if n, err := SizeFor(d.Dir); !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(), "storage.device") {
		t.Errorf("on the rest: %d, %v", n, err)
	}
}
