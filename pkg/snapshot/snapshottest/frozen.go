package snapshottest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"golang.org/x/sys/unix"
)

// freeze takes a snapshot of a disk.
func (e *Env) freeze(t testing.TB, id string) string {
	t.Helper()
	ctx := t.Context()
	snap := record.NewSnapshotID(Instance)
	must(t, e.Snapshots.PrepareSnapshot(ctx))
	must(t, e.Snapshots.TakeSnapshot(ctx, snap, id))
	bytes, err := e.Snapshots.FinishSnapshot(ctx, snap, id)
	must(t, err)
	if bytes > 0 && !e.Pool.Limits() { // plain does not count
		t.Errorf("snapshot %s has %d bytes", snap, bytes)
	}
	return snap
}

// branch makes a disk of a snapshot.
func (e *Env) branch(t testing.TB, snap string, bytes int64) string {
	t.Helper()
	id := record.NewID(Instance)
	if !e.Pool.Limits() {
		bytes = 0
	}
	must(t, e.Disks.CreateDisk(t.Context(), id, snap, bytes))
	return id
}

// testSnapshot: what comes back of a snapshot is what went in, on the disk and
// to a guest of any slot; neither changes with what becomes of the other.
func (e *Env) testSnapshot(t *testing.T) {
	ctx := t.Context()
	id := e.Disk(t, 64<<20)
	root := e.mount(t, id, first, true)
	_, err := as("write", root, first)
	must(t, err)
	want, err := as("manifest", root, first)
	must(t, err)
	pool := filepath.Join(e.Config.StateDir, "pool")
	raw := tree(t, filepath.Join(pool, id, "u"))

	snap := e.freeze(t, id) // while it is mounted, and volatile at that
	diff(t, "disk", raw, "snapshot", tree(t, filepath.Join(pool, snap, "u")))
	_, err = as("rewrite", root, first)
	must(t, err)
	must(t, e.Mounts.Unmount(ctx, id))
	later := e.freeze(t, id) // of one that has ended

	for name, s := range map[string]slot{"second slot": second, "identity": identity} {
		other := e.branch(t, snap, 48<<20)
		diff(t, "disk", raw, "branch", tree(t, filepath.Join(pool, other, "u")))
		if _, limit, err := e.Disks.Usage(other); e.Pool.Limits() && (err != nil || limit != 48<<20) {
			t.Errorf("the limit of a branch is %d, %v", limit, err)
		}
		diff(t, "source", want, name, e.in(t, other, s, "manifest"))
		e.in(t, other, s, "rewrite")
		diff(t, "before", raw, "after a branch was written to", tree(t, filepath.Join(pool, snap, "u")))
		must(t, e.Disks.DeleteDisk(ctx, other))
	}
	must(t, e.Disks.DeleteDisk(ctx, id))
	must(t, e.Snapshots.DeleteSnapshot(ctx, snap))
	must(t, e.Close())
	must(t, e.Pool.Sweep(ctx, "")) // the qgroup of the one that is left stays
	other := e.branch(t, later, 0)
	if out := e.in(t, other, third, "manifest"); !strings.Contains(out, "/usr/lib/dir/later ") {
		t.Error("a snapshot does not outlive its source")
	}
	must(t, e.Disks.DeleteDisk(ctx, other))
	e.refusedSnapshots(t, later)
	for range 2 {
		must(t, e.Snapshots.DeleteSnapshot(ctx, later))
	}
}

// refusedSnapshots: a snapshot that cannot be made fails and leaves nothing.
func (e *Env) refusedSnapshots(t *testing.T, snap string) {
	ctx := t.Context()
	listed := func(want bool, snap string) {
		t.Helper()
		ids, err := e.Snapshots.ListSnapshots(ctx)
		must(t, err)
		disks, err := e.Disks.ListDisks(ctx)
		must(t, err)
		if slices.Contains(ids, snap) != want || slices.Contains(disks, snap) {
			t.Errorf("snapshots %v, disks %v; want %s: %v", ids, disks, snap, want)
		}
	}
	listed(true, snap)
	id := e.Disk(t, 0)
	if err := e.Disks.CreateDisk(ctx, id, snap, 0); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a branch over a disk: %v", err)
	}
	e.held(t, id, true, false)
	must(t, e.Disks.DeleteDisk(ctx, id))
	never := record.NewSnapshotID(Instance)
	if err := e.Disks.CreateDisk(ctx, id, never, 0); !errs.Is(err, errs.NotFound) {
		t.Errorf("a branch of nothing: %v", err)
	}
	e.held(t, id, false, false)
	if err := e.Snapshots.TakeSnapshot(ctx, never, id); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a snapshot of nothing: %v", err)
	}
	listed(false, never)
	must(t, errors.Join(e.Snapshots.DeleteSnapshot(ctx, never), e.Snapshots.MoveStraySnapshot(ctx, never)))
	for _, bad := range []string{"", id, "../" + id, "snap-../../../etc", "lost+found"} {
		if e.Snapshots.DeleteSnapshot(ctx, bad) == nil || e.Snapshots.MoveStraySnapshot(ctx, bad) == nil ||
			e.Snapshots.TakeSnapshot(ctx, bad, id) == nil {
			t.Errorf("%q passed as the id of a snapshot", bad)
		}
	}
	// A stray goes where stray disks go, and stays there for its day.
	id = e.Disk(t, 0)
	stray := e.freeze(t, id)
	must(t, e.Snapshots.MoveStraySnapshot(ctx, stray))
	listed(false, stray)
	must(t, e.Pool.Sweep(ctx, ""))
	found, err := filepath.Glob(filepath.Join(e.Config.StateDir, "pool", "lost+found", stray+"-*"))
	must(t, err)
	if len(found) != 1 {
		t.Fatalf("lost+found has %v of %s", found, stray)
	}
	must(t, os.Rename(found[0], filepath.Join(filepath.Dir(found[0]), stray+"-1736000000")))
	must(t, e.Pool.Sweep(ctx, ""))
	if _, err := os.Stat(filepath.Join(filepath.Dir(found[0]), stray+"-1736000000")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a stray snapshot is kept for longer than a day: %v", err)
	}
	// The host went down under a disk that did not sync.
	e.mount(t, id, first, true)
	must(t, e.Mounts.Unmount(ctx, id))
	must(t, unix.Setxattr(filepath.Join(e.Config.StateDir, "pool", id), "trusted.sandboxd.boot", []byte("another"), 0))
	if err := e.Snapshots.TakeSnapshot(ctx, never, id); !errs.Is(err, errs.WrongState) {
		t.Errorf("a snapshot of what cannot be trusted: %v", err)
	}
	must(t, e.Disks.DeleteDisk(ctx, id))
}

// tree is what a disk holds, as the pool sees it: whiteouts and overlayfs' own
// marks, links, blocks and times included.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	links := map[uint64]string{} // the first name of each file
	err := filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR && links[st.Ino] == "" {
			links[st.Ino] = strings.TrimPrefix(p, dir)
		}
		x, err := xattrs(p, "")
		if err != nil {
			return err
		}
		to, _ := os.Readlink(p)
		if st.Mode&unix.S_IFMT == unix.S_IFCHR {
			st.Nlink = 0 // overlayfs makes whiteouts by linking one that it keeps for itself
		}
		sparse := st.Size > 1<<20 && st.Blocks*512 < st.Size/2
		fmt.Fprintf(&b, "%s %o %d:%d %x %d %d.%d %s %q sparse %v %s\n", strings.TrimPrefix(p, dir), st.Mode, st.Uid, st.Gid,
			st.Rdev, st.Nlink, st.Mtim.Sec, st.Mtim.Nsec, links[st.Ino], to, sparse, x)
		return nil
	})
	must(t, err)
	return b.String()
}

// diffOf is what Diff says, a line for each change.
func (e *Env) diffOf(t *testing.T, of, base string) string {
	t.Helper()
	var b strings.Builder
	must(t, e.Diff(t.Context(), of, base, []string{e.Layer}, func(p string) bool { return p == "/srv/d" }, func(kind, path string) error {
		b.WriteString(kind + " " + path + "\n")
		return nil
	}))
	return b.String()
}

// testDiff: the changes of a guest are reported as docker reports them, and no others.
func (e *Env) testDiff(t *testing.T) {
	ctx := t.Context()
	id := e.Disk(t, 64<<20)
	empty := e.freeze(t, id)
	if got := e.diffOf(t, id, ""); got != "" {
		t.Errorf("of an empty disk: %s", got)
	}
	e.in(t, id, first, "write")
	want := `C /etc
C /etc/conf
C /srv
A /srv/fifo
A /srv/link
A /srv/of-0
A /srv/of-1
A /srv/of-1000
A /srv/of-33
A /srv/of-33-again
A /srv/of-65534
A /srv/of-65535
A /srv/sg
A /srv/sg/inherits
A /srv/sparse
A /srv/su
C /usr
C /usr/bin
C /usr/bin/link
C /usr/bin/of-33
C /usr/bin/plain
C /usr/bin/plain2
C /usr/lib
C /usr/lib/dir
A /usr/lib/dir/new
D /usr/lib/dir/old
C /usr/share
D /usr/share/goes
`
	if got := e.diffOf(t, id, ""); got != want {
		t.Errorf("against the image:\n%s", got)
	}
	if got := e.diffOf(t, id, empty); got != want {
		t.Errorf("against a snapshot of before:\n%s", got)
	}
	snap := e.freeze(t, id)
	if got := e.diffOf(t, id, snap); got != "" {
		t.Errorf("against a snapshot of now: %s", got)
	}
	e.in(t, id, second, "rewrite")
	want = `C /srv
D /srv/of-1
C /srv/of-1000
C /srv/of-33
C /srv/of-33-again
C /srv/of-65535
C /usr
C /usr/lib
C /usr/lib/dir
A /usr/lib/dir/later
`
	if got := e.diffOf(t, id, snap); got != want {
		t.Errorf("against the snapshot:\n%s", got)
	}
	back := strings.NewReplacer("D ", "A ", "A ", "D ").Replace(want)
	if got := e.diffOf(t, snap, id); got != back {
		t.Errorf("the other way round:\n%s", got)
	}
	e.diffHollow(t, empty, snap)
	if err := e.Diff(ctx, record.NewID(Instance), "", nil, nil, nil); !errs.Is(err, errs.WrongState) {
		t.Errorf("of no disk: %v", err)
	}
	if err := e.Diff(ctx, "../x", "", nil, nil, nil); err == nil {
		t.Error("../x passed as an id")
	}
	must(t, errors.Join(e.Disks.DeleteDisk(ctx, id), e.Snapshots.DeleteSnapshot(ctx, snap), e.Snapshots.DeleteSnapshot(ctx, empty)))
}

// diffHollow compares a disk that is unlike the image: a file is where the image has a
// directory, and directories are nested deeply. full is a snapshot of the test's first
// changes, empty one of none.
func (e *Env) diffHollow(t *testing.T, empty, full string) {
	gone := e.branch(t, empty, 0)
	e.in(t, gone, first, "hollow")
	if got := e.diffOf(t, gone, ""); got != "C /usr\nC /usr/bin\nD /usr/lib\n" {
		t.Errorf("of a file in the place of a directory:\n%s", got)
	}
	if got := e.diffOf(t, full, gone); !strings.Contains(got, "A /usr/lib/dir\nA /usr/lib/dir/new\n") ||
		!strings.Contains(got, "C /usr/bin\nA /usr/bin/hard\n") {
		t.Errorf("against that:\n%s", got)
	}
	// Directories may be nested as deep as a guest likes.
	deep := filepath.Join(e.Config.StateDir, "pool", gone, "u")
	for range 300 {
		deep = filepath.Join(deep, "d")
	}
	must(t, os.MkdirAll(deep, 0o755))
	if got := e.diffOf(t, gone, ""); strings.Count(got, "/d\n") != 300 {
		t.Errorf("of 300 directories in one another: %d of them", strings.Count(got, "/d\n"))
	}
	must(t, e.Disks.DeleteDisk(t.Context(), gone))
}
