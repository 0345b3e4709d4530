package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// minPool is the least that mkfs.btrfs and a handful of disks need.
const minPool = 256 << 20

// btrfsLoop is a pool in a btrfs on a loop file.
//
// The file is allocated in full. A full host disk under a sparse one would
// turn the whole pool read-only; therefore also nothing here ever discards.
type btrfsLoop struct {
	btrfs
	image string
	bytes int64
}

func (b *btrfsLoop) kind() string { return PoolBtrfsLoop }

func (b *btrfsLoop) describe() string {
	var size int64
	if fi, err := os.Stat(b.image); err == nil {
		size = fi.Size()
	}
	return fmt.Sprintf("%s: %s, %d MiB, %s", PoolBtrfsLoop, b.image, size>>20, b.quotas())
}

func (b *btrfsLoop) open(ctx context.Context, dir string) error {
	b.dir = dir
	mounted, err := tree.IsMountPoint(dir)
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
	return b.begin()
}

// make makes the file and the file system in it, beside first: a file under
// its name is always whole.
func (b *btrfsLoop) make(ctx context.Context) (err error) {
	if _, err := os.Stat(b.image); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if left, err := os.ReadDir(b.dir); err != nil || len(left) > 0 {
		return errors.Join(err, errs.New(errs.WrongState, "the pool directory %s is not empty and there is no pool file: it holds a "+
			"pool of kind %q; set pool = %q, or move it away", b.dir, PoolPlain, PoolPlain))
	}
	if b.bytes < minPool {
		return errs.New(errs.Invalid, "pool_size of %s is too small: the least is %s", record.Size(b.bytes), record.Size(minPool))
	}
	mkfs, err := exec.LookPath("mkfs.btrfs")
	if err != nil {
		return errs.Wrap(err, errs.Unsupported, "mkfs.btrfs is missing: apt-get install btrfs-progs, or set pool = %q, which can not "+
			"limit disks", PoolPlain)
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
		return errs.Wrap(err, errs.Exhausted, "allocate the storage pool: the disk of the state directory has %d MiB free, pool_size is "+
			"%d MiB: lower pool_size or free space", free>>20, b.bytes>>20)
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

// lookPatience is how long close waits for those who only look at the pool, as a
// monitor of the host's disks does: the kernel tells nobody when they have gone.
const lookPatience = time.Second

func (b *btrfsLoop) close() error {
	err := unix.Unmount(b.dir, unix.UMOUNT_NOFOLLOW)
	for end := time.Now().Add(lookPatience); errors.Is(err, unix.EBUSY) && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
		err = unix.Unmount(b.dir, unix.UMOUNT_NOFOLLOW)
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil // it is not mounted
	}
	return err
}
