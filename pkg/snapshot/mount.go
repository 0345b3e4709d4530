package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/overlay"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// Mount says how to mount a root file system.
type Mount struct {
	Layers   []string // digests of image layers, lowest first
	OwnUsers bool     // map guest ids with the sandbox's user namespace, else one to one
	UIDBase  uint32   // host id of guest id 0, if OwnUsers
	Volatile bool     // a host crash may lose it; unmounting then writes nothing back
}

// clonesDir is the directory of a sandbox, below the run directory, where an overlay
// attaches its clones for a moment if the kernel is older than Linux 6.15.
const clonesDir = "clones"

// RootfsDir is where Mount mounts the root file system of id.
func (s *Store) RootfsDir(id string) string {
	return filepath.Join(s.cfg.RunDir, id, "rootfs")
}

// Mount mounts layers and disk of id at RootfsDir(id), nosuid and nodev. Above
// it only host root and, with own users, the sandbox's root may pass: the
// setuid files of a guest are out of reach of the host's users.
//
// Preconditions: CreateDisk(id) was called and, with own users, the user
// namespace of id exists. A failed Mount is undone by Unmount.
func (s *Store) Mount(ctx context.Context, id string, m Mount) error {
	if err := s.mount(ctx, id, m); err != nil {
		return fmt.Errorf("mount rootfs of %s: %w", id, err)
	}
	return nil
}

func (s *Store) mount(ctx context.Context, id string, m Mount) error {
	disk, err := s.diskDir(id)
	if err != nil {
		return err
	}
	if err := s.awaitRelease(ctx, id); err != nil {
		return err
	}
	if err := clearVolatile(disk, m.Volatile); err != nil {
		return err
	}
	if err := clearMountPoint(filepath.Join(disk, "u", agentState)); err != nil {
		return err
	}
	target, err := s.makeTarget(id, m)
	if err != nil {
		return err
	}
	users := s.cfg.IdentityUserNS
	if m.OwnUsers {
		if users, err = s.cfg.UserNS(id); err != nil {
			return err
		}
		defer users.Close()
	}
	o := overlay.Mount{
		Source:   "sandboxd-" + id,
		Target:   target,
		Disk:     disk,
		UserNS:   int(users.Fd()),
		Volatile: m.Volatile,
		Private:  filepath.Join(filepath.Dir(target), clonesDir),
		Later:    s.bg.Go,
	}
	if m.OwnUsers {
		o.Root = int(m.UIDBase)
	}
	if o.Lowers, err = s.lowers(m.Layers); err != nil {
		return err
	}
	if s.attached {
		return s.lend(disk, o.Attached)
	}
	return s.lend(disk, o.Detached)
}

// mountRoom is what a full disk may take beyond its limit, in bytes, while it is
// mounted: an overlay makes its work directory anew.
const mountRoom = 4 << 20

// lend does mount, and once more beyond the limit where the disk is full.
func (s *Store) lend(disk string, mount func() error) error {
	err := mount()
	if !errors.Is(err, unix.EDQUOT) && !errors.Is(err, unix.ENOSPC) && !errors.Is(err, overlay.ErrReadOnly) {
		return err
	}
	_, limit, uerr := s.pool.Usage(disk)
	if uerr != nil || limit == 0 {
		return err
	}
	if lerr := s.pool.Limit(disk, limit+mountRoom); lerr != nil {
		return errors.Join(err, lerr)
	}
	return errors.Join(mount(), s.pool.Limit(disk, limit))
}

// clearMountPoint removes what hides a mount point of the scaffold and is no
// directory. A runtime follows a link there on the host, and a guest may have
// made one before its disk was snapshotted. Nothing of a guest runs now.
func clearMountPoint(path string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && fi.IsDir() {
		return nil
	}
	if err == nil {
		err = os.Remove(path)
	}
	return err
}

// makeTarget makes the mount point and says who may pass above it.
func (s *Store) makeTarget(id string, m Mount) (string, error) {
	target := s.RootfsDir(id)
	top := filepath.Dir(target)
	gid, mode := 0, fs.FileMode(0o700)
	if m.OwnUsers {
		gid, mode = int(m.UIDBase), 0o710
	}
	if err := os.Mkdir(top, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	if err := errors.Join(os.Chown(top, 0, gid), os.Chmod(top, mode)); err != nil {
		return "", err
	}
	if err := os.Mkdir(target, 0o700); err != nil {
		if !errors.Is(err, fs.ErrExist) {
			return "", err
		}
		mounted, err := tree.IsMountPoint(target)
		if err != nil {
			return "", err
		}
		if mounted {
			return "", fmt.Errorf("%s is mounted already: %w", target, fs.ErrExist)
		}
	}
	return target, nil
}

// bootAttr remembers in which boot a disk was last mounted volatile.
const bootAttr = "trusted.sandboxd.boot"

// trusted reports whether a disk bears the mark of a volatile mount that was
// never unmounted. The mark says only that nothing was synced: if just the
// daemon died, the page cache still had it all; if the host did, the files are
// what the disk happened to have, and are refused with errs.WrongState.
func trusted(disk string) (marked bool, err error) {
	marked, err = tree.Exists(filepath.Join(disk, "w/work/incompat/volatile"))
	if err != nil || !marked {
		return false, err
	}
	boot, err := bootID()
	if err != nil {
		return true, err
	}
	var was [64]byte
	n, err := unix.Lgetxattr(disk, bootAttr, was[:])
	if err != nil || string(was[:n]) != boot {
		return true, errs.New(errs.WrongState, "its disk was in use without syncing when the host went down, so its files can not be "+
			"trusted: delete the sandbox")
	}
	return true, nil
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}

// clearVolatile makes a disk mountable that was mounted volatile and never
// unmounted, and notes the boot if it is to be volatile again.
func clearVolatile(disk string, volatile bool) error {
	mark, err := trusted(disk)
	if err != nil {
		return err
	}
	if mark {
		if err := tree.Remove(filepath.Join(disk, "w/work")); err != nil {
			return err
		}
	}
	if !volatile {
		return nil
	}
	boot, err := bootID()
	if err != nil {
		return err
	}
	if err := unix.Lsetxattr(disk, bootAttr, []byte(boot), 0); err != nil {
		return &os.PathError{Op: "setxattr", Path: disk, Err: err}
	}
	return nil
}

// Unmount takes the root file system of id away, also half of one; nothing
// there is fine. What the guest wrote is kept and written back in the
// background; Mount waits for that. The directory of id below the run
// directory must hold nothing else.
func (s *Store) Unmount(_ context.Context, id string) error {
	if !record.IsID(id) {
		return fmt.Errorf("unmount rootfs of %q: not an id", id)
	}
	if err := s.unmount(id); err != nil {
		return fmt.Errorf("unmount rootfs of %s: %w", id, err)
	}
	return nil
}

func (s *Store) unmount(id string) error {
	target := s.RootfsDir(id)
	if err := overlay.DetachClones(filepath.Join(filepath.Dir(target), clonesDir)); err != nil {
		return err
	}
	for {
		mounted, err := tree.IsMountPoint(target)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if !mounted {
			break
		}
		if err := s.detach(id, target); err != nil {
			return err
		}
	}
	for _, dir := range []string{target, filepath.Dir(target)} {
		if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
			return &os.PathError{Op: "rmdir", Path: dir, Err: err}
		}
	}
	return nil
}

// detach takes a mount out of the tree and leaves to the background what ends
// an overlay: a sync of the whole file system that its upper is on, 2 ms when
// nobody has written and seconds when any sandbox has. A descriptor delays it.
func (s *Store) detach(id, target string) error {
	fd, err := unix.Open(target, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: target, Err: err}
	}
	if err := unix.Unmount(target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
		return errors.Join(&os.PathError{Op: "umount", Path: target, Err: err}, unix.Close(fd))
	}
	done := make(chan struct{})
	s.mu.Lock()
	s.releasing[id] = append(s.releasing[id], done)
	s.mu.Unlock()
	s.bg.Go(func() {
		unix.Close(fd)
		close(done)
		s.mu.Lock()
		defer s.mu.Unlock()
		for i, c := range s.releasing[id] {
			if c == done {
				s.releasing[id] = append(s.releasing[id][:i], s.releasing[id][i+1:]...)
				break
			}
		}
		if len(s.releasing[id]) == 0 {
			delete(s.releasing, id)
		}
	})
	return nil
}

// awaitRelease waits until no overlay that was detached holds the disk of id:
// two on one upper are undefined.
func (s *Store) awaitRelease(ctx context.Context, id string) error {
	s.mu.Lock()
	wait := append([]chan struct{}(nil), s.releasing[id]...)
	s.mu.Unlock()
	for _, c := range wait {
		select {
		case <-c:
		case <-ctx.Done():
			return fmt.Errorf("the kernel still writes back what its last overlay left: %w", context.Cause(ctx))
		}
	}
	return nil
}

// Mounted reports whether the root of id is mounted, which somebody may have
// undone; what runs in it has mounts of its own.
func (s *Store) Mounted(_ context.Context, id string) (bool, error) {
	if !record.IsID(id) {
		return false, fmt.Errorf("look for the rootfs of %q: not an id", id)
	}
	mounted, err := tree.IsMountPoint(s.RootfsDir(id))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for the rootfs of %s: %w", id, err)
	}
	return mounted, nil
}

// ListMounts returns the ids that have a root file system, or half of one: a
// directory below the run directory goes only after the mount in it.
func (s *Store) ListMounts(context.Context) ([]string, error) {
	entries, err := os.ReadDir(s.cfg.RunDir)
	if err != nil {
		return nil, fmt.Errorf("list root file systems: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if record.IsID(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}
