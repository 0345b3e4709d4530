package snapshottest

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// testLimitDisk: a limit grows and shrinks while files are there.
func (e *Env) testLimitDisk(t *testing.T) {
	if !e.Pool.Limits() {
		id := e.Disk(t, 0)
		if err := e.Disks.LimitDisk(t.Context(), id, 32<<20); !errs.Is(err, errs.Unsupported) {
			t.Errorf("a pool that cannot limit: %v", err)
		}
		must(t, e.Disks.DeleteDisk(t.Context(), id))
		return
	}
	id := e.Disk(t, 32<<20)
	// Through the overlay, as guests: on ext4 no quota stops root on the disk itself.
	file := filepath.Join(e.mount(t, id, identity, false), "file")
	grow := func(bytes int) error { return os.WriteFile(file, make([]byte, bytes), 0o600) }
	full := func(err error) bool { return errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.ENOSPC) }
	if err := grow(48 << 20); !full(err) {
		t.Errorf("48 MiB onto 32: %v", err)
	}
	must(t, os.Remove(file))
	must(t, e.Disks.LimitDisk(t.Context(), id, 64<<20))
	must(t, e.Disks.LimitDisk(t.Context(), id, 64<<20))
	if err := grow(48 << 20); err != nil {
		t.Errorf("48 MiB onto 64: %v", err)
	}
	must(t, withFile(file, unix.Fsync))
	must(t, e.Disks.LimitDisk(t.Context(), id, 40<<20)) // below what is there: nothing more
	if used, limit, err := e.Disks.Usage(id); err != nil || limit != 40<<20 || used < 39<<20 {
		t.Errorf("used %d of %d, %v", used, limit, err)
	}
	if err := os.WriteFile(file+"2", make([]byte, 4<<20), 0o600); !full(err) {
		t.Errorf("4 MiB more: %v", err)
	}
	must(t, e.Mounts.Unmount(t.Context(), id))
	must(t, e.Disks.DeleteDisk(t.Context(), id))
	if err := e.Disks.LimitDisk(t.Context(), id, 64<<20); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a disk that is not there: %v", err)
	}
}

// testFiles: where a pool counts files, a guest runs out of them, and cannot leave the
// count.
func (e *Env) testFiles(t *testing.T) {
	kind, err := pool.Kind(e.Config.StateDir, e.Config.Pool)
	must(t, err)
	if kind != pool.Project {
		return // btrfs counts bytes, of which each file takes some; plain counts nothing
	}
	id := e.Disk(t, 64<<20)
	out := strings.TrimSpace(e.in(t, id, first, "files"))
	n, err := strconv.Atoi(out)
	must(t, err)
	if most := 1<<16 + 64<<20>>13; n > most || n < most-64 {
		t.Errorf("%d files went onto a disk for %d", n, most)
	}
	if used, limit, err := e.Disks.Usage(id); err != nil || used != limit {
		t.Errorf("of a disk without room for files %d of %d bytes are used, %v", used, limit, err)
	}
	root := e.mount(t, id, second, false) // also without room for the overlay's own
	if out, err := as("leave project", root, second); err == nil {
		t.Errorf("a guest takes its files out of the quota: %s", out)
	}
	must(t, e.Mounts.Unmount(t.Context(), id))
	must(t, e.Disks.DeleteDisk(t.Context(), id))
}

func withFile(path string, f func(fd int) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	return f(int(file.Fd()))
}

// testDevices: whole disks that are there; a pool in a loop file has its own.
func (e *Env) testDevices(t *testing.T) {
	pool, layers, err := e.Devices()
	must(t, err)
	if (pool != layers) != e.Pool.Limits() {
		t.Errorf("the pool is on %s, layers are on %s", pool, layers)
	}
	for _, dev := range []string{pool, layers} {
		if _, err := os.Stat("/sys/dev/block/" + dev); err != nil || dev == "" {
			t.Errorf("%q is no device: %v", dev, err)
		}
		if _, err := os.Stat("/sys/dev/block/" + dev + "/partition"); err == nil {
			t.Errorf("%s is a partition", dev)
		}
	}
}

// testMountPoint: what a guest put in the place of the agent's directory is no
// link any more when a runtime looks there.
func (e *Env) testMountPoint(t *testing.T) {
	id := e.Disk(t, 0)
	agents := filepath.Join(e.Config.StateDir, "pool", id, "u/.sandboxd")
	secret := t.TempDir()
	for name, plant := range map[string]func() error{
		"link":     func() error { return os.Symlink(secret, agents) },
		"file":     func() error { return os.WriteFile(agents, nil, 0o600) },
		"whiteout": func() error { return unix.Mknod(agents, unix.S_IFCHR, 0) },
		"nothing":  func() error { return nil },
	} {
		must(t, plant())
		e.mount(t, id, identity, false)
		fi, err := os.Lstat(filepath.Join(e.Mounts.RootfsDir(id), ".sandboxd"))
		if err != nil || !fi.IsDir() || fi.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v", name, fi, err)
		}
		must(t, e.Mounts.Unmount(t.Context(), id))
	}
	must(t, e.Disks.DeleteDisk(t.Context(), id))
}
