package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/layer"
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
	SetUID   bool     // setuid and setgid bits count
}

// Mounts are the root file systems of sandboxes: for each its disk over image layers.
type Mounts struct {
	runDir   string // <runDir>/<id>/rootfs
	pool     *Pool
	layers   *layer.Store
	scaffold string // the directory of the layer with all mount points
	users    users
	attached bool            // mount as Linux 6.1 needs it
	bg       *sync.WaitGroup // work in the background

	mu        sync.Mutex
	releasing map[string][]chan struct{} // by id: overlays that are detached and still written back
}

// clonesDir is the directory of a sandbox, below the run directory, where an overlay
// attaches its clones for a moment if the kernel is older than Linux 6.15.
const clonesDir = "clones"

// RootfsDir is where Mount mounts the root file system of id.
func (m *Mounts) RootfsDir(id string) string {
	return filepath.Join(m.runDir, id, "rootfs")
}

// Mount mounts layers and disk of id at RootfsDir(id), nodev and, unless how says
// otherwise, nosuid. Above it only host root and, with own users, the sandbox's root may
// pass: the setuid files of a guest are out of reach of the host's users.
//
// Preconditions: CreateDisk(id) was called and, with own users, the user
// namespace of id exists. A failed Mount is undone by Unmount.
func (m *Mounts) Mount(ctx context.Context, id string, how Mount) error {
	if err := m.mount(ctx, id, how); err != nil {
		return fmt.Errorf("mount rootfs of %s: %w", id, err)
	}
	return nil
}

func (m *Mounts) mount(ctx context.Context, id string, how Mount) error {
	disk, err := m.pool.diskDir(id)
	if err != nil {
		return err
	}
	if err := m.awaitRelease(ctx, id); err != nil {
		return err
	}
	if err := clearVolatile(disk, how.Volatile); err != nil {
		return err
	}
	if err := clearMountPoint(filepath.Join(disk, "u", agentState)); err != nil {
		return err
	}
	target, err := m.makeTarget(id, how)
	if err != nil {
		return err
	}
	ns, done, err := m.users.open(id, how.OwnUsers)
	if err != nil {
		return err
	}
	defer done()
	o := overlay.Mount{
		Source:   "sandboxd-" + id,
		Target:   target,
		Disk:     disk,
		UserNS:   int(ns.Fd()),
		Volatile: how.Volatile,
		SetUID:   how.SetUID,
		Private:  filepath.Join(filepath.Dir(target), clonesDir),
		Later:    m.bg.Go,
	}
	if how.OwnUsers {
		o.Root = int(how.UIDBase)
	}
	if o.Lowers, err = m.lowers(how.Layers); err != nil {
		return err
	}
	if m.attached {
		return m.mountBeyondLimit(disk, o.Attached)
	}
	return m.mountBeyondLimit(disk, o.Detached)
}

// mountRoom is how many bytes a full disk may take beyond its limit while it is being
// mounted: an overlay makes its work directory anew.
const mountRoom = 4 << 20

// mountBeyondLimit calls mount. If the disk is full, it raises the limit for a moment
// and calls mount again.
func (m *Mounts) mountBeyondLimit(disk string, mount func() error) error {
	err := mount()
	if !errors.Is(err, unix.EDQUOT) && !errors.Is(err, unix.ENOSPC) && !errors.Is(err, overlay.ErrReadOnly) {
		return err
	}
	_, limit, uerr := m.pool.driver.Usage(disk)
	if uerr != nil || limit == 0 {
		return err
	}
	if lerr := m.pool.driver.Limit(disk, limit+mountRoom); lerr != nil {
		return errors.Join(err, lerr)
	}
	return errors.Join(mount(), m.pool.driver.Limit(disk, limit))
}

// clearMountPoint removes a file or link that hides a mount point of the scaffold. A
// runtime would follow a link there on the host, and a guest may have made one before
// a snapshot of its disk was taken. Nothing of a guest runs now.
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

// makeTarget makes the mount point, and lets only the sandbox's root pass above it.
func (m *Mounts) makeTarget(id string, how Mount) (string, error) {
	target := m.RootfsDir(id)
	top := filepath.Dir(target)
	gid, mode := 0, fs.FileMode(0o700)
	if how.OwnUsers {
		gid, mode = int(how.UIDBase), 0o710
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

// volatileMark reports whether a disk has overlayfs' mark of a volatile mount that was
// never unmounted. The mark says only that nothing was synced. If only the daemon died,
// the page cache has everything. If the host went down, the disk may lack any of the
// writes, and volatileMark fails with errs.WrongState.
func volatileMark(disk string) (marked bool, err error) {
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
		return true, errs.New(errs.WrongState, "its disk was in use without syncing when the host went down, so its files cannot be "+
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
	mark, err := volatileMark(disk)
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

// Keep has the disk of id survive a crash of the host, although it was last mounted volatile. It is
// unmounted, and was synced when it last changed. Without a disk, and for another one, it does nothing.
func (m *Mounts) Keep(ctx context.Context, id string) error {
	disk, err := m.pool.diskDir(id)
	if err != nil {
		return err
	}
	marked, err := tree.Exists(filepath.Join(disk, "w/work/incompat/volatile"))
	if err != nil || !marked {
		return err
	}
	if err := m.awaitRelease(ctx, id); err != nil {
		return fmt.Errorf("keep disk %s: %w", id, err)
	}
	err = tree.Remove(filepath.Join(disk, "w/work"))
	if err == nil {
		err = durable.SyncDir(filepath.Join(disk, "w"))
	}
	if err != nil {
		return fmt.Errorf("keep disk %s: %w", id, err)
	}
	return nil
}

// Unmount removes the root file system of id, also half of one; absent is fine. The
// disk keeps what the guest wrote. It is written back in the background, and Mount
// waits for that. The directory of id below the run directory must hold nothing else.
func (m *Mounts) Unmount(_ context.Context, id string) error {
	if !record.IsID(id) {
		return fmt.Errorf("unmount rootfs of %q: not an id", id)
	}
	if err := m.unmount(id); err != nil {
		return fmt.Errorf("unmount rootfs of %s: %w", id, err)
	}
	return nil
}

func (m *Mounts) unmount(id string) error {
	target := m.RootfsDir(id)
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
		if err := m.detach(id, target); err != nil {
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

// detach takes a mount out of the tree. When an overlay ends, the kernel syncs the
// whole file system that its upper is on. That takes 2 ms when nobody has written, and
// seconds when any sandbox has. A descriptor delays the end until the background closes
// it.
func (m *Mounts) detach(id, target string) error {
	fd, err := unix.Open(target, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: target, Err: err}
	}
	if err := unix.Unmount(target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
		return errors.Join(&os.PathError{Op: "umount", Path: target, Err: err}, unix.Close(fd))
	}
	done := make(chan struct{})
	m.mu.Lock()
	m.releasing[id] = append(m.releasing[id], done)
	m.mu.Unlock()
	m.bg.Go(func() {
		unix.Close(fd)
		close(done)
		m.mu.Lock()
		defer m.mu.Unlock()
		for i, c := range m.releasing[id] {
			if c == done {
				m.releasing[id] = append(m.releasing[id][:i], m.releasing[id][i+1:]...)
				break
			}
		}
		if len(m.releasing[id]) == 0 {
			delete(m.releasing, id)
		}
	})
	return nil
}

// awaitRelease waits until no overlay that was detached holds the disk of id: the
// behaviour of two overlays on one upper is undefined.
func (m *Mounts) awaitRelease(ctx context.Context, id string) error {
	m.mu.Lock()
	wait := append([]chan struct{}(nil), m.releasing[id]...)
	m.mu.Unlock()
	for _, c := range wait {
		select {
		case <-c:
		case <-ctx.Done():
			return fmt.Errorf("the kernel is still writing back the files of its last overlay: %w", context.Cause(ctx))
		}
	}
	return nil
}

// Mounted reports whether the root of id is mounted. If somebody has unmounted it, its
// processes go on: they have mounts of their own.
func (m *Mounts) Mounted(_ context.Context, id string) (bool, error) {
	if !record.IsID(id) {
		return false, fmt.Errorf("find the rootfs of %q: not an id", id)
	}
	mounted, err := tree.IsMountPoint(m.RootfsDir(id))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("find the rootfs of %s: %w", id, err)
	}
	return mounted, nil
}

// ListMounts returns the ids that have a root file system, or half of one: a
// directory below the run directory goes only after the mount in it.
func (m *Mounts) ListMounts(context.Context) ([]string, error) {
	entries, err := os.ReadDir(m.runDir)
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
