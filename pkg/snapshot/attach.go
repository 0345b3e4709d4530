package snapshot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/overlay"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// VolumesDir is the directory below the run directory where volumes are mounted; the
// runtime bind-mounts them from there.
const VolumesDir = "volumes"

// VolumeMounts are what a sandbox mounts beside its root file system.
type VolumeMounts struct {
	All      []record.VolumeMount
	Memory   []string // paths of tmpfs, in which the runtime makes mount points itself
	NoExec   bool     // no program in a volume can be executed
	OwnUsers bool     // as in Mount
	UIDBase  uint32
}

// VolumeDir is where AttachVolumes mounts the n-th volume of id, unless its path is in
// another volume.
func (v *Volumes) VolumeDir(id string, n int) string {
	return filepath.Join(v.runDir, VolumesDir, id, strconv.Itoa(n))
}

// AttachVolumes mounts the volumes of id below VolumesDir, nosuid and nodev, with the
// ids of its guest and with all mounts below them. A volume whose path is in another
// volume is mounted in that one. AttachVolumes also makes their mount points in the
// root file system.
//
// It works on descriptors, so it mounts what it has checked, even if somebody renames
// directories meanwhile, in volumes that others write to or on the host.
//
// Preconditions: the root file system of id is mounted and nothing runs in it; its
// volumes were made. A failed AttachVolumes is undone by DetachVolumes.
func (v *Volumes) AttachVolumes(_ context.Context, id string, m VolumeMounts) error {
	if len(m.All) == 0 {
		return nil
	}
	if !record.IsID(id) {
		return fmt.Errorf("attach volumes of %q: not an id", id)
	}
	if err := v.attachVolumes(id, m); err != nil {
		return fmt.Errorf("attach volumes of %s: %w", id, err)
	}
	return nil
}

func (v *Volumes) attachVolumes(id string, m VolumeMounts) error {
	ns, done, err := v.users.open(id, m.OwnUsers)
	if err != nil {
		return err
	}
	defer done()
	a := attachment{
		VolumeMounts: m, rootfs: v.rootfs(id), dir: func(i int) string { return v.VolumeDir(id, i) },
		ns: int(ns.Fd()), outer: record.Outer(m.All),
	}
	a.sources, a.mounts = make([]*os.File, len(m.All)), make([]*os.File, len(m.All))
	defer a.close()
	order := make([]int, len(m.All))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(len(m.All[i].Path), len(m.All[j].Path)) })
	for _, i := range order {
		if a.sources[i], err = v.openSource(&m.All[i]); err != nil {
			return err
		}
	}
	if err := a.mountPoints(order); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Dir(v.VolumeDir(id, 0)), 0o700); err != nil {
		return err
	}
	for _, i := range order {
		if err := a.mount(i); err != nil {
			return fmt.Errorf("volume %s at %s: %w", m.All[i].Name, m.All[i].Path, err)
		}
	}
	return nil
}

// attachment is the work of one AttachVolumes.
type attachment struct {
	VolumeMounts
	rootfs string             // the root file system of the sandbox
	dir    func(i int) string // where volume i is mounted for the runtime
	ns     int                // descriptor of the user namespace that idmaps
	outer  []int              // by index of a volume: the volume that it is mounted in, or -1
	// by index of a volume: as it is on the host, and idmapped
	sources, mounts []*os.File
}

func (a *attachment) close() {
	for _, f := range append(a.sources, a.mounts...) {
		if f != nil {
			f.Close()
		}
	}
}

// mountPoints makes the directories and files that volumes are mounted on: in the root
// file system, or in their outer volume.
func (a *attachment) mountPoints(order []int) error {
	root, err := openPath(a.rootfs)
	if err != nil {
		return err
	}
	defer root.Close()
	places := map[string]string{}
	for _, i := range order {
		m := &a.All[i]
		kind, err := kindOf(a.sources[i])
		if err != nil {
			return err
		}
		what := fmt.Sprintf("mountPath %q", m.Path)
		if o := a.outer[i]; o >= 0 {
			f, err := tree.Descend(a.sources[o], a.within(i), tree.Steps{Make: !a.All[o].ReadOnly, Kind: kind})
			if err == nil {
				err = errors.Join(sameKind(f, kind), f.Close())
			}
			if err != nil {
				return badPath(err, "VOLUME::INVALID_MOUNT_PATH", what+fmt.Sprintf(" in volume %s", a.All[o].Name))
			}
			continue
		}
		if slices.ContainsFunc(a.Memory, func(dir string) bool { return record.Within(m.Path, dir) }) {
			continue
		}
		how := tree.Steps{Make: true, Kind: kind, SameMount: true, As: func(f func()) { f() }}
		if a.OwnUsers {
			how.As = func(f func()) { _ = overlay.ActingAs(int(a.UIDBase), func() error { f(); return nil }) }
		}
		f, at, err := tree.Enter(root, m.Path, how)
		if err == nil {
			err = errors.Join(sameKind(f, kind), f.Close())
		}
		if err != nil {
			return badPath(err, "VOLUME::INVALID_MOUNT_PATH", what)
		}
		if record.IsPrivate(at) {
			return errs.Wire(errs.New(errs.Invalid, "%s leads by links in the root file system to %s, where the runtime or sandboxd keeps "+
				"its own files; choose another directory", what, at), "VOLUME::INVALID_MOUNT_PATH")
		}
		for other, name := range places {
			if record.Within(at, other) || record.Within(other, at) {
				return errs.Wire(errs.New(errs.Invalid, "%s leads by links in the root file system to %s, and volume %s is at %s: one "+
					"would hide or contain the other; use directories without links", what, at, name, other), "VOLUME::INVALID_MOUNT_PATH")
			}
		}
		places[at] = m.Name
	}
	return nil
}

// within is the path of volume i in its outer one.
func (a *attachment) within(i int) string {
	return strings.TrimPrefix(a.All[i].Path, a.All[a.outer[i]].Path+"/")
}

// attributes are the mount attributes of a volume and of all that is mounted in it.
func (a *attachment) attributes(m *record.VolumeMount) uint64 {
	attr := uint64(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV)
	if m.ReadOnly {
		attr |= unix.MOUNT_ATTR_RDONLY
	}
	if a.NoExec {
		attr |= unix.MOUNT_ATTR_NOEXEC
	}
	return attr
}

// mount attaches volume i: below the run directory, or in its outer one, which is
// attached before it.
func (a *attachment) mount(i int) error {
	m := &a.All[i]
	c, err := cloneTree(a.sources[i], a.ns, a.attributes(m))
	if err != nil {
		return err
	}
	a.mounts[i] = c
	if o := a.outer[i]; o >= 0 {
		on, err := tree.Descend(a.mounts[o], a.within(i), tree.Steps{})
		if err != nil {
			return badPath(err, "VOLUME::INVALID_MOUNT_PATH", fmt.Sprintf("mountPath %q in volume %s", m.Path, a.All[o].Name))
		}
		defer on.Close()
		if err := unix.MoveMount(int(c.Fd()), "", int(on.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
			return &os.PathError{Op: "move_mount", Path: on.Name(), Err: err}
		}
		return nil
	}
	target := a.dir(i)
	kind, err := kindOf(c)
	if err != nil {
		return err
	}
	if err := tree.MakeEntry(unix.AT_FDCWD, target, kind); err != nil {
		return &os.PathError{Op: "make", Path: target, Err: err}
	}
	if err := unix.MoveMount(int(c.Fd()), "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "move_mount", Path: target, Err: err}
	}
	return nil
}

// cloneTree makes an idmapped copy of the mounts at f and below, attached nowhere.
// Mounts that are added there later do not show in the copy, and mounts in the copy
// show nowhere else. A file system that cannot be idmapped, such as proc or sysfs, is
// refused with everything mounted in it.
func cloneTree(f *os.File, ns int, attributes uint64) (*os.File, error) {
	fd, err := unix.OpenTree(int(f.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH|unix.AT_RECURSIVE)
	if err != nil {
		return nil, &os.PathError{Op: "open_tree", Path: f.Name(), Err: err}
	}
	c := os.NewFile(uintptr(fd), f.Name())
	attr := unix.MountAttr{
		Attr_set:    attributes | unix.MOUNT_ATTR_IDMAP,
		Propagation: unix.MS_PRIVATE,
		Userns_fd:   uint64(ns),
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		c.Close()
		err = &os.PathError{Op: "idmap", Path: f.Name(), Err: err}
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) {
			return nil, errs.Wire(errs.Wrap(err, errs.Invalid, "its file system, or one mounted in it, does not support idmapped mounts "+
				"(proc, sysfs, cgroups, NFS, some FUSE, and tmpfs before Linux 6.3); mount a directory of another file system"),
				"VOLUME::INVALID_HOST_PATH")
		}
		return nil, err
	}
	return c, nil
}

func (v *Volumes) openSource(m *record.VolumeMount) (*os.File, error) {
	if m.Source == "" {
		return v.openVolume(m)
	}
	return v.openHost(m)
}

// DetachVolumes removes what AttachVolumes made for id, also half of it; absent is
// fine. Mount points stay.
func (v *Volumes) DetachVolumes(_ context.Context, id string) error {
	if !record.IsID(id) {
		return fmt.Errorf("detach volumes of %q: not an id", id)
	}
	if err := v.detachVolumes(filepath.Dir(v.VolumeDir(id, 0))); err != nil {
		return fmt.Errorf("detach volumes of %s: %w", id, err)
	}
	return nil
}

func (v *Volumes) detachVolumes(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		p := filepath.Join(dir, e.Name())
		for { // with all that is mounted in it
			err := unix.Unmount(p, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
				break
			}
			if err != nil {
				return &os.PathError{Op: "umount", Path: p, Err: err}
			}
		}
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// ListAttached returns the ids that have volumes attached, or a part of them.
func (v *Volumes) ListAttached(context.Context) (ids []string, err error) {
	entries, err := os.ReadDir(filepath.Join(v.runDir, VolumesDir))
	if err != nil {
		return nil, fmt.Errorf("list attached volumes: %w", err)
	}
	for _, e := range entries {
		if record.IsID(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}
