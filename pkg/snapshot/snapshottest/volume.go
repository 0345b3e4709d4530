package snapshottest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"golang.org/x/sys/unix"
)

// lent is the directory that the host lends.
func (e *Env) lent() string { return e.Config.HostPaths[0] }

// volumeFiles is where the pool has the files of a volume.
func (e *Env) volumeFiles(vol string) string {
	return filepath.Join(e.Config.StateDir, "pool", vol, "d")
}

func (e *Env) attach(id string, s slot, all ...record.VolumeMount) error {
	return e.Volumes.AttachVolumes(context.Background(), id, snapshot.VolumeMounts{
		All: all, Memory: []string{"/run"}, OwnUsers: s.own,
		UIDBase: s.base,
	})
}

// testVolumes: a volume begins as what an image has, whoever makes it, and is the
// same to guests of all slots.
func (e *Env) testVolumes(t *testing.T) {
	ctx := t.Context()
	limit := int64(32 << 20)
	if !e.Pool.Limits() {
		limit = 0
	}
	layer, err := e.Layers.Path(e.Layer)
	must(t, err)
	_, want, _ := strings.Cut(tree(t, filepath.Join(layer, "usr/bin")), "\n")
	for name, s := range map[string]slot{"first slot": first, "identity": identity} {
		id, vol := e.Disk(t, 0), record.NewVolumeID(Instance)
		e.mount(t, id, s, false)
		must(t, e.Volumes.MakeVolume(ctx, vol, limit, snapshot.Seed{}))
		must(t, os.Mkdir(e.volumeFiles(vol)+"/half", 0o700))
		must(t, os.Rename(e.volumeFiles(vol), e.volumeFiles(vol)+".new")) // as a daemon leaves it that is killed
		for range 2 {                                                     // the second finds it
			must(t, e.Volumes.MakeVolume(ctx, vol, limit, snapshot.Seed{ID: id, Path: "/usr/bin", OwnUsers: s.own, UIDBase: s.base}))
		}
		top, got, _ := strings.Cut(tree(t, e.volumeFiles(vol)), "\n")
		diff(t, "layer", want, "volume of "+name, got)
		if !strings.HasPrefix(top, " 40755 0:0 ") {
			t.Errorf("%s: the top of the volume is %s", name, top)
		}
		empty := record.NewVolumeID(Instance)
		must(t, e.Volumes.MakeVolume(ctx, empty, limit, snapshot.Seed{ID: id, Path: "/tmp/.X11-unix", OwnUsers: s.own, UIDBase: s.base}))
		must(t, e.Volumes.MakeVolume(ctx, empty, 0, snapshot.Seed{ID: id, Path: "/usr/bin"})) // no more
		if got := tree(t, e.volumeFiles(empty)); !strings.HasPrefix(got, " 41777 0:0 ") || strings.Count(got, "\n") != 1 {
			t.Errorf("%s: a volume of an empty directory is %s", name, got)
		}
		must(t, e.Close())
		must(t, e.Pool.Sweep(ctx, "")) // the qgroup stays
		if used, err := e.Volumes.VolumeUsage(vol); e.Pool.Limits() && (err != nil || used == 0) || !e.Pool.Limits() &&
			!errs.Is(err, errs.Unsupported) {
			t.Errorf("%s: usage %d, %v", name, used, err)
		}
		must(t, e.attach(id, s, record.VolumeMount{Path: "/not/there/yet", Volume: vol},
			record.VolumeMount{Path: "/usr/bin", Volume: empty}, record.VolumeMount{Path: "/etc/conf.d", Volume: vol, ReadOnly: true}))
		if e.Pool.Limits() {
			out, err := as("fill", e.fillable(t, id), s)
			must(t, err)
			if n := strings.TrimSpace(out); len(n) != 8 { // some 30 MB
				t.Errorf("%s: %s bytes went into a volume of %d", name, n, limit)
			}
		}
		e.checkAttached(t, id, 3, 2)
		must(t, e.Volumes.DetachVolumes(ctx, id))
		must(t, e.Volumes.DetachVolumes(ctx, id))
		must(t, e.Mounts.Unmount(ctx, id))
		must(t, e.Disks.DeleteDisk(ctx, id))
		ids, err := e.Volumes.ListVolumes(ctx)
		if err != nil || !slices.Contains(ids, vol) || !slices.Contains(ids, empty) {
			t.Errorf("%s: there are %v, %v", name, ids, err)
		}
		for _, v := range []string{vol, empty, vol} {
			must(t, e.Volumes.DeleteVolume(ctx, v))
		}
	}
	if ids, err := e.Volumes.ListVolumes(ctx); err != nil || len(ids) > 0 {
		t.Errorf("left are %v, %v", ids, err)
	}
}

// fillable is a root file system whose /srv is the first volume of id.
func (e *Env) fillable(t *testing.T, id string) string {
	root := e.Mounts.RootfsDir(id)
	must(t, unix.Mount(e.Volumes.VolumeDir(id, 0), filepath.Join(root, "srv"), "", unix.MS_BIND, ""))
	return root
}

// checkAttached looks at the mounts of id as the kernel has them: n of them, of
// which the one with number ro is read-only.
func (e *Env) checkAttached(t *testing.T, id string, n, ro int) {
	t.Helper()
	if srv := filepath.Join(e.Mounts.RootfsDir(id), "srv"); e.Pool.Limits() {
		must(t, unix.Unmount(srv, unix.MNT_DETACH))
	}
	for i := range n {
		var st unix.Statfs_t
		must(t, unix.Statfs(e.Volumes.VolumeDir(id, i), &st))
		if st.Flags&unix.ST_NOSUID == 0 || st.Flags&unix.ST_NODEV == 0 || (st.Flags&unix.ST_RDONLY != 0) != (i == ro) {
			t.Errorf("volume %d has mount flags %#x", i, st.Flags)
		}
	}
	if err := os.WriteFile(filepath.Join(e.Volumes.VolumeDir(id, ro), "x"), nil, 0o644); !errors.Is(err, unix.EROFS) &&
		!errors.Is(err, unix.EOVERFLOW) {
		t.Errorf("the host writes to what is read-only: %v", err)
	}
	ids, err := e.Volumes.ListAttached(t.Context())
	if err != nil || !slices.Contains(ids, id) {
		t.Errorf("attached are %v, %v", ids, err)
	}
}

// other makes a directory beside lent that can be shown with the ids of a guest:
// a tmpfs can since Linux 6.3.
func (e *Env) other(t *testing.T) string {
	dir := filepath.Dir(e.lent()) + "/other"
	must(t, os.Mkdir(dir, 0o755))
	return dir
}

// host mounts a directory of the host.
func host(path, source string) record.VolumeMount {
	return record.VolumeMount{Name: "h", Path: path, Source: source}
}

// refuseHostPaths: what the host lends is all that can be mounted of it. It fills the
// directory that is lent.
func (e *Env) refuseHostPaths(t *testing.T, refused func(text string, all ...record.VolumeMount)) {
	t.Helper()
	lent := e.lent()
	must(t, errors.Join(os.MkdirAll(lent+"/a/b", 0o755), os.Symlink("/etc", lent+"/etc"), os.WriteFile(lent+"/file", []byte("f"), 0o644),
		unix.Mkfifo(lent+"/fifo", 0o600)))
	refused("not in an allowed directory", host("/h", "/etc"))
	refused("not in an allowed directory", host("/h", lent+"-not"))
	refused("not in an allowed directory", host("/h", filepath.Dir(lent)))
	refused("symbolic link", host("/h", lent+"/etc"))
	refused("symbolic link", host("/h", lent+"/etc/ssl"))
	refused("neither", host("/h", lent+"/fifo"))
	refused("not a directory", host("/h", lent+"/file/x"))
	refused("not a directory", host("/etc", lent+"/file"))
	e.Config.HostPaths = append(e.Config.HostPaths, "/proc/sys", e.Config.RunDir, e.Config.StateDir, filepath.Dir(e.Config.StateDir))
	e.Open(t)
	refused("kernel file system", host("/h", "/proc/sys/kernel"))
	refused("its own files", host("/h", e.Config.StateDir+"/layers"))
	refused("its own files", host("/h", filepath.Dir(e.Config.StateDir)))
	refused("its own files", host("/h", e.Config.RunDir))
}

// plantLinks makes what a guest would: links that lead out, in a volume and in its root.
func plantLinks(t *testing.T, files, root string) {
	t.Helper()
	must(t, errors.Join(os.Symlink("/", files+"/root"), os.Symlink("..", files+"/up"), os.Mkdir(files+"/dir", 0o700),
		os.WriteFile(files+"/file", nil, 0o600), unix.Mkfifo(files+"/fifo", 0o600)))
	must(t, errors.Join(os.Symlink("/proc", root+"/to-proc"), os.Symlink("/opt", root+"/to-opt"),
		os.Symlink("../../../../srv", root+"/to-srv"), os.Symlink("/nowhere/at/all", root+"/dangling")))
}

// testVolumePaths: links lead nowhere, what is mounted below is as read-only as
// what it is in, and half of an attachment goes like a whole one.
func (e *Env) testVolumePaths(t *testing.T) {
	ctx := t.Context()
	id, vol := e.Disk(t, 0), record.NewVolumeID(Instance)
	root := e.mount(t, id, identity, false)
	must(t, e.Volumes.MakeVolume(ctx, vol, 0, snapshot.Seed{}))
	files := e.volumeFiles(vol)
	plantLinks(t, files, root)
	refused := func(text string, all ...record.VolumeMount) {
		t.Helper()
		err := e.attach(id, identity, all...)
		if e, ok := errors.AsType[*errs.Error](err); !ok || !strings.Contains(e.Text, text) || !strings.HasPrefix(e.Wire, "VOLUME::") {
			t.Errorf("%+v: %v, want %q", all, err, text)
		}
		must(t, e.Volumes.DetachVolumes(ctx, id))
	}
	named := func(path, sub string) record.VolumeMount {
		return record.VolumeMount{Name: "n", Claim: "c", Volume: vol, Path: path, Sub: sub}
	}
	for sub, text := range map[string]string{
		"root": "symbolic link", "root/etc": "symbolic link", "up": "symbolic link",
		"file/x": "not a directory",
	} {
		refused(text, named("/v", sub))
	}
	refused("neither", named("/v", "fifo"))
	refused("its own files", named("/to-proc", ""))
	refused("its own files", named("/to-proc/x", ""))
	refused("its own files", named("/to-opt/opensandbox", ""))
	refused("symbolic link", named("/dangling", ""))
	refused("not a directory", named("/etc/conf", ""))
	refused("hide or contain the other", named("/to-srv", ""), named("/srv/x", "dir"))
	refused("symbolic link", named("/v", ""), named("/v/root/etc", "dir"))
	ro := named("/v", "")
	ro.ReadOnly = true
	refused("no such file", ro, named("/v/new", "dir"))

	e.refuseHostPaths(t, refused)

	lent := e.lent()
	// Mounts below are as read-only as their volume; later ones do not show.
	must(t, unix.Mount(e.other(t), lent+"/a/b", "", unix.MS_BIND, ""))
	defer unix.Unmount(lent+"/a/b", unix.MNT_DETACH) //nolint:errcheck // looked for by takeDown
	must(t, os.Mkdir(lent+"/a/b/in", 0o755))
	below := host("/h", lent)
	below.ReadOnly = true
	one := host("/srv/one", lent+"/file")
	must(t, e.attach(id, identity, below, one, host("/h/a/b/in", lent+"/made/up"), named("/v", ""), named("/v/dir/in", "made/up")))
	at := e.Volumes.VolumeDir(id, 0)
	if err := os.WriteFile(at+"/a/b/x", nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("what is mounted below can be written to: %v", err)
	}
	must(t, os.WriteFile(at+"/a/b/in/x", nil, 0o644)) // a volume of its own
	must(t, os.WriteFile(e.Volumes.VolumeDir(id, 3)+"/dir/in/y", nil, 0o644))
	if b, err := os.ReadFile(e.Volumes.VolumeDir(id, 1)); err != nil || string(b) != "f" {
		t.Errorf("the file has %q, %v", b, err)
	}
	for _, p := range []string{lent + "/made/up/x", files + "/made/up/y"} {
		if _, err := os.Stat(p); err != nil {
			t.Error(err)
		}
	}
	must(t, unix.Mount("tmpfs", lent+"/made", "tmpfs", 0, ""))
	if entries, err := os.ReadDir(at + "/made"); err != nil || len(entries) != 1 {
		t.Errorf("a mount that came later shows: %v, %v", entries, err)
	}
	must(t, unix.Unmount(lent+"/made", unix.MNT_DETACH))
	must(t, os.Mkdir(filepath.Dir(at)+"/9", 0o700)) // a mount that failed
	must(t, e.Volumes.DetachVolumes(ctx, id))
	if _, err := os.Stat(files + "/made/up/y"); err != nil {
		t.Errorf("what is detached is deleted: %v", err)
	}
	must(t, unix.Unmount(lent+"/a/b", unix.MNT_DETACH))
	must(t, e.Mounts.Unmount(ctx, id))
	must(t, e.Disks.DeleteDisk(ctx, id))
	must(t, e.Volumes.DeleteVolume(ctx, vol))
	if err := e.Volumes.DeleteVolume(ctx, "../layers"); err == nil || !strings.Contains(fmt.Sprint(err), "not an id") {
		t.Errorf("a volume of no id: %v", err)
	}
}
