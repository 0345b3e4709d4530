package btrfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
)

const (
	iocResize  = 0x50009403 // _IOW(0x94, 3, struct btrfs_ioctl_vol_args)
	iocDevInfo = 0xd000941e // _IOWR(0x94, 30, struct btrfs_ioctl_dev_info_args)
)

type devInfoArgs struct {
	id         uint64
	uuid       [16]byte
	used, size uint64
	_          [379]uint64
	path       [1024]byte
}

// GrowLoop makes the pool of the file image, which is mounted at dir, as large as bytes, while
// sandboxes write to it. At least keep bytes stay free on the disk of the file. What a GrowLoop that
// was killed has left is a file that is larger than its file system; the next one goes on there.
func GrowLoop(ctx context.Context, image, dir string, bytes, keep int64) error {
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return errs.Wrap(err, errs.WrongState, "%s is being grown or moved by another process: wait until it ends", image)
	}
	dev, err := attachedLoop(f)
	if err != nil {
		return err
	}
	if dev == nil {
		return errs.New(errs.WrongState, "%s is not mounted: start sandboxd, which mounts it", image)
	}
	defer dev.Close()
	if err := lengthen(ctx, f, bytes, keep); err != nil {
		return err
	}
	if err := unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return fmt.Errorf("give %s the size of %s: %w", dev.Name(), image, err)
	}
	return GrowMounted(dir)
}

// lengthen gives a file in use all blocks up to bytes. If it fails, the file is as it was.
func lengthen(ctx context.Context, f *os.File, bytes, keep int64) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	have := fi.Size()
	if bytes < have {
		return errs.New(errs.Invalid, "the pool %s has %s and cannot become smaller, %s: make a new pool, or give a larger size",
			f.Name(), record.Size(have), record.Size(bytes))
	}
	if bytes == have {
		return nil
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return err
	}
	// Without this check fallocate takes all there is before it fails.
	if free, need := int64(st.Bavail)*st.Bsize, bytes-have; free-need < keep {
		return errs.Wrap(unix.ENOSPC, errs.Exhausted, "%d MiB more do not fit beside %s: its disk has %d MiB free, of which %d MiB "+
			"stay free: "+
			"free space, grow by less, or move the pool to another disk (sandboxd pool move)", need>>20, f.Name(), free>>20, keep>>20)
	}
	const writeZeroes = 0x80 // FALLOC_FL_WRITE_ZEROES
	err = context.Cause(ctx)
	if err == nil {
		if err = unix.Fallocate(int(f.Fd()), writeZeroes, have, bytes-have); errors.Is(err, unix.EOPNOTSUPP) {
			err = unix.Fallocate(int(f.Fd()), 0, have, bytes-have)
		}
	}
	if err == nil {
		err = f.Sync()
	}
	if err != nil { // the loop device has the old size, so nothing was written behind it
		return fmt.Errorf("allocate %d MiB more for %s: %w; it keeps its "+
			"size", (bytes-have)>>20, f.Name(), errors.Join(err, f.Truncate(have)))
	}
	return nil
}

// GrowMounted gives the btrfs at dir all that its devices have.
func GrowMounted(dir string) error {
	return tree.WithDir(dir, func(fd int) error {
		var info fsInfoArgs
		if err := pool.Ioctl(fd, iocFsInfo, unsafe.Pointer(&info)); err != nil {
			return fmt.Errorf("read file system info of %s: %w", dir, err)
		}
		for id := uint64(1); id <= info.maxID; id++ {
			d := devInfoArgs{id: id}
			if err := pool.Ioctl(fd, iocDevInfo, unsafe.Pointer(&d)); errors.Is(err, unix.ENODEV) {
				continue
			} else if err != nil {
				return fmt.Errorf("read device %d of %s: %w", id, dir, err)
			}
			var a volArgs
			copy(a.name[:], fmt.Sprintf("%d:max", id))
			switch n, _, err := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), iocResize, uintptr(unsafe.Pointer(&a))); {
			case err != 0:
				return fmt.Errorf("grow the file system at %s: %w; dmesg says more; give the command again", dir, err)
			case n != 0: // enum btrfs_err_code
				return errs.New(errs.WrongState, "grow the file system at %s: btrfs does something else with its devices, such as a "+
					"balance: "+
					"wait until `btrfs filesystem show` and `btrfs balance status %[1]s` show that it has ended, and give the "+
					"command again", dir)
			}
		}
		return nil
	})
}

// Sizes returns how large the file system at dir is, and how much its devices have.
func Sizes(dir string) (system, devices int64, err error) {
	err = tree.WithDir(dir, func(fd int) error {
		var info fsInfoArgs
		if err := pool.Ioctl(fd, iocFsInfo, unsafe.Pointer(&info)); err != nil {
			return fmt.Errorf("read file system info of %s: %w", dir, err)
		}
		for id := uint64(1); id <= info.maxID; id++ {
			d := devInfoArgs{id: id}
			if err := pool.Ioctl(fd, iocDevInfo, unsafe.Pointer(&d)); errors.Is(err, unix.ENODEV) {
				continue
			} else if err != nil {
				return fmt.Errorf("read device %d of %s: %w", id, dir, err)
			}
			system += int64(d.size)
			n, err := sizeOf(unix.ByteSliceToString(d.path[:]))
			if err != nil {
				return err
			}
			devices += n
		}
		return nil
	})
	return system, devices, err
}

// sizeOf is the size of a block device.
func sizeOf(device string) (int64, error) {
	f, err := os.Open(device)
	if err != nil {
		return 0, fmt.Errorf("read the size of a device of the pool: %w", err)
	}
	defer f.Close()
	n, err := f.Seek(0, 2)
	if err != nil {
		return 0, fmt.Errorf("read the size of %s: %w", device, err)
	}
	return n, nil
}
