package snapshot

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// clonesDir is where mounts for Linux 6.1 attach their clones for a moment.
const clonesDir = "clones"

// overlay is one mount to be made.
type overlay struct {
	source   string
	target   string
	disk     string   // holds u and w
	lowers   []string // topmost first
	userns   int      // idmaps disk and lowers
	root     int      // host id of guest root: what the overlay acts as
	volatile bool
	private  string       // 0700, for attached clones
	later    func(func()) // runs in the background
}

// options are written out because other kernels have other defaults. index=on
// refuses a copied or snapshotted upper; metacopy and redirect_dir need lowers
// in step with it. xino=on would show all files under one st_dev, but the
// kernel logs each such mount, on the console of some hosts.
var options = [][2]string{{"index", "off"}, {"metacopy", "off"}, {"redirect_dir", "off"}, {"xino", "off"}}

// mountFlags: nothing in a guest's tree ever means anything to the host.
const mountFlags = unix.MS_NOSUID | unix.MS_NODEV

// mountDetached mounts with the new mount calls from clones that are attached
// nowhere.
func (o *overlay) mountDetached() error {
	fsfd, err := o.configure()
	if err != nil {
		return err
	}
	defer unix.Close(fsfd)
	mfd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return fmt.Errorf("fsmount: %w%s", err, kernelWords(fsfd))
	}
	defer unix.Close(mfd)
	if err := writable(mfd); err != nil {
		return err
	}
	if err := unix.MoveMount(mfd, "", unix.AT_FDCWD, o.target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "move_mount", Path: o.target, Err: err}
	}
	return nil
}

// configure makes the file system, without a mount yet.
func (o *overlay) configure() (fsfd int, err error) {
	var clones []int
	// The overlay has mounts of its own by then. Each close waits for the kernel
	// to take a mount down, which nobody else need wait for.
	defer func() {
		o.later(func() {
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
	set := [][2]string{{"source", o.source}}
	for _, dir := range append(append([]string(nil), o.lowers...), o.disk) {
		fd, err := clone(dir, o.userns)
		if err != nil {
			return -1, err
		}
		clones = append(clones, fd)
		if len(clones) <= len(o.lowers) {
			set = append(set, [2]string{"lowerdir+", tree.ProcFD(fd)})
		}
	}
	disk := tree.ProcFD(clones[len(clones)-1])
	set = append(set, [2]string{"upperdir", disk + "/u"}, [2]string{"workdir", disk + "/w"})
	set = append(set, options...)
	if o.volatile {
		set = append(set, [2]string{"volatile"})
	}
	for _, kv := range set {
		if kv[1] == "" {
			err = unix.FsconfigSetFlag(fsfd, kv[0])
		} else {
			err = unix.FsconfigSetString(fsfd, kv[0], kv[1])
		}
		if err != nil {
			return -1, fmt.Errorf("overlay option %s=%s: %w%s", kv[0], kv[1], err, kernelWords(fsfd))
		}
	}
	if err := actingAs(o.root, func() error { return unix.FsconfigCreate(fsfd) }); err != nil {
		return -1, fmt.Errorf("create overlay: %w%s", err, kernelWords(fsfd))
	}
	return fsfd, nil
}

// mountAttached mounts the way Linux 6.1 needs it: clones attached below a
// directory only root can enter, named in one string relative to it, and taken
// away as soon as the overlay has its own.
func (o *overlay) mountAttached() (err error) {
	if err := os.Mkdir(o.private, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	defer func() { err = errors.Join(err, detachClones(o.private)) }()
	var names []string
	for i, dir := range o.lowers {
		name := strconv.Itoa(i)
		if err := attachClone(dir, filepath.Join(o.private, name), o.userns); err != nil {
			return err
		}
		names = append(names, name)
	}
	if err := attachClone(o.disk, filepath.Join(o.private, "d"), o.userns); err != nil {
		return err
	}
	data := "lowerdir=" + strings.Join(names, ":") + ",upperdir=d/u,workdir=d/w"
	for _, kv := range options {
		data += "," + kv[0] + "=" + kv[1]
	}
	if o.volatile {
		data += ",volatile"
	}
	if len(data) >= os.Getpagesize() {
		return fmt.Errorf("%d layers do not fit into the options of one mount: this kernel is too old for so many", len(o.lowers))
	}
	err = actingAs(o.root, func() error {
		// A working directory of this thread's own.
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return fmt.Errorf("unshare(CLONE_FS): %w", err)
		}
		if err := unix.Chdir(o.private); err != nil {
			return &os.PathError{Op: "chdir", Path: o.private, Err: err}
		}
		if err := unix.Mount(o.source, o.target, "overlay", mountFlags, data); err != nil {
			return fmt.Errorf("mount overlay (%s): %w; dmesg says more", data, err)
		}
		return unix.Chdir("/")
	})
	if err != nil {
		return err
	}
	return tree.WithDir(o.target, func(fd int) error {
		if err := writable(fd); err != nil {
			return errors.Join(err, unix.Unmount(o.target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW))
		}
		return nil
	})
}

// clone makes an idmapped mount of dir, attached nowhere.
func clone(dir string, userns int) (int, error) {
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
	fd, err := clone(dir, userns)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "move_mount", Path: at, Err: err}
	}
	return nil
}

// detachClones takes away what mountAttached, or its death, left.
func detachClones(private string) error {
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

// writable refuses a mount that the kernel made read-only in silence, as it
// does when the overlay can not make its work directory.
func writable(fd int) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return fmt.Errorf("statfs of the overlay: %w", err)
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		return errReadOnly
	}
	return nil
}

var errReadOnly = errors.New("the kernel mounted the overlay read-only: it could not make its work directory; dmesg says why")

// kernelWords are what the kernel has to say about a failed step.
func kernelWords(fsfd int) string {
	var words []string
	var b [512]byte
	for range 16 {
		n, err := unix.Read(fsfd, b[:])
		if err != nil || n == 0 {
			break
		}
		words = append(words, string(bytes.TrimSpace(b[:n])))
	}
	if words == nil {
		return ""
	}
	return ": " + strings.Join(words, "; ")
}

// overlayCaps is what an overlay needs of who creates it, for as long as it is
// mounted: with fewer, chown, chmod of others' files, setgid bits and file
// capabilities fail inside, the third in silence. It gets no more; CAP_MKNOD is
// left out, so no guest ever makes a device.
const overlayCaps = 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_CHOWN |
	1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID | 1<<unix.CAP_SETFCAP

// actingAs runs f on a thread of its own with the file system ids of root and
// overlayCaps effective. An overlay keeps the credentials of its creation and
// does all its work with them, and what they make on an idmapped upper must be
// the guest root's. The thread dies, so that nothing else runs with them.
func actingAs(root int, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked
		done <- func() error {
			hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var caps [2]unix.CapUserData
			if err := unix.Capget(&hdr, &caps[0]); err != nil {
				return fmt.Errorf("read capabilities: %w", err)
			}
			// The group first: without CAP_SETGID in effect it is silently refused.
			if root != 0 {
				_, _ = unix.SetfsgidRetGid(root)
				_, _ = unix.SetfsuidRetUid(root)
				if gid, _ := unix.SetfsgidRetGid(-1); gid != root {
					return fmt.Errorf("setfsgid(%d) had no effect: CAP_SETGID is missing", root)
				}
				if uid, _ := unix.SetfsuidRetUid(-1); uid != root {
					return fmt.Errorf("setfsuid(%d) had no effect: CAP_SETUID is missing", root)
				}
			}
			was := caps
			caps[0].Effective, caps[1].Effective = overlayCaps, 0
			if err := unix.Capset(&hdr, &caps[0]); err != nil {
				return fmt.Errorf("set capabilities: %w", err)
			}
			err := f()
			// Go can not end the first thread of a process, so that one must be
			// as it was.
			if cerr := unix.Capset(&hdr, &was[0]); cerr != nil {
				return errors.Join(err, fmt.Errorf("restore capabilities: %w", cerr))
			}
			_, _ = unix.SetfsuidRetUid(0)
			_, _ = unix.SetfsgidRetGid(0)
			return err
		}()
	}()
	return <-done
}

// detachedClonesWork tries whether this kernel mounts an overlay of detached
// clones, named one by one: Linux 6.15 does. It knows no other way to ask.
func (s *Store) detachedClonesWork() bool {
	dir, err := s.Layers.TempDir()
	if err != nil {
		return false
	}
	defer tree.Remove(dir) //nolint:errcheck // cleared at the next Open
	for _, d := range []string{"u", "w", "l"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			return false
		}
	}
	// Volatile, or its end would sync all that anybody has on that disk.
	o := overlay{source: "sandboxd-probe", volatile: true, disk: dir, lowers: []string{filepath.Join(dir, "l")},
		userns: int(s.cfg.IdentityUserNS.Fd()), later: s.bg.Go}
	fsfd, err := o.configure()
	if err != nil {
		return false
	}
	return unix.Close(fsfd) == nil
}
