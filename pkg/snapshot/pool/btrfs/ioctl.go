package btrfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"unsafe"

	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// The part of include/uapi/linux/btrfs.h that is used. The numbers are _IOW,
// _IOR and _IOWR of magic 0x94 and the sizes of the structures below.
const (
	iocSubvolCreate = 0x5000940e // _IOW(0x94, 14, struct btrfs_ioctl_vol_args)
	iocSnapDestroy  = 0x5000940f // _IOW(0x94, 15, struct btrfs_ioctl_vol_args)
	iocWaitSync     = 0x40089416 // _IOW(0x94, 22, __u64)
	iocSnapCreate   = 0x50009417 // _IOW(0x94, 23, struct btrfs_ioctl_vol_args_v2)
	iocStartSync    = 0x80089418 // _IOR(0x94, 24, __u64)
	iocSetFlags     = 0x4008941a // _IOW(0x94, 26, __u64)
	iocInoLookup    = 0xd0009412 // _IOWR(0x94, 18, struct btrfs_ioctl_ino_lookup_args)
	iocFsInfo       = 0x8400941f // _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)
	iocQuotaCtl     = 0xc0109428 // _IOWR(0x94, 40, struct btrfs_ioctl_quota_ctl_args)
	iocQgroupCreate = 0x4010942a // _IOW(0x94, 42, struct btrfs_ioctl_qgroup_create_args)
	iocQgroupLimit  = 0x8030942b // _IOR(0x94, 43, struct btrfs_ioctl_qgroup_limit_args)
	iocQuotaRescan  = 0x4040942c // _IOW(0x94, 44, struct btrfs_ioctl_quota_rescan_args)
	iocRescanWait   = 0x0000942e // _IO(0x94, 46)

	subvolReadOnly     = 2        // BTRFS_SUBVOL_RDONLY
	quotaEnable        = 1        // BTRFS_QUOTA_CTL_ENABLE
	quotaEnableSimple  = 4        // BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA
	limitMaxReferenced = 1        // BTRFS_QGROUP_LIMIT_MAX_RFER
	firstFreeObject    = 256      // BTRFS_FIRST_FREE_OBJECTID: inode of the root of a subvolume
	nocowFlag          = 0x800000 // FS_NOCOW_FL
	magic              = unix.BTRFS_SUPER_MAGIC
)

type volArgs struct {
	fd   int64
	name [4088]byte
}

type volArgsV2 struct {
	fd, transID int64
	flags       uint64
	_           [4]uint64
	name        [4040]byte
}

type inoLookupArgs struct {
	treeID, objectID uint64
	name             [4080]byte
}

type quotaCtlArgs struct{ cmd, status uint64 }

type qgroupCreateArgs struct{ create, qgroupID uint64 }

type qgroupLimitArgs struct {
	qgroupID                                  uint64 // 0: that of the subvolume the descriptor is in
	flags, maxRfer, maxExcl, rsvRfer, rsvExcl uint64
}

type fsInfoArgs struct {
	maxID, numDevices uint64
	fsID              [16]byte
	_                 [1024 - 32]byte
}

// copySubvolume makes to a subvolume that shares all blocks with from (btrfs calls
// it a snapshot, read-only or not). It is on disk when this returns. The limits of
// the qgroup are copied too.
func copySubvolume(from, to string, readOnly bool) error {
	return tree.WithDir(from, func(src int) error {
		return tree.WithDir(filepath.Dir(to), func(fd int) error {
			a := volArgsV2{fd: int64(src)}
			if readOnly {
				a.flags = subvolReadOnly
			}
			copy(a.name[:len(a.name)-1], filepath.Base(to))
			if err := pool.Ioctl(fd, iocSnapCreate, unsafe.Pointer(&a)); err != nil {
				return &os.PathError{Op: "snapshot subvolume", Path: to, Err: err}
			}
			return nil
		})
	})
}

// unlockSubvolume makes a read-only subvolume writable; absent is fs.ErrNotExist.
func unlockSubvolume(path string) error {
	return tree.WithDir(path, func(fd int) error {
		var flags uint64
		if err := pool.Ioctl(fd, iocSetFlags, unsafe.Pointer(&flags)); err != nil {
			return &os.PathError{Op: "make subvolume writable", Path: path, Err: err}
		}
		return nil
	})
}

// onEntry runs one of the ioctls that name an entry of a directory.
func onEntry(path string, req uintptr, what string) error {
	return tree.WithDir(filepath.Dir(path), func(fd int) error {
		var a volArgs
		if copy(a.name[:len(a.name)-1], filepath.Base(path)) < len(filepath.Base(path)) {
			return &os.PathError{Op: what, Path: path, Err: unix.ENAMETOOLONG}
		}
		if err := pool.Ioctl(fd, req, unsafe.Pointer(&a)); err != nil {
			return &os.PathError{Op: what, Path: path, Err: err}
		}
		return nil
	})
}

func createSubvolume(path string) error {
	return onEntry(path, iocSubvolCreate, "create subvolume")
}

// destroySubvolume unlinks a subvolume with everything in it. The cleaner of the file
// system frees the space later.
func destroySubvolume(path string) error {
	return onEntry(path, iocSnapDestroy, "destroy subvolume")
}

// subvolumeID returns the id of the subvolume of fd; its qgroup is 0/id.
func subvolumeID(fd int) (uint64, error) {
	a := inoLookupArgs{objectID: firstFreeObject}
	if err := pool.Ioctl(fd, iocInoLookup, unsafe.Pointer(&a)); err != nil {
		return 0, fmt.Errorf("look up subvolume id: %w", err)
	}
	return a.treeID, nil
}

// limitSubvolume limits what the subvolume of fd may refer to, metadata
// included; 0 takes the limit away.
func limitSubvolume(fd int, bytes int64) error {
	a := qgroupLimitArgs{flags: limitMaxReferenced, maxRfer: uint64(bytes)}
	if bytes <= 0 {
		a.maxRfer = ^uint64(0)
	}
	if err := pool.Ioctl(fd, iocQgroupLimit, unsafe.Pointer(&a)); err != nil {
		return fmt.Errorf("limit qgroup to %d bytes: %w", bytes, err)
	}
	return nil
}

// enableQuota turns qgroups on: simple ones if simple is set and the kernel has them.
// It is no error if qgroups of either kind are on.
func enableQuota(fd int, simple bool) error {
	a := quotaCtlArgs{cmd: quotaEnable}
	if simple {
		a.cmd = quotaEnableSimple
	}
	err := pool.Ioctl(fd, iocQuotaCtl, unsafe.Pointer(&a))
	if simple && errors.Is(err, unix.EINVAL) {
		return enableQuota(fd, false)
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("enable quota: %w", err)
	}
	return nil
}

// rescanQuota counts anew and waits for it.
func rescanQuota(fd int) error {
	var a [64]byte
	if err := pool.Ioctl(fd, iocQuotaRescan, unsafe.Pointer(&a)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return fmt.Errorf("rescan quota: %w", err)
	}
	if err := pool.Ioctl(fd, iocRescanWait, nil); err != nil {
		return fmt.Errorf("wait for quota rescan: %w", err)
	}
	return nil
}

// removeQgroup forgets the qgroup 0/id of a subvolume that is gone.
func removeQgroup(fd int, id uint64) error {
	a := qgroupCreateArgs{create: 0, qgroupID: id}
	return pool.Ioctl(fd, iocQgroupCreate, unsafe.Pointer(&a))
}

// fsUUID is the name of the file system below /sys/fs/btrfs.
func fsUUID(fd int) (string, error) {
	var a fsInfoArgs
	if err := pool.Ioctl(fd, iocFsInfo, unsafe.Pointer(&a)); err != nil {
		return "", fmt.Errorf("read file system info: %w", err)
	}
	u := a.fsID
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16]), nil
}
