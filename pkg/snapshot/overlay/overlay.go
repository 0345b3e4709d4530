// Package overlay mounts a root file system: image layers below, a disk on top.
//
// Files on disk carry guest ids, 0..65535, always. Layers and disk reach overlayfs
// as idmapped clones of their directories, which show those ids as the host's. So a
// layer depends on neither sandbox nor runtime, and a disk moves between them.
//
// There are two ways to name the clones. Linux 6.15 takes clones that are attached
// nowhere, by descriptor ([Mount.Detached]). Before, clones have to be attached
// somewhere and be named in one string ([Mount.Attached]). [DetachedWorks] tries
// which one this kernel wants.
//
// What surprises: an overlay keeps the credentials of the thread that made it and
// does all its work with them. [ActingAs] makes such a thread.
package overlay

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// Mount is one mount to be made.
type Mount struct {
	Source   string // what mountinfo shows
	Target   string
	Disk     string       // has the directories u (upper) and w (work)
	Lowers   []string     // topmost first
	UserNS   int          // descriptor of the user namespace that idmaps disk and lowers
	Root     int          // host id of guest root, which the overlay acts as
	Volatile bool         // a crash of the host may lose what is written; unmounting does not sync
	SetUID   bool         // setuid and setgid bits of files count, for those that reach the mount
	Private  string       // a directory, 0700, that Attached makes and removes
	Later    func(func()) // runs work that the caller does not wait for, in the background
}

// options are written out because other kernels have other defaults. index=on
// refuses an upper that is a copy; metacopy and redirect_dir need lowers
// in step with it. xino=on would show all files under one st_dev, but the
// kernel logs each such mount, on the console of some hosts.
var options = [][2]string{{"index", "off"}, {"metacopy", "off"}, {"redirect_dir", "off"}, {"xino", "off"}}

// Detached mounts with the new mount calls from clones that are attached nowhere.
func (o *Mount) Detached() error {
	fsfd, err := o.configure()
	if err != nil {
		return err
	}
	defer unix.Close(fsfd)
	attr := unix.MOUNT_ATTR_NODEV
	if !o.SetUID && !weak.Off(weak.NoSuid) {
		attr |= unix.MOUNT_ATTR_NOSUID
	}
	mfd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, attr)
	if err != nil {
		return fmt.Errorf("fsmount: %w%s", err, messages(fsfd))
	}
	defer unix.Close(mfd)
	if err := writable(mfd); err != nil {
		return err
	}
	if err := unix.MoveMount(mfd, "", unix.AT_FDCWD, o.Target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "move_mount", Path: o.Target, Err: err}
	}
	return nil
}

// configure makes the file system, without a mount yet.
func (o *Mount) configure() (fsfd int, err error) {
	var clones []int
	// By then the overlay has mounts of its own. Each close waits until the kernel has
	// taken a mount down, which the caller need not.
	defer func() {
		o.Later(func() {
			for _, fd := range clones {
				unix.Close(fd)
			}
		})
	}()
	fsfd, err = unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen overlay: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fsfd)
		}
	}()
	set := [][2]string{{"source", o.Source}}
	for _, dir := range append(append([]string(nil), o.Lowers...), o.Disk) {
		fd, err := Clone(dir, o.UserNS)
		if err != nil {
			return -1, err
		}
		clones = append(clones, fd)
		if len(clones) <= len(o.Lowers) {
			set = append(set, [2]string{"lowerdir+", tree.ProcFD(fd)})
		}
	}
	disk := tree.ProcFD(clones[len(clones)-1])
	set = append(set, [2]string{"upperdir", disk + "/u"}, [2]string{"workdir", disk + "/w"})
	set = append(set, options...)
	if o.Volatile {
		set = append(set, [2]string{"volatile"})
	}
	for _, kv := range set {
		if kv[1] == "" {
			err = unix.FsconfigSetFlag(fsfd, kv[0])
		} else {
			err = unix.FsconfigSetString(fsfd, kv[0], kv[1])
		}
		if err != nil {
			return -1, fmt.Errorf("overlay option %s=%s: %w%s", kv[0], kv[1], err, messages(fsfd))
		}
	}
	if err := ActingAs(o.Root, func() error { return unix.FsconfigCreate(fsfd) }); err != nil {
		return -1, fmt.Errorf("create overlay: %w%s", err, messages(fsfd))
	}
	return fsfd, nil
}

// Attached mounts the way Linux 6.1 needs it: clones are attached below a directory
// that only root can enter, named in one string relative to it, and detached as soon
// as the overlay has its own.
func (o *Mount) Attached() (err error) {
	if err := os.Mkdir(o.Private, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	defer func() { err = errors.Join(err, DetachClones(o.Private)) }()
	var names []string
	for i, dir := range o.Lowers {
		name := strconv.Itoa(i)
		if err := attachClone(dir, filepath.Join(o.Private, name), o.UserNS); err != nil {
			return err
		}
		names = append(names, name)
	}
	if err := attachClone(o.Disk, filepath.Join(o.Private, "d"), o.UserNS); err != nil {
		return err
	}
	data := "lowerdir=" + strings.Join(names, ":") + ",upperdir=d/u,workdir=d/w"
	for _, kv := range options {
		data += "," + kv[0] + "=" + kv[1]
	}
	if o.Volatile {
		data += ",volatile"
	}
	if len(data) >= os.Getpagesize() {
		return fmt.Errorf("%d layers do not fit into the options of one mount: this kernel is too old for so many", len(o.Lowers))
	}
	flags := uintptr(unix.MS_NODEV)
	if !o.SetUID {
		flags |= unix.MS_NOSUID
	}
	err = ActingAs(o.Root, func() error {
		// A working directory of this thread's own.
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return fmt.Errorf("unshare(CLONE_FS): %w", err)
		}
		if err := unix.Chdir(o.Private); err != nil {
			return &os.PathError{Op: "chdir", Path: o.Private, Err: err}
		}
		if err := unix.Mount(o.Source, o.Target, "overlay", flags, data); err != nil {
			return fmt.Errorf("mount overlay (%s): %w; dmesg says more", data, err)
		}
		return unix.Chdir("/")
	})
	if err != nil {
		return err
	}
	return tree.WithDir(o.Target, func(fd int) error {
		if err := writable(fd); err != nil {
			return errors.Join(err, unix.Unmount(o.Target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW))
		}
		return nil
	})
}

// Clone makes an idmapped mount of dir, attached nowhere, and returns its descriptor.
func Clone(dir string, userns int) (int, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return -1, &os.PathError{Op: "open_tree", Path: dir, Err: err}
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns)}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		unix.Close(fd)
		return -1, &os.PathError{Op: "idmap", Path: dir, Err: err}
	}
	return fd, nil
}

func attachClone(dir, at string, userns int) error {
	if err := os.Mkdir(at, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	fd, err := Clone(dir, userns)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "move_mount", Path: at, Err: err}
	}
	return nil
}

// DetachClones removes the directory private of [Mount.Attached] with what is attached
// there, after a daemon was killed in the middle of it. Absent is fine.
func DetachClones(private string) error {
	entries, err := os.ReadDir(private)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		p := filepath.Join(private, e.Name())
		if err := unix.Unmount(p, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
			return &os.PathError{Op: "umount", Path: p, Err: err}
		}
		if err := os.Remove(p); err != nil {
			return err
		}
	}
	return os.Remove(private)
}

// writable fails with ErrReadOnly if the kernel has made the mount read-only. It does
// so without an error when the overlay cannot make its work directory.
func writable(fd int) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return fmt.Errorf("statfs of the overlay: %w", err)
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		return ErrReadOnly
	}
	return nil
}

// ErrReadOnly is the error of a mount that nobody can write to.
var ErrReadOnly = errors.New("the kernel mounted the overlay read-only: it could not make its work directory; dmesg says why")

// messages are what the kernel reports about a failed step.
func messages(fsfd int) string {
	var all []string
	var b [512]byte
	for range 16 {
		n, err := unix.Read(fsfd, b[:])
		if err != nil || n == 0 {
			break
		}
		all = append(all, string(bytes.TrimSpace(b[:n])))
	}
	if all == nil {
		return ""
	}
	return ": " + strings.Join(all, "; ")
}
