package snapshot_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/snapshot/snapshottest"
	"golang.org/x/sys/unix"
)

// A pool keeps what it has allocated, whatever is written and deleted in it.
func TestPoolStaysAllocated(t *testing.T) {
	e := snapshottest.New(t, snapshot.PoolAuto, nil)
	if !e.Limits() {
		t.Fatalf("auto is %s", e.Describe())
	}
	id := e.Disk(t, 0)
	big := filepath.Join(e.Config.StateDir, "pool", id, "u/big")
	if err := os.WriteFile(big, make([]byte, 100<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	unix.Sync()
	if err := os.Remove(big); err != nil {
		t.Fatal(err)
	}
	if err := e.UnmountPool(); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(e.Config.StateDir, "pool.img"), &st); err != nil {
		t.Fatal(err)
	}
	if held := st.Blocks * 512; held < e.Config.PoolBytes {
		t.Errorf("the pool file holds %d bytes of %d", held, e.Config.PoolBytes)
	}
}

// A pool that lives on in somebody's mount namespace is mounted from the same
// device again: a second one over the same file would destroy it.
func TestPoolHeldElsewhere(t *testing.T) {
	e := snapshottest.New(t, snapshot.PoolBtrfsLoop, nil)
	id := e.Disk(t, 0)
	file := filepath.Join("pool", id, "u/file")
	if err := os.WriteFile(filepath.Join(e.Config.StateDir, file), []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	// It has said so once its copy of the mounts is its own.
	holder := exec.CommandContext(t.Context(), "unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; exec cat")
	in, err := holder.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := e.UnmountPool(); err != nil {
		t.Fatal(err)
	}
	e.Open(t)
	var devices int
	bound, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range bound {
		if b, _ := os.ReadFile(f); strings.TrimSpace(string(b)) == filepath.Join(e.Config.StateDir, "pool.img") {
			devices++
		}
	}
	if devices != 1 {
		t.Errorf("%d loop devices have the pool", devices)
	}
	if b, err := os.ReadFile(filepath.Join(e.Config.StateDir, file)); err != nil || string(b) != "old" {
		t.Errorf("%q, %v", b, err)
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	if err := holder.Wait(); err != nil {
		t.Fatal(err)
	}
}

// What can not become a pool says what to do, and leaves nothing.
func TestPoolRefusals(t *testing.T) {
	e := snapshottest.New(t, snapshot.PoolBtrfsLoop, nil)
	refused := func(code errs.Code, want string, change func(*snapshot.Config)) {
		t.Helper()
		c := e.Config
		c.StateDir, c.RunDir = t.TempDir(), t.TempDir()
		change(&c)
		_, err := snapshot.Open(t.Context(), c)
		if !errs.Is(err, code) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s with %q", err, code, want)
		}
		left, err := filepath.Glob(filepath.Join(c.StateDir, "pool.img*"))
		if c.StateDir != e.Config.StateDir && (err != nil || len(left) > 0) {
			t.Errorf("left %v (%v)", left, err)
		}
	}
	refused(errs.Exhausted, "pool_size", func(c *snapshot.Config) { c.PoolBytes = 15 << 40 })
	refused(errs.Invalid, "pool_size", func(c *snapshot.Config) { c.PoolBytes = 1 << 20 })
	refused(errs.Internal, `pool "zfs"`, func(c *snapshot.Config) { c.Pool = "zfs" })
	refused(errs.WrongState, `pool = "btrfs-loop"`, func(c *snapshot.Config) { c.StateDir, c.Pool = e.Config.StateDir, snapshot.PoolPlain })
	refused(errs.WrongState, `pool = "plain"`, func(c *snapshot.Config) {
		if err := os.MkdirAll(filepath.Join(c.StateDir, "pool", "x"), 0o700); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("without mkfs.btrfs", func(t *testing.T) {
		t.Setenv("PATH", "/nowhere")
		refused(errs.Unsupported, "apt-get install btrfs-progs", func(*snapshot.Config) {})
	})
}

// The check of inode numbers sees the trap it is there for.
func TestCollisionsAreSeen(t *testing.T) {
	e := snapshottest.New(t, snapshot.PoolBtrfsLoop, nil)
	pairs, n, err := snapshottest.Collisions(e.TrapMount(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(pairs) < 90 {
		t.Errorf("%d collisions among %d files of two subvolumes, want about 100", len(pairs), n)
	}
}
