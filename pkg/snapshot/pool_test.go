package snapshot_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/project"
	"github.com/sandboxd/sandboxd/pkg/snapshot/snapshottest"
	"golang.org/x/sys/unix"
)

// A pool keeps what it has allocated, whatever is written and deleted in it.
func TestPoolStaysAllocated(t *testing.T) {
	e := snapshottest.New(t, pool.Auto, nil)
	if !e.Pool.Limits() {
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
	e := snapshottest.New(t, pool.BtrfsLoop, nil)
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

// TestPoolRefusals: a directory that cannot become a pool gets an error that says what
// to do, and nothing is left in it.
func TestPoolRefusals(t *testing.T) {
	e := snapshottest.New(t, pool.BtrfsLoop, nil)
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
	refused(errs.WrongState, `pool = "btrfs-loop"`, func(c *snapshot.Config) { c.StateDir, c.Pool = e.Config.StateDir, pool.Plain })
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

// file mounts a new file system in a file of 2 GiB on a new state directory's
// pool. It fails if the kernel does not want to.
func file(t *testing.T, options string, mkfs ...string) (state string, err error) {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "sandboxd-s-")
	if err != nil {
		t.Fatal(err)
	}
	state = filepath.Join(dir, "state")
	pool, image := filepath.Join(state, "pool"), filepath.Join(dir, "image")
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	for _, argv := range [][]string{
		{"mkdir", "-m", "700", state},
		{"mkdir", pool},
		{"truncate", "-s", "2G", image},
		append(slices.Clip(mkfs), image),
	} {
		if out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", argv, err, out)
		}
	}
	if out, err := exec.CommandContext(t.Context(), "mount", "-o", "loop,nosuid,nodev"+options, image, pool).CombinedOutput(); err != nil {
		return "", fmt.Errorf("mount: %w: %s", err, out)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(pool, 0); err != nil {
			t.Errorf("unmount %s: %v", pool, err)
		}
	})
	return state, nil
}

// TestPoolDevice: a blank block device becomes the pool, and is it again after a reboot.
// One that holds anything is refused and stays as it is.
func TestPoolDevice(t *testing.T) {
	hosttest.Root(t)
	image := filepath.Join(t.TempDir(), "disk")
	run := func(argv ...string) string {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v\n%s", argv, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	run("truncate", "-s", "512M", image)
	device := run("losetup", "--find", "--show", image)
	t.Cleanup(func() {
		if err := exec.Command("losetup", "--detach", device).Run(); err != nil {
			t.Error(err)
		}
	})
	change := func(c *snapshot.Config) { c.Pool, c.PoolDevice = pool.Btrfs, device }
	plain := snapshottest.New(t, pool.Plain, nil).Config
	refused := func(code errs.Code, want string, change func(*snapshot.Config)) {
		t.Helper()
		c := plain
		c.StateDir, c.RunDir = t.TempDir(), t.TempDir()
		change(&c)
		if _, err := snapshot.Open(t.Context(), c); !errs.Is(err, code) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s with %q", err, code, want)
		}
	}
	for _, mkfs := range [][]string{{"mkfs.ext4", "-q"}, {"mkfs.btrfs", "-q", "--label", "mine"}, {"mkswap"}} {
		run(append(slices.Clip(mkfs), device)...)
		is := run("blkid", "-p", device)
		refused(errs.WrongState, "wipefs -a "+device, change)
		if now := run("blkid", "-p", device); now != is {
			t.Errorf("%q became %q", is, now)
		}
		run("wipefs", "-a", device)
	}
	refused(errs.Invalid, "not a block device", func(c *snapshot.Config) { c.Pool, c.PoolDevice = pool.Btrfs, image })

	e := snapshottest.New(t, pool.Auto, change)
	name := filepath.Join(pool.Dir(e.Config.StateDir), e.Disk(t, 0), "u/file")
	if err := os.WriteFile(name, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := e.UnmountPool(); err != nil {
		t.Fatal(err)
	}
	e.Open(t)
	if b, err := os.ReadFile(name); err != nil || string(b) != "old" {
		t.Errorf("%q, %v", b, err)
	}
	if err := e.UnmountPool(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(pool.Dir(e.Config.StateDir), "stray"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := snapshot.Open(t.Context(), e.Config); !errs.Is(err, errs.WrongState) {
		t.Errorf("mounted over a file: %v", err)
	}
}

// A btrfs that somebody mounted is the pool, by name or because it is there.
func TestBtrfsMounted(t *testing.T) {
	hosttest.Root(t)
	for _, kind := range []string{pool.Btrfs, pool.Auto} {
		t.Run(kind, func(t *testing.T) {
			state, err := file(t, "", "mkfs.btrfs", "-q")
			if err != nil {
				t.Fatal(err)
			}
			snapshottest.Run(t, kind, func(c *snapshot.Config) { c.StateDir = state })
			if left, _ := filepath.Glob(filepath.Join(state, "pool.img*")); len(left) > 0 {
				t.Errorf("made %v", left)
			}
		})
	}
	t.Run("layers on it", func(t *testing.T) {
		state, err := file(t, "", "mkfs.btrfs", "-q")
		if err != nil {
			t.Fatal(err)
		}
		c := snapshottest.New(t, pool.Plain, nil).Config
		c.StateDir, c.Pool = filepath.Join(state, "pool", "state"), pool.Btrfs
		at := filepath.Join(c.StateDir, "pool")
		for _, argv := range [][]string{{"mkdir", "-p", at}, {"mount", "--bind", filepath.Join(state, "pool"), at}} {
			if out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %v\n%s", argv, err, out)
			}
		}
		defer func() {
			if err := unix.Unmount(at, 0); err != nil {
				t.Error(err)
			}
		}()
		if _, err := snapshot.Open(t.Context(), c); !errs.Is(err, errs.Unsupported) || !strings.Contains(err.Error(), "same btrfs") {
			t.Errorf("layers and disks on one btrfs: %v", err)
		}
	})
}

// An xfs or ext4 with project quotas is a pool; without them it says what is
// missing. Which of the two this kernel can is for scripts/test-vm.sh to know,
// whose story "pools" wants the suite.
func TestProjectQuotas(t *testing.T) {
	hosttest.Root(t)
	for name, mkfs := range map[string][]string{
		"xfs":  {"mkfs.xfs", "-q"},
		"ext4": {"mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota", "-N", "400000"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := exec.LookPath(mkfs[0]); err != nil {
				t.Fatalf("%v: apt-get install xfsprogs e2fsprogs", err)
			}
			if state, err := file(t, ",prjquota", mkfs...); err != nil {
				t.Logf("not on this kernel: %v", err)
			} else if err := project.Check(filepath.Join(state, "pool")); err != nil {
				t.Logf("not on this kernel: %v", err)
			} else {
				t.Run("suite", func(t *testing.T) {
					snapshottest.Run(t, pool.Project, func(c *snapshot.Config) { c.StateDir = state })
				})
			}
			without, err := file(t, "", mkfs[:2]...)
			if err != nil {
				t.Fatal(err)
			}
			c := snapshottest.New(t, pool.Plain, nil).Config
			c.StateDir, c.Pool = without, pool.Project
			if _, err := snapshot.Open(t.Context(), c); !errs.Is(err, errs.Unsupported) || !strings.Contains(err.Error(), "-o prjquota") {
				t.Errorf("without quotas: %v", err)
			}
		})
	}
}

// The check of inode numbers sees the trap it is there for.
func TestCollisionsAreSeen(t *testing.T) {
	e := snapshottest.New(t, pool.BtrfsLoop, nil)
	pairs, n, err := snapshottest.Collisions(e.TrapMount(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(pairs) < 90 {
		t.Errorf("%d collisions among %d files of two subvolumes, want about 100", len(pairs), n)
	}
}

// A pool that is full to the last block takes no snapshot, lets go of what is on
// it, and is then as good as before.
func TestFullPool(t *testing.T) {
	e := snapshottest.New(t, pool.BtrfsLoop, func(c *snapshot.Config) { c.PoolBytes = 256 << 20 })
	ctx := t.Context()
	old, id := e.Disk(t, 0), e.Disk(t, 0)
	kept := record.NewSnapshotID(snapshottest.Instance)
	if err := e.Snapshots.TakeSnapshot(ctx, kept, old); err != nil {
		t.Fatal(err)
	}
	fill(t, filepath.Join(e.Config.StateDir, "pool", id, "u"))
	snap := record.NewSnapshotID(snapshottest.Instance)
	if err := e.Snapshots.TakeSnapshot(ctx, snap, id); !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(), "pool") {
		t.Errorf("a snapshot on a full pool: %v", err)
	}
	if err := e.Disks.CreateDisk(ctx, record.NewID(snapshottest.Instance), kept, 1<<20); !errs.Is(err, errs.Exhausted) {
		t.Errorf("a disk of a snapshot on a full pool: %v", err)
	}
	if err := errors.Join(e.Disks.DeleteDisk(ctx, id), e.Snapshots.DeleteSnapshot(ctx, kept),
		e.Snapshots.DeleteSnapshot(ctx, snap)); err != nil {
		t.Fatalf("a full pool does not let go: %v", err)
	}
	// The kernel's cleaner comes by twice a minute.
	for end := time.Now().Add(90 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		if free, total, err := e.Pool.Space(); err == nil && free > total/2 {
			break
		} else if time.Now().After(end) {
			t.Fatalf("%d of %d bytes are free: %v", free, total, err)
		}
	}
	// Space for what describes files is counted by itself, and may come later.
	for end := time.Now().Add(90 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		err := e.Snapshots.TakeSnapshot(ctx, kept, old)
		if err == nil {
			break
		}
		if !errs.Is(err, errs.Exhausted) || time.Now().After(end) {
			t.Fatalf("a snapshot after the pool was full: %v", err)
		}
	}
	if left, err := e.Snapshots.ListSnapshots(ctx); err != nil || len(left) != 1 {
		t.Errorf("snapshots %v, %v", left, err)
	}
}

// fill writes files into a directory until not one more fits.
func fill(t *testing.T, dir string) {
	t.Helper()
	block := make([]byte, 1<<20)
	rand.Read(block) //nolint:errcheck // never fails since Go 1.24
	for fits := true; fits; {
		fits = false
		for size := len(block); size >= 512; size /= 2 { // small ones take metadata
			for {
				err := os.WriteFile(filepath.Join(dir, strings.Repeat("n", 200)+rand.Text()), block[:size], 0o600)
				if errors.Is(err, unix.ENOSPC) {
					break
				}
				if err != nil {
					t.Fatalf("filling the pool: %v", err)
				}
				fits = true
			}
		}
		unix.Sync() // may find room
	}
}

// A plain pool whose disk is full in the middle of a copy keeps no half of one.
func TestFullPlainPool(t *testing.T) {
	hosttest.Root(t)
	state, err := os.MkdirTemp("/var/tmp", "sandboxd-s-full-")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", state, "tmpfs", 0, "size=96m,nr_inodes=20k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Unmount(state, 0), os.Remove(state)); err != nil {
			t.Error(err)
		}
	})
	e := snapshottest.New(t, pool.Plain, func(c *snapshot.Config) { c.StateDir = state })
	ctx := t.Context()
	id := e.Disk(t, 0)
	if err := os.WriteFile(filepath.Join(state, "pool", id, "u/big"), make([]byte, 50<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	free, _, err := e.Pool.Space()
	if err != nil {
		t.Fatal(err)
	}
	snap := record.NewSnapshotID(snapshottest.Instance)
	if err := e.Snapshots.TakeSnapshot(ctx, snap, id); !errs.Is(err, errs.Exhausted) {
		t.Errorf("a snapshot of more than fits: %v", err)
	}
	if err := errors.Join(e.Snapshots.DeleteSnapshot(ctx, snap), e.Close()); err != nil {
		t.Fatal(err)
	}
	if now, _, err := e.Pool.Space(); err != nil || now < free {
		t.Errorf("%d bytes were free and %d are, %v", free, now, err)
	}
	short, cancel := context.WithCancel(ctx)
	cancel()
	if err := e.Snapshots.TakeSnapshot(short, snap, id); !errors.Is(err, context.Canceled) {
		t.Errorf("a snapshot that nobody waits for: %v", err)
	}
	if err := errors.Join(e.Snapshots.DeleteSnapshot(ctx, snap), e.Disks.DeleteDisk(ctx, id)); err != nil {
		t.Fatal(err)
	}
}
