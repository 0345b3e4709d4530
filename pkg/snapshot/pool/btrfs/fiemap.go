package btrfs

import (
	"errors"
	"os"
	"unsafe"

	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"golang.org/x/sys/unix"
)

// The part of include/uapi/linux/fiemap.h that is used.
const (
	iocFiemap       = 0xc020660b // _IOWR('f', 11, struct fiemap)
	extentLast      = 0x1        // FIEMAP_EXTENT_LAST
	extentUnwritten = 0x800      // FIEMAP_EXTENT_UNWRITTEN: allocated, reads as zeros
)

type fiemap struct {
	start, length                uint64
	flags, mapped, count, unused uint32
	extents                      [512]fiemapExtent
}

type fiemapExtent struct {
	logical, physical, length uint64
	_                         [2]uint64
	flags                     uint32
	_                         [3]uint32
}

// Written returns the size of the file of a pool, and how many of its bytes the file
// system below holds as written. The first write to any other byte is slow. The error
// is errors.ErrUnsupported if that file system does not tell.
func Written(image string) (written, size int64, err error) {
	f, err := os.Open(image)
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return 0, 0, err
	}
	size = fi.Size()
	for at := uint64(0); at < uint64(size); {
		m := fiemap{start: at, length: uint64(size) - at}
		m.count = uint32(len(m.extents))
		if err := pool.Ioctl(int(f.Fd()), iocFiemap, unsafe.Pointer(&m)); err != nil {
			if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) {
				err = errors.ErrUnsupported
			}
			return 0, 0, &os.PathError{Op: "fiemap", Path: image, Err: err}
		}
		if m.mapped == 0 {
			break
		}
		for _, e := range m.extents[:m.mapped] {
			if e.flags&extentUnwritten == 0 {
				written += int64(e.length)
			}
			at = e.logical + e.length
		}
		if m.extents[m.mapped-1].flags&extentLast != 0 {
			break
		}
	}
	return min(written, size), size, nil
}
