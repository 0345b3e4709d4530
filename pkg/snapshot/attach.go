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

// VolumesDir is the directory below the run directory where volumes are mounted
// for the runtime to take them from.
const VolumesDir = "volumes"

// VolumeMounts are what a sandbox mounts beside its root file system.
type VolumeMounts struct {
	All      []record.VolumeMount
	Memory   []string // where file systems in memory will stand, in which the runtime makes what is missing
	OwnUsers bool     // as in Mount
	UIDBase  uint32
}

// VolumeDir is where AttachVolumes mounts the n-th volume of id, unless that lies
// in another one.
func (s *Store) VolumeDir(id string, n int) string {
	return filepath.Join(s.cfg.RunDir, VolumesDir, id, strconv.Itoa(n))
}

// AttachVolumes mounts the volumes of id where the runtime takes them from, nosuid
// and nodev, with the ids of its guest and all that is mounted below them. Those
// that lie in another stand in it already. It also makes their mount points in the
// root file system.
//
// All is done on descriptors: what was checked is what is mounted, whoever changes
// names meanwhile, in volumes that others write to or on the host.
//
// Preconditions: the root file system of id is mounted and nothing runs in it; its
// volumes were made. A failed AttachVolumes is undone by DetachVolumes.
func (s *Store) AttachVolumes(_ context.Context, id string, m VolumeMounts) error {
	if len(m.All) == 0 {
		return nil
	}
	if !record.IsID(id) {
		return fmt.Errorf("attach volumes of %q: not an id", id)
	}
	if err := s.attachVolumes(id, m); err != nil {
		return fmt.Errorf("attach volumes of %s: %w", id, err)
	}
	return nil
}

func (s *Store) attachVolumes(id string, m VolumeMounts) error {
	users := s.cfg.IdentityUserNS
	if m.OwnUsers {
		var err error
		if users, err = s.cfg.UserNS(id); err != nil {
			return err
		}
		defer users.Close()
	}
	a := attachment{store: s, id: id, VolumeMounts: m, users: int(users.Fd()), outer: record.Outer(m.All)}
	a.sources, a.mounts = make([]*os.File, len(m.All)), make([]*os.File, len(m.All))
	defer a.close()
	order := make([]int, len(m.All))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(len(m.All[i].Path), len(m.All[j].Path)) })
	for _, i := range order {
		var err error
		if a.sources[i], err = s.openSource(&m.All[i]); err != nil {
			return err
		}
	}
	if err := a.mountPoints(order); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Dir(s.VolumeDir(id, 0)), 0o700); err != nil {
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
	store *Store
	id    string
	VolumeMounts
	users int
	outer []int
	// by the index of the volume: as it lies on the host, and idmapped
	sources, mounts []*os.File
}

func (a *attachment) close() {
	for _, f := range append(a.sources, a.mounts...) {
		if f != nil {
			f.Close()
		}
	}
}

// mountPoints makes what volumes are mounted on: in the root file system, or in
// the volume that they lie in.
func (a *attachment) mountPoints(order []int) error {
	root, err := openPath(a.store.RootfsDir(a.id))
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
			return errs.Wire(errs.New(errs.Invalid, "%s is %s, by links in the root file system, where the runtime or sandboxd has its "+
				"own files; choose another directory", what, at), "VOLUME::INVALID_MOUNT_PATH")
		}
		for other, name := range places {
			if record.Within(at, other) || record.Within(other, at) {
				return errs.Wire(errs.New(errs.Invalid, "%s is %s, by links in the root file system, and volume %s is at %s: one would "+
					"hide the other, or lie in it; name directories without links", what, at, name, other), "VOLUME::INVALID_MOUNT_PATH")
			}
		}
		places[at] = m.Name
	}
	return nil
}

// within is where volume i lies in its outer one.
func (a *attachment) within(i int) string {
	return strings.TrimPrefix(a.All[i].Path, a.All[a.outer[i]].Path+"/")
}

// mount attaches volume i: below the run directory, or in its outer one, which is
// there by then.
func (a *attachment) mount(i int) error {
	m := &a.All[i]
	c, err := cloneTree(a.sources[i], a.users, m.ReadOnly)
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
	target := a.store.VolumeDir(a.id, i)
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

// cloneTree makes an idmapped copy of what is mounted at f and below, attached
// nowhere. What is mounted there later does not show, and what is mounted in the
// copy shows nowhere else. A file system that knows no idmapped mounts, as those
// of the kernel about itself, is refused with what it holds.
func cloneTree(f *os.File, users int, readOnly bool) (*os.File, error) {
	fd, err := unix.OpenTree(int(f.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH|unix.AT_RECURSIVE)
	if err != nil {
		return nil, &os.PathError{Op: "open_tree", Path: f.Name(), Err: err}
	}
	c := os.NewFile(uintptr(fd), f.Name())
	attr := unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_IDMAP,
		Propagation: unix.MS_PRIVATE,
		Userns_fd:   uint64(users),
	}
	if readOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		c.Close()
		err = &os.PathError{Op: "idmap", Path: f.Name(), Err: err}
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) {
			return nil, errs.Wire(errs.Wrap(err, errs.Invalid, "its file system, or one that is mounted in it, can not be shown with "+
				"the ids of a guest (proc, sysfs, cgroups, NFS, some FUSE, and tmpfs before Linux 6.3); mount a directory of "+
				"another"), "VOLUME::INVALID_HOST_PATH")
		}
		return nil, err
	}
	return c, nil
}

func (s *Store) openSource(m *record.VolumeMount) (*os.File, error) {
	if m.Source == "" {
		return s.openVolume(m)
	}
	return s.openHost(m)
}

// CheckHostPath fails as AttachVolumes would if a path of the host may not be
// mounted, or can not be. Directories that are missing are made.
func (s *Store) CheckHostPath(m record.VolumeMount) error {
	f, err := s.openHost(&m)
	if err != nil {
		return err
	}
	return f.Close()
}

// openHost opens a directory or file of the host below one that the configuration
// allows; what is missing is made as a directory of root's.
func (s *Store) openHost(m *record.VolumeMount) (*os.File, error) {
	allowed := ""
	for _, dir := range s.cfg.HostPaths {
		if record.Within(m.Source, dir) && len(dir) > len(allowed) {
			allowed = dir
		}
	}
	if allowed == "" {
		return nil, errs.Wire(errs.New(errs.Invalid, "host path %q lies in no directory that this host lends; the daemon's "+
			"configuration names those (storage.allowed_host_paths)", m.Source), "VOLUME::HOST_PATH_NOT_ALLOWED")
	}
	what := fmt.Sprintf("host path %q", filepath.Join(m.Source, m.Sub))
	top, err := openPath(allowed) // the operator's name, links and all
	if err != nil {
		return nil, badPath(err, "VOLUME::HOST_PATH_NOT_FOUND", what)
	}
	defer top.Close()
	f := top
	if rel := strings.Trim(strings.TrimPrefix(filepath.Join(m.Source, m.Sub), allowed), "/"); rel != "" {
		f, err = tree.Descend(top, rel, tree.Steps{Make: true, Kind: unix.S_IFDIR})
	} else {
		f, err = tree.Dup(top)
	}
	if err != nil {
		code := "VOLUME::INVALID_HOST_PATH"
		if p, ok := errors.AsType[*os.PathError](err); ok && p.Op == "make" {
			code = "VOLUME::HOST_PATH_CREATE_FAILED"
		}
		return nil, badPath(err, code, what)
	}
	if err := s.lendable(f, top, what); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// kernelFS are file systems of the kernel about itself.
var kernelFS = []int64{
	unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC,
	unix.SECURITYFS_MAGIC, unix.BPF_FS_MAGIC, unix.DEVPTS_SUPER_MAGIC, unix.NSFS_MAGIC, unix.EFIVARFS_MAGIC, unix.PSTOREFS_MAGIC,
}

// lendable refuses what no guest may have, wherever the configuration points: the
// daemon's own directories, the kernel's file systems, devices and sockets.
func (s *Store) lendable(f, top *os.File, what string) error {
	refuse := func(why string) error {
		return errs.Wire(errs.New(errs.Invalid, "%s: %s", what, why), "VOLUME::INVALID_HOST_PATH")
	}
	if err := mountable(f, "VOLUME::INVALID_HOST_PATH", what); err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return &os.PathError{Op: "statfs", Path: f.Name(), Err: err}
	}
	if slices.Contains(kernelFS, int64(st.Type)) {
		return refuse("it lies on a file system of the kernel about itself")
	}
	at, err := tree.NameOf(f)
	if err != nil {
		return err
	}
	above, err := tree.NameOf(top)
	if err != nil {
		return err
	}
	if !record.Within(at, above) {
		return refuse("it was moved away while it was looked at")
	}
	for _, own := range []string{s.cfg.StateDir, s.cfg.RunDir} {
		if own, err = filepath.EvalSymlinks(own); err != nil {
			return err
		}
		if record.Within(at, own) || record.Within(own, at) {
			return refuse("sandboxd keeps its own files there, or below")
		}
	}
	return nil
}

// mountable refuses devices, sockets and named pipes.
func mountable(f *os.File, wire, what string) error {
	kind, err := kindOf(f)
	if err == nil && kind != unix.S_IFDIR && kind != unix.S_IFREG {
		err = errs.Wire(errs.New(errs.Invalid, "%s: it is neither a directory nor a regular file", what), wire)
	}
	return err
}

func openPath(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	return os.NewFile(uintptr(fd), dir), nil
}

func kindOf(f *os.File) (uint32, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, &os.PathError{Op: "stat", Path: f.Name(), Err: err}
	}
	return st.Mode & unix.S_IFMT, nil
}

// sameKind refuses to mount a directory on a file, or the other way round.
func sameKind(f *os.File, want uint32) error {
	kind, err := kindOf(f)
	if err == nil && (kind == unix.S_IFDIR) != (want == unix.S_IFDIR) {
		err = unix.ENOTDIR
	}
	return err
}

// DetachVolumes takes away what AttachVolumes made for id, also half of it; nothing
// there is fine. Mount points stay.
func (s *Store) DetachVolumes(_ context.Context, id string) error {
	if !record.IsID(id) {
		return fmt.Errorf("detach volumes of %q: not an id", id)
	}
	if err := s.detachVolumes(filepath.Dir(s.VolumeDir(id, 0))); err != nil {
		return fmt.Errorf("detach volumes of %s: %w", id, err)
	}
	return nil
}

func (s *Store) detachVolumes(dir string) error {
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
func (s *Store) ListAttached(context.Context) (ids []string, err error) {
	entries, err := os.ReadDir(filepath.Join(s.cfg.RunDir, VolumesDir))
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

// badPath says what a client may know of why a path can not be mounted.
func badPath(err error, wire, what string) error {
	if _, ok := errors.AsType[*errs.Error](err); ok {
		return err
	}
	why := "it can not be opened; the daemon's log says why"
	switch {
	case errors.Is(err, unix.ELOOP):
		why = "it leads through a symbolic link, and links are not followed there"
	case errors.Is(err, unix.ENOTDIR):
		why = "a part of it is no directory"
	case errors.Is(err, unix.EXDEV):
		why = "it leads into another file system"
	case errors.Is(err, unix.ENOENT):
		why = "there is no such file or directory"
	case errors.Is(err, unix.ENAMETOOLONG):
		why = "it, or a part of it, is too long"
	case errors.Is(err, unix.EROFS):
		why = "it does not exist and can not be made: what it lies on is read-only"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errs.Wire(errs.Wrap(err, errs.Exhausted, "%s: it does not exist and can not be made: what it lies on is full", what), wire)
	}
	return errs.Wire(errs.Wrap(err, errs.Invalid, "%s: %s", what, why), wire)
}
