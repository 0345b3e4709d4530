// Package snapshottest is the conformance suite of storage pools: every kind
// of pool, and both ways of mounting, pass it.
//
// A package that runs it needs Main as its TestMain: guests are the test
// binary, started again as root of a user namespace, chrooted into what is
// tested.
package snapshottest

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"golang.org/x/sys/unix"
)

// Run runs the suite on one kind of pool.
func Run(t *testing.T, pool string, change func(*snapshot.Config)) {
	e := New(t, pool, change)
	t.Run("Manifest", e.testManifest)
	t.Run("Snapshot", e.testSnapshot)
	t.Run("Diff", e.testDiff)
	t.Run("Inodes", e.testInodes)
	t.Run("Limit", e.testLimit)
	t.Run("LimitDisk", e.testLimitDisk)
	t.Run("Files", e.testFiles)
	t.Run("Devices", e.testDevices)
	t.Run("MountPoint", e.testMountPoint)
	t.Run("Access", e.testAccess)
	t.Run("Twice", e.testTwice)
	t.Run("Volatile", e.testVolatile)
	t.Run("ReadFile", e.testReadFile)
	t.Run("Stray", e.testStray)
	t.Run("Layers", e.testLayers)
	t.Run("Whiteouts", e.testWhiteouts)
	t.Run("Volumes", e.testVolumes)
	t.Run("VolumePaths", e.testVolumePaths)
	t.Run("Reopen", e.testReopen)
}

// A disk moves between slots and runtimes, and nobody sees a difference.
func (e *Env) testManifest(t *testing.T) {
	id := e.Disk(t, 64<<20)
	e.in(t, id, first, "write")
	want := e.in(t, id, first, "manifest")
	for _, w := range []string{
		"/srv/su 106755 1000:1000", "/srv/of-65535 100640 65535:0", "/usr/bin/of-33 106755 33:33", "/usr/bin/link 120777 7:8 plain",
		"/usr/bin/ping 100755 0:0", "/usr/bin/su 104755 0:0", "/tmp 41777 0:0", "/tmp/.X11-unix 41777 0:0", "/srv/sg/inherits 100644 0:50",
		"/opt/opensandbox 40755 0:0", "/etc/resolv.conf 100644 0:0",
	} {
		if !strings.Contains(want, "\n"+w+" ") {
			t.Errorf("manifest lacks %q", w)
		}
	}
	for _, w := range []string{"/usr/share/goes ", "/usr/lib/dir/old ", "/dev/null "} {
		if strings.Contains(want, "\n"+w) {
			t.Errorf("manifest has %q", w)
		}
	}
	for name, s := range map[string]slot{"second slot": second, "identity": identity, "third slot": third} {
		diff(t, "first slot", want, name, e.in(t, id, s, "manifest"))
	}
	e.in(t, id, identity, "rewrite")
	want = e.in(t, id, identity, "manifest")
	diff(t, "identity, rewritten", want, "third slot", e.in(t, id, third, "manifest"))
	must(t, e.Disks.DeleteDisk(t.Context(), id))
}

func diff(t *testing.T, nameA, a, nameB, b string) {
	t.Helper()
	la, lb := strings.Split(a, "\n"), strings.Split(b, "\n")
	for _, l := range la {
		if !slices.Contains(lb, l) {
			t.Errorf("only in %s: %s", nameA, l)
		}
	}
	for _, l := range lb {
		if !slices.Contains(la, l) {
			t.Errorf("only in %s: %s", nameB, l)
		}
	}
}

// No two files show the same device and inode number.
func (e *Env) testInodes(t *testing.T) {
	id := e.Disk(t, 128<<20)
	root := e.mount(t, id, first, true)
	_, err := as("many", root, first)
	must(t, err)
	pairs, n, err := Collisions(root)
	must(t, err)
	if len(pairs) > 0 {
		t.Errorf("%d of %d files show the (device, inode) of another, as %s", len(pairs), n, pairs[0])
	}
	if n < 6000 {
		t.Errorf("saw %d files, want more than 6000", n)
	}
	must(t, e.Mounts.Unmount(t.Context(), id))
	must(t, e.Disks.DeleteDisk(t.Context(), id))
}

// A guest gets what it was promised, then an error, and the neighbours nothing of it.
func (e *Env) testLimit(t *testing.T) {
	const limit = 48 << 20
	if !e.Pool.Limits() {
		err := e.Disks.CreateDisk(t.Context(), record.NewID(Instance), "", limit)
		if !errs.Is(err, errs.Unsupported) || !strings.Contains(err.Error(), "pool") {
			t.Errorf("limit on a pool that has none: %v", err)
		}
		return
	}
	id := e.Disk(t, limit)
	out := strings.TrimSpace(e.in(t, id, second, "fill"))
	n, err := strconv.ParseInt(out, 10, 64)
	must(t, err)
	if n > limit || n < limit-4<<20 {
		t.Errorf("%d bytes went into a disk of %d", n, limit)
	}
	free, total, err := e.Pool.Space()
	must(t, err)
	if free < total/2 {
		t.Errorf("%d of %d bytes are free in the pool", free, total)
	}
	if _, l, err := e.Disks.Usage(id); err != nil || l != limit {
		t.Errorf("Usage: limit %d, %v; want %d", l, err, limit)
	}
	must(t, e.Disks.DeleteDisk(t.Context(), id))
	if _, _, err := e.Disks.Usage(id); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Usage without a disk: %v", err)
	}
}

// testAccess: only the sandbox gets at its files, and nothing in them is setuid or a
// device for the host.
func (e *Env) testAccess(t *testing.T) {
	id := e.Disk(t, 0)
	root := e.mount(t, id, first, false)
	var st unix.Stat_t
	must(t, unix.Stat(filepath.Dir(root), &st))
	if st.Mode&0o7777 != 0o710 || st.Uid != 0 || st.Gid != first.base {
		t.Errorf("above the rootfs: %o %d:%d, want 710 0:%d", st.Mode&0o7777, st.Uid, st.Gid, first.base)
	}
	var fst unix.Statfs_t
	must(t, unix.Statfs(root, &fst))
	if want := int64(unix.ST_NOSUID | unix.ST_NODEV); fst.Flags&want != want {
		t.Errorf("mount flags %#x, want nosuid and nodev", fst.Flags)
	}
	if _, err := as("manifest", root, second); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("a neighbour gets in: %v", err)
	}
	must(t, e.Mounts.Unmount(t.Context(), id))
	root = e.mount(t, id, identity, false)
	must(t, unix.Stat(filepath.Dir(root), &st))
	if st.Mode&0o7777 != 0o700 {
		t.Errorf("above the rootfs: %o, want 700", st.Mode&0o7777)
	}
	if _, err := as("device", root, identity); err == nil {
		t.Error("a gofer as host root makes devices")
	}
	must(t, unix.Stat(e.Config.StateDir, &st))
	if st.Mode&0o7777 != 0o700 {
		t.Errorf("state directory: %o, want 700", st.Mode&0o7777)
	}
	must(t, e.Mounts.Unmount(t.Context(), id))
	// Where setuid bits count, for the sandbox, a neighbour is kept out all the same.
	e.users[id] = first
	must(t, e.Mounts.Mount(t.Context(), id, snapshot.Mount{Layers: []string{e.Layer}, OwnUsers: true, UIDBase: first.base, SetUID: true}))
	must(t, unix.Statfs(root, &fst))
	if fst.Flags&(unix.ST_NOSUID|unix.ST_NODEV) != unix.ST_NODEV {
		t.Errorf("mount flags %#x, want nodev without nosuid", fst.Flags)
	}
	if _, err := as("manifest", root, second); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("a neighbour gets in: %v", err)
	}
	must(t, e.Mounts.Unmount(t.Context(), id))
	must(t, e.Disks.DeleteDisk(t.Context(), id))
}

// Everything can be unmade twice, and never made; what is made is listed.
func (e *Env) testTwice(t *testing.T) {
	ctx := t.Context()
	id := e.Disk(t, 16<<20)
	if err := e.Disks.CreateDisk(ctx, id, "", 0); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second CreateDisk: %v", err)
	}
	e.held(t, id, true, false)
	e.mount(t, id, first, false)
	e.held(t, id, true, true)
	if err := e.Mounts.Mount(ctx, id, snapshot.Mount{Layers: []string{e.Layer}}); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second Mount: %v", err)
	}
	for range 2 {
		must(t, e.Mounts.Unmount(ctx, id))
		e.held(t, id, true, false)
	}
	// A mount that failed half way, and one that a kill cut short.
	err := e.Mounts.Mount(ctx, id, snapshot.Mount{Layers: []string{"sha256:" + strings.Repeat("0", 64)}})
	if !errs.Is(err, errs.NotFound) {
		t.Errorf("Mount of an absent layer: %v", err)
	}
	e.held(t, id, true, true)
	clones := filepath.Join(e.Config.RunDir, id, "clones", "0")
	must(t, os.MkdirAll(clones, 0o700))
	must(t, unix.Mount(e.Config.StateDir, clones, "", unix.MS_BIND, ""))
	for range 2 {
		must(t, e.Mounts.Unmount(ctx, id))
	}
	for range 2 {
		must(t, e.Disks.DeleteDisk(ctx, id))
		e.held(t, id, false, false)
	}
	never := record.NewID(Instance)
	must(t, errors.Join(e.Mounts.Unmount(ctx, never), e.Disks.DeleteDisk(ctx, never), e.Disks.MoveStray(ctx, never)))
	for _, bad := range []string{"", "../../etc", "lost+found"} {
		if e.Disks.DeleteDisk(ctx, bad) == nil || e.Mounts.Unmount(ctx, bad) == nil || e.Disks.MoveStray(ctx, bad) == nil {
			t.Errorf("%q passed as an id", bad)
		}
	}
	must(t, e.Pool.Sweep(ctx, ""))
}

func (e *Env) held(t *testing.T, id string, disk, mount bool) {
	t.Helper()
	disks, err := e.Disks.ListDisks(t.Context())
	must(t, err)
	mounts, err := e.Mounts.ListMounts(t.Context())
	must(t, err)
	if slices.Contains(disks, id) != disk || slices.Contains(mounts, id) != mount {
		t.Errorf("disks %v, mounts %v; want disk %v, mount %v of %s", disks, mounts, disk, mount, id)
	}
}

// testVolatile: the mark that overlayfs leaves when a volatile mount dies is removed,
// unless the host was down meanwhile.
func (e *Env) testVolatile(t *testing.T) {
	ctx := t.Context()
	id := e.Disk(t, 0)
	e.mount(t, id, identity, true)
	must(t, e.Mounts.Unmount(ctx, id))
	disk := filepath.Join(e.Config.StateDir, "pool", id)
	if _, err := os.Stat(filepath.Join(disk, "w/work/incompat/volatile")); err != nil {
		t.Fatalf("overlayfs left no mark: %v", err)
	}
	e.mount(t, id, second, false)
	must(t, e.Mounts.Unmount(ctx, id))

	e.mount(t, id, identity, true)
	must(t, e.Mounts.Unmount(ctx, id))
	must(t, unix.Setxattr(disk, "trusted.sandboxd.boot", []byte("another"), 0))
	err := e.Mounts.Mount(ctx, id, snapshot.Mount{Layers: []string{e.Layer}})
	if !errs.Is(err, errs.WrongState) {
		t.Errorf("Mount after a host crash: %v", err)
	}
	// One that was synced is as good as any other.
	must(t, e.Mounts.Unmount(ctx, id))
	must(t, e.Snapshots.SyncDisk(ctx, id))
	for range 2 {
		must(t, e.Mounts.Keep(ctx, id))
	}
	e.held(t, id, true, false)
	e.mount(t, id, identity, true)
	must(t, e.Snapshots.SyncDisk(ctx, id))
	left, err := filepath.Glob(filepath.Join(e.Config.StateDir, "pool/.trash/*-sync-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("a sync left %v, %v", left, err)
	}
	must(t, errors.Join(e.Mounts.Unmount(ctx, id), e.Disks.DeleteDisk(ctx, id)))
}

// A hostile upper gives nothing but its own files.
func (e *Env) testReadFile(t *testing.T) {
	ctx := t.Context()
	id := e.Disk(t, 0)
	upper := filepath.Join(e.Config.StateDir, "pool", id, "u")
	must(t, errors.Join(
		os.Mkdir(filepath.Join(upper, ".sandboxd"), 0o700),
		os.WriteFile(filepath.Join(upper, ".sandboxd/exit"), []byte("0123456789"), 0o600),
		os.Symlink("/etc/passwd", filepath.Join(upper, "abs")),
		os.Symlink("exit", filepath.Join(upper, ".sandboxd/rel")),
		os.Symlink(".sandboxd", filepath.Join(upper, "dir")),
		unix.Mkfifo(filepath.Join(upper, "fifo"), 0o600),
	))
	for _, p := range []string{".sandboxd/exit", "./.sandboxd/../.sandboxd/exit"} {
		b, err := e.Disks.ReadFile(ctx, id, p, 4)
		if err != nil || string(b) != "0123" {
			t.Errorf("ReadFile %s: %q, %v", p, b, err)
		}
	}
	for _, p := range []string{"abs", ".sandboxd/rel", "dir/exit", "fifo", ".sandboxd", "../w", "/etc/passwd", "../../id", ""} {
		if b, err := e.Disks.ReadFile(ctx, id, p, 100); err == nil {
			t.Errorf("ReadFile %q gives %q", p, b)
		}
	}
	if _, err := e.Disks.ReadFile(ctx, id, "absent", 1); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("ReadFile of an absent file: %v", err)
	}
	must(t, e.Disks.DeleteDisk(ctx, id))
}

// A stray disk is kept for a day, and not forever.
func (e *Env) testStray(t *testing.T) {
	ctx := t.Context()
	id, old := e.Disk(t, 1<<20), e.Disk(t, 1<<20)
	lost := filepath.Join(e.Config.StateDir, "pool", "lost+found")
	must(t, e.Disks.MoveStray(ctx, id))
	must(t, e.Disks.MoveStray(ctx, old))
	e.held(t, id, false, false)
	found, err := filepath.Glob(filepath.Join(lost, "*"))
	must(t, err)
	if len(found) != 2 {
		t.Fatalf("lost+found holds %v", found)
	}
	day := strconv.FormatInt(time.Now().Add(-25*time.Hour).Unix(), 10)
	for _, p := range found {
		if strings.HasPrefix(filepath.Base(p), old) {
			must(t, os.Rename(p, filepath.Join(lost, old+"-"+day)))
		}
	}
	must(t, os.Mkdir(filepath.Join(lost, "of-the-operator"), 0o700))
	must(t, e.Pool.Sweep(ctx, "the state was restored"))
	if _, err := os.Stat(filepath.Join(lost, old+"-"+day)); err != nil {
		t.Errorf("a stray was swept where nothing may be: %v", err)
	}
	e.down = 2 * time.Hour
	must(t, e.Pool.Sweep(ctx, ""))
	if _, err := os.Stat(filepath.Join(lost, old+"-"+day)); err != nil {
		t.Errorf("a stray of 25 hours, in which the host was up for 23, was swept: %v", err)
	}
	e.down = 0
	// Those that came while the clock was not set, or ahead, get their day.
	unset, ahead := e.Disk(t, 1<<20), e.Disk(t, 1<<20)
	must(t, os.Rename(filepath.Join(e.Config.StateDir, "pool", unset), filepath.Join(lost, unset+"-77")))
	must(t, os.Rename(filepath.Join(e.Config.StateDir, "pool", ahead),
		filepath.Join(lost, ahead+"-"+strconv.FormatInt(time.Now().Add(25*time.Hour).Unix(), 10))))
	must(t, e.Pool.Sweep(ctx, ""))
	found, err = filepath.Glob(filepath.Join(lost, "*"))
	must(t, err)
	if len(found) != 4 {
		t.Errorf("after the sweep lost+found holds %v, want %s, %s, %s and the operator's", found, id, unset, ahead)
	}
	for _, p := range found {
		_, at, _ := strings.Cut(filepath.Base(p), "-")
		n, err := strconv.ParseInt(at, 10, 64)
		if err == nil && time.Since(time.Unix(n, 0)).Abs() > time.Minute {
			t.Errorf("%s came there at another time than now", p)
		}
	}
	must(t, os.Remove(filepath.Join(lost, "of-the-operator")))
}

// testLayers: layers are named by their content and can be removed.
func (e *Env) testLayers(t *testing.T) {
	ctx := t.Context()
	var read int64
	again, n, err := e.Layers.Import(ctx, bytes.NewReader(Lower()), func(n int64) { read = n })
	must(t, err)
	if again != e.Layer || n == 0 || read != int64(len(Lower())) {
		t.Errorf("second import: %s, %d bytes, %d read; want %s", again, n, read, e.Layer)
	}
	other := append(Lower(), make([]byte, 512)...)
	d, _, err := e.Layers.Import(ctx, bytes.NewReader(other), nil)
	must(t, err)
	all, err := e.Layers.List(ctx)
	must(t, err)
	if d == e.Layer || len(all) != 2 || !slices.Contains(all, d) {
		t.Errorf("layers %v", all)
	}
	for range 2 {
		must(t, e.Layers.Remove(ctx, d))
	}
	if _, err := e.Layers.Path(d); !errs.Is(err, errs.NotFound) {
		t.Errorf("Path of a removed layer: %v", err)
	}
	if _, err := e.Layers.Path("sha256:../../etc"); !errs.Is(err, errs.Invalid) {
		t.Errorf("Path of no digest: %v", err)
	}
	stop, cancel := context.WithCancel(ctx)
	_, _, err = e.Layers.Import(stop, bytes.NewReader(Lower()), func(n int64) {
		if n > 1<<20 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled import: %v", err)
	}
	left, err := filepath.Glob(filepath.Join(e.Config.StateDir, "layers", "new-*"))
	must(t, err)
	if len(left) > 0 {
		t.Errorf("a cancelled import left %v", left)
	}
}

// A new daemon finds everything: the pool still mounted, or unmounted by a
// reboot; and clears away what a kill left.
func (e *Env) testReopen(t *testing.T) {
	ctx := t.Context()
	id := e.Disk(t, 16<<20)
	root := e.mount(t, id, first, false)
	_, err := as("write", root, first)
	must(t, err)
	was := e.Pool.ID()
	half := filepath.Join(e.Config.StateDir, "layers", "new-1")
	killed := e.Disk(t, 16<<20)
	trash := filepath.Join(e.Config.StateDir, "pool", ".trash", killed)
	must(t, errors.Join(os.MkdirAll(filepath.Join(half, "a"), 0o700), os.Rename(filepath.Join(e.Config.StateDir, "pool", killed), trash)))
	must(t, e.Close())
	e.Open(t)
	e.held(t, id, true, true)
	want, err := as("manifest", root, first)
	must(t, err)
	must(t, e.Mounts.Unmount(ctx, id))
	must(t, e.UnmountPool())
	e.Open(t)
	if e.Pool.ID() != was || len(was) != 32 {
		t.Errorf("pool id %q became %q", was, e.Pool.ID())
	}
	diff(t, "before", want, "after a reboot", e.in(t, id, second, "manifest"))
	must(t, e.Close())
	for _, p := range []string{half, trash} {
		if _, err := os.Stat(p); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there: %v", p, err)
		}
	}
	must(t, e.Disks.DeleteDisk(ctx, id))
}
