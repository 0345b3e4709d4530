package btrfs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// minPool is the least that mkfs.btrfs and a handful of disks need.
const minPool = 256 << 20

// LoopPool is a [pool.Driver] on a btrfs in a file, which it makes and mounts.
//
// The file is allocated in full. A full host disk under a sparse file would turn
// the whole pool read-only. Therefore nothing here ever discards blocks.
type LoopPool struct {
	Pool
	image string
	bytes int64
	held  atomic.Int64 // what Fill has taken
}

// NewLoop returns the driver. A new file at image has so many bytes, with 0 as many as [SizeFor] says;
// one that is there keeps its size. full is as in New.
func NewLoop(image string, bytes int64, full bool) *LoopPool {
	return &LoopPool{Pool: Pool{full: full}, image: image, bytes: bytes}
}

// Kind is pool.BtrfsLoop.
func (b *LoopPool) Kind() string { return pool.BtrfsLoop }

// Describe also says how large the pool is and how it counts.
func (b *LoopPool) Describe() string {
	var size int64
	if fi, err := os.Stat(b.image); err == nil {
		size = fi.Size()
	}
	return fmt.Sprintf("%s: %s, %d MiB, %s", pool.BtrfsLoop, b.image, size>>20, b.quotas())
}

// Open makes the file unless it is there, and mounts it unless it is mounted.
func (b *LoopPool) Open(ctx context.Context, dir string) error {
	b.dir = dir
	mounted, err := tree.IsMountPoint(dir)
	if err != nil {
		return err
	}
	if !mounted {
		if err := errors.Join(b.make(ctx), failpoint.Pass("pool:mount")); err != nil {
			return err
		}
		if err := b.mount(); err != nil {
			return err
		}
	}
	return b.begin()
}

// make makes the file and the file system in it, under another name first: a file
// that has its name is always whole.
func (b *LoopPool) make(ctx context.Context) (err error) {
	if _, err := os.Lstat(b.image); !errors.Is(err, fs.ErrNotExist) {
		return errors.Join(err, b.moved())
	}
	if left, err := os.ReadDir(b.dir); err != nil || len(left) > 0 {
		return errors.Join(err, errs.New(errs.WrongState, "the pool directory %s is not empty and there is no pool file: it holds a "+
			"pool of kind %q; set pool = %q, or move it away", b.dir, pool.Plain, pool.Plain))
	}
	if b.bytes == 0 {
		if b.bytes, err = SizeFor(filepath.Dir(b.image)); err != nil {
			return err
		}
	}
	if b.bytes < minPool {
		return errs.New(errs.Invalid, "pool_size of %s is too small: the minimum is %s", record.Size(b.bytes), record.Size(minPool))
	}
	if _, err := mkfsProgram(); err != nil {
		return err
	}
	// What a daemon that was killed here has left is removed, not made empty: its mkfs may
	// write to it for another moment.
	tmp := b.image + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(tmp)
		}
	}()
	if err := b.reserve(ctx, f); err != nil {
		return err
	}
	if err := failpoint.Pass("pool:mkfs"); err != nil {
		return err
	}
	// nodiscard: otherwise mkfs gives back what was just allocated.
	if err := mkfs(ctx, tmp, "--nodiscard"); err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), failpoint.Pass("pool:name")); err != nil {
		return err
	}
	return os.Rename(tmp, b.image)
}

// moved fails if the file is a link that leads nowhere: a new pool in its place would hide the old one.
func (b *LoopPool) moved() error {
	_, err := os.Stat(b.image)
	if errors.Is(err, fs.ErrNotExist) {
		to, lerr := os.Readlink(b.image)
		return errs.Wrap(errors.Join(err, lerr), errs.WrongState, "the pool was moved to %s, and is not there: mount its disk (let "+
			"the service "+
			"need the mount: RequiresMountsFor=), or bring the file back", to)
	}
	return err
}

// defaultPool is the size of a new pool where that is not more than three quarters of what is free.
const defaultPool = 20 << 30

// SizeFor is the size that a new pool has in a directory if none is configured.
func SizeFor(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	free := int64(st.Bavail) * st.Bsize
	bytes := min(defaultPool, free/4*3) &^ (1<<20 - 1)
	if bytes < minPool {
		return 0, errs.Wrap(unix.ENOSPC, errs.Exhausted, "%s has %d MiB free, which is too little for a storage pool: its smallest "+
			"has %d MiB, "+
			"and a quarter of what is free stays free; free space, or give the pool a disk of its own "+
			"(storage.device)", dir, free>>20, minPool>>20)
	}
	return bytes, nil
}

// FailpointNames lists the steps in which a new pool is made, for tests that kill the daemon
// at each of them: the file has its blocks, it is about to get a file system, it has one, and
// it has its name.
func FailpointNames() []string { return []string{"pool:write", "pool:mkfs", "pool:name", "pool:mount"} }

// reserve gives the new file f all its blocks.
func (b *LoopPool) reserve(ctx context.Context, f *os.File) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Type == magic {
		// No copy on write below copy on write: every block would be written twice.
		if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, nocowFlag); err != nil {
			return fmt.Errorf("set nocow on %s: %w", f.Name(), err)
		}
	}
	// Without this check fallocate takes all there is before it fails.
	free := int64(st.Bavail) * st.Bsize
	if free < b.bytes {
		return errs.Wrap(unix.ENOSPC, errs.Exhausted, "allocate the storage pool: the disk of the state directory has %d MiB free, "+
			"pool_size is %d MiB: lower pool_size or free space", free>>20, b.bytes>>20)
	}
	err := allocate(ctx, f, b.bytes)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG) {
		return errs.Wrap(err, errs.Exhausted, "allocate the storage pool: the disk of the state directory had %d MiB free, and does not "+
			"take %d MiB (pool_size): %v; another program fills it, a quota or a limit holds, or the device below has less than it says: "+
			"lower pool_size or free space", free>>20, b.bytes>>20, err)
	}
	if err != nil {
		return fmt.Errorf("allocate %d bytes for %s: %w", b.bytes, f.Name(), err)
	}
	return nil
}

// allocate gives a new file all its blocks. Where the kernel (6.17) and the disk can have
// them written as zeros without writing, all are; elsewhere the first part is.
func allocate(ctx context.Context, f *os.File, bytes int64) error {
	const writeZeroes = 0x80 // FALLOC_FL_WRITE_ZEROES
	err := unix.Fallocate(int(f.Fd()), writeZeroes, 0, bytes)
	if errors.Is(err, unix.EOPNOTSUPP) {
		if err = unix.Fallocate(int(f.Fd()), 0, 0, bytes); err == nil {
			err = writeFirst(ctx, f.Name(), bytes, firstTime)
		}
	}
	if err != nil {
		return err
	}
	return failpoint.Pass("pool:write")
}

func (b *LoopPool) mount() error {
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
	err = mount(dev.Name(), b.dir, "nodiscard")
	if errors.Is(err, unix.ENODEV) {
		return errs.Wrap(err, errs.Unsupported, "this kernel has no btrfs: set pool = %q, which cannot limit disks", pool.Plain)
	}
	if err != nil {
		return fmt.Errorf("mount %s (%s) on %s: %w; dmesg says more", b.image, dev.Name(), b.dir, err)
	}
	return nil
}

// busyPatience is how long Close tries again while another process, such as a monitor
// of the host's disks, has a file open in the pool. The kernel has no event for its
// end.
const busyPatience = time.Second

// Close unmounts the pool.
func (b *LoopPool) Close() error { return Unmount(b.dir) }

// Unmount takes a pool out of use that a LoopPool or a Disk has mounted at dir.
func Unmount(dir string) error {
	err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW)
	for end := time.Now().Add(busyPatience); errors.Is(err, unix.EBUSY) && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
		err = unix.Unmount(dir, unix.UMOUNT_NOFOLLOW)
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil // it is not mounted
	}
	return err
}
