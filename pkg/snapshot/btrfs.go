package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"golang.org/x/sys/unix"
)

// minPool is the least that mkfs.btrfs and a handful of disks need.
const minPool = 256 << 20

// btrfsLoop is a pool in a btrfs on a loop file: one subvolume with a qgroup
// for each disk.
//
// The file is allocated in full. A full host disk under a sparse one would
// turn the whole pool read-only; therefore also nothing here ever discards.
type btrfsLoop struct {
	image string
	bytes int64
	dir   string
	sysfs string // /sys/fs/btrfs/<uuid>/qgroups
}

func (b *btrfsLoop) kind() string { return PoolBtrfsLoop }

func (b *btrfsLoop) describe() string {
	var size int64
	if fi, err := os.Stat(b.image); err == nil {
		size = fi.Size()
	}
	return fmt.Sprintf("%s: %s, %d MiB, qgroup limits", PoolBtrfsLoop, b.image, size>>20)
}

func (b *btrfsLoop) open(ctx context.Context, dir string) error {
	b.dir = dir
	mounted, err := isMountPoint(dir)
	if err != nil {
		return err
	}
	if !mounted {
		if err := b.make(ctx); err != nil {
			return err
		}
		if err := b.mount(); err != nil {
			return err
		}
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return err
	}
	if st.Type != btrfsMagic {
		return fmt.Errorf("a file system that is no btrfs (type %#x) is mounted there; unmount it", st.Type)
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		return errors.New("the pool is read-only, as btrfs makes it after an I/O error: see dmesg, unmount it, run btrfs check on the pool file")
	}
	return withDir(dir, b.quota)
}

// quota turns qgroups on and mends their count after a power cut.
func (b *btrfsLoop) quota(fd int) error {
	if err := enableQuota(fd); err != nil {
		return err
	}
	uuid, err := fsUUID(fd)
	if err != nil {
		return err
	}
	b.sysfs = filepath.Join("/sys/fs/btrfs", uuid, "qgroups")
	v, err := readNumber(filepath.Join(b.sysfs, "inconsistent"))
	if err != nil {
		return err
	}
	if v != 0 {
		return rescanQuota(fd)
	}
	return nil
}

// make makes the file and the file system in it, beside first: a file under
// its name is always whole.
func (b *btrfsLoop) make(ctx context.Context) (err error) {
	if _, err := os.Stat(b.image); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if left, err := os.ReadDir(b.dir); err != nil || len(left) > 0 {
		return errors.Join(err, errs.New(errs.WrongState, "the pool directory %s is not empty and there is no pool file: it holds a pool of kind %q; set pool = %q, or move it away", b.dir, PoolPlain, PoolPlain))
	}
	if b.bytes < minPool {
		return errs.New(errs.Invalid, "pool_size of %d bytes is too small: the least is %d", b.bytes, minPool)
	}
	mkfs, err := exec.LookPath("mkfs.btrfs")
	if err != nil {
		return errs.Wrap(err, errs.Unsupported, "mkfs.btrfs is missing: apt-get install btrfs-progs, or set pool = %q, which can not limit disks", PoolPlain)
	}
	tmp := b.image + ".new"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(tmp)
		}
	}()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Type == btrfsMagic {
		// Copy on write below copy on write: every block would be written twice.
		if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, nocowFlag); err != nil {
			return fmt.Errorf("set nocow on %s: %w", tmp, err)
		}
	}
	// Asked first: fallocate takes all there is before it finds that it is too little.
	free := int64(st.Bavail) * st.Bsize
	if free >= b.bytes {
		err = unix.Fallocate(int(f.Fd()), 0, 0, b.bytes)
	} else {
		err = unix.ENOSPC
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG) {
		return errs.Wrap(err, errs.Exhausted, "allocate the storage pool: the disk of the state directory has %d MiB free, pool_size is %d MiB: lower pool_size or free space", free>>20, b.bytes>>20)
	}
	if err != nil {
		return fmt.Errorf("allocate %d bytes for %s: %w", b.bytes, tmp, err)
	}
	// single: the disk below answers for the blocks, as for any file of it.
	// nodiscard: mkfs would give back what was just allocated.
	out, err := exec.CommandContext(ctx, mkfs, "-q", "--nodiscard", "--metadata", "single", "--label", "sandboxd", tmp).CombinedOutput()
	if err != nil {
		return fmt.Errorf("mkfs.btrfs %s: %w: %s", tmp, err, strings.TrimSpace(string(out)))
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return os.Rename(tmp, b.image)
}

func (b *btrfsLoop) mount() error {
	f, err := os.OpenFile(b.image, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	dev, err := attachLoop(f)
	if err != nil {
		return err
	}
	defer dev.Close()
	if err := unix.Mount(dev.Name(), b.dir, "btrfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME, "nodiscard"); err != nil {
		if errors.Is(err, unix.ENODEV) {
			return errs.Wrap(err, errs.Unsupported, "this kernel has no btrfs: set pool = %q, which can not limit disks", PoolPlain)
		}
		return fmt.Errorf("mount %s (%s) on %s: %w; dmesg says more", b.image, dev.Name(), b.dir, err)
	}
	return os.Chmod(b.dir, 0o700)
}

func (b *btrfsLoop) close() error {
	if err := unix.Unmount(b.dir, unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

func (b *btrfsLoop) create(path string, bytes int64) error {
	if err := createSubvolume(path); err != nil {
		return err
	}
	if bytes <= 0 {
		return nil
	}
	return withDir(path, func(fd int) error { return limitSubvolume(fd, bytes) })
}

func (b *btrfsLoop) destroy(path string) error {
	if err := destroySubvolume(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// usage reads what the kernel holds in memory: what is on disk and what is
// reserved for writes on their way.
func (b *btrfsLoop) usage(path string) (used, limit int64, err error) {
	var dir string
	if err := withDir(path, func(fd int) error {
		id, err := subvolumeID(fd)
		dir = filepath.Join(b.sysfs, "0_"+strconv.FormatUint(id, 10))
		return err
	}); err != nil {
		return 0, 0, err
	}
	for _, name := range []string{"referenced", "rsv_data", "rsv_meta_pertrans", "rsv_meta_prealloc"} {
		n, err := readNumber(filepath.Join(dir, name))
		if err != nil {
			return 0, 0, err
		}
		used += n
	}
	limit, err = readNumber(filepath.Join(dir, "max_referenced"))
	return used, limit, err
}

// sweep removes qgroups whose subvolume is gone, which kernels before 6.10 keep.
// The list of qgroups is read before that of subvolumes: in the other order a
// disk born in between would lose its limit.
func (b *btrfsLoop) sweep(ctx context.Context) error {
	qgroups, err := os.ReadDir(b.sysfs)
	if err != nil {
		return err
	}
	disks, err := diskDirs(b.dir)
	if err != nil {
		return err
	}
	alive := map[uint64]bool{}
	for _, dir := range disks {
		err := withDir(dir, func(fd int) error {
			id, err := subvolumeID(fd)
			alive[id] = true
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return withDir(b.dir, func(fd int) error {
		for _, q := range qgroups {
			n, ok := strings.CutPrefix(q.Name(), "0_")
			id, err := strconv.ParseUint(n, 10, 64)
			if !ok || err != nil || id < firstFreeObject || alive[id] {
				continue
			}
			if err := removeQgroup(fd, id); err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("remove qgroup 0/%d: %w", id, err)
			}
			if err := ctx.Err(); err != nil {
				return err
			}
		}
		return nil
	})
}

func readNumber(path string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}

// isMountPoint reports whether a file system is mounted on dir.
func isMountPoint(dir string) (bool, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st); err != nil {
		return false, &os.PathError{Op: "statx", Path: dir, Err: err}
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}
