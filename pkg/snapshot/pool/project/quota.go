package project

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// From include/uapi/linux/quota.h, dqblk_xfs.h and fs.h. The quotactl(2) of a
// descriptor needs no device, which overlays and idmapped mounts hide.
const (
	projectQuota     = 2        // PRJQUOTA
	cmdGetQuota      = 0x800007 // Q_GETQUOTA
	cmdSetQuota      = 0x800008 // Q_SETQUOTA
	cmdGetState      = 0x5808   // Q_XGETQSTATV
	projectsEnforced = 1 << 5   // FS_QUOTA_PDQ_ENFD
	validLimits      = 1 | 4    // QIF_BLIMITS | QIF_ILIMITS
	quotaBlock       = 1 << 10  // QIF_DQBLKSIZE

	iocGetXattr    = 0x801c581f // FS_IOC_FSGETXATTR
	iocSetXattr    = 0x401c5820 // FS_IOC_FSSETXATTR
	projectInherit = 0x200      // FS_XFLAG_PROJINHERIT
)

// quota is what a project has and may have, in bytes and files; a limit of 0 is none.
type quota struct{ used, limit, files, maxFiles int64 }

type ifDqblk struct { // struct if_dqblk
	blockHard, blockSoft, space, inodeHard, inodeSoft, inodes, blockTime, inodeTime uint64
	valid                                                                           uint32
}

type quotaStat struct { // struct fs_quota_statv
	version int8
	_       uint8
	flags   uint16
	_       [252]byte
}

type fsxattr struct { // struct fsxattr
	xflags, extentSize, extents, project, cowExtentSize uint32
	_                                                   [8]byte
}

func quotactl(fd int, cmd uintptr, id uint32, arg unsafe.Pointer) error {
	_, _, e := unix.Syscall6(unix.SYS_QUOTACTL_FD, uintptr(fd), cmd<<8|projectQuota, uintptr(id), uintptr(arg), 0, 0)
	runtime.KeepAlive(arg)
	if e != 0 {
		return e
	}
	return nil
}

// Check fails with errs.Unsupported, and with what to do, unless the file system of
// dir limits projects.
func Check(dir string) error {
	st := quotaStat{version: 1} // FS_QSTATV_VERSION1
	err := tree.WithDir(dir, func(fd int) error { return quotactl(fd, cmdGetState, 0, unsafe.Pointer(&st)) })
	if err == nil && st.flags&projectsEnforced != 0 {
		return nil
	}
	if err == nil {
		err = errors.New("project quotas are not enforced")
	}
	return errs.Wrap(err, errs.Unsupported, "a pool of kind %q needs an xfs or ext4 with project quotas: mount it with -o prjquota (an "+
		"ext4 after `tune2fs -O project,quota -Q prjquota DEVICE`; a root file system of xfs with rootflags=prjquota), or set pool = "+
		"%q", pool.Project, pool.BtrfsLoop)
}

func getQuota(fd int, id uint32) (quota, error) {
	var d ifDqblk
	if err := quotactl(fd, cmdGetQuota, id, unsafe.Pointer(&d)); err != nil && !errors.Is(err, unix.ENOENT) { // xfs knows only ids in use
		return quota{}, fmt.Errorf("read the quota of project %d: %w", id, err)
	}
	return quota{int64(d.space), int64(d.blockHard) * quotaBlock, int64(d.inodes), int64(d.inodeHard)}, nil
}

func setQuota(fd int, id uint32, q quota) error {
	d := ifDqblk{blockHard: uint64(q.limit+quotaBlock-1) / quotaBlock, inodeHard: uint64(q.maxFiles), valid: validLimits}
	if err := quotactl(fd, cmdSetQuota, id, unsafe.Pointer(&d)); err != nil {
		return fmt.Errorf("limit project %d to %d bytes and %d files: %w", id, q.limit, q.maxFiles, err)
	}
	return nil
}

// projectOf returns the project of a directory, 0 for none.
func projectOf(fd int) (uint32, error) {
	var a fsxattr
	if err := pool.Ioctl(fd, iocGetXattr, unsafe.Pointer(&a)); err != nil {
		return 0, fmt.Errorf("read the project of a directory: %w", err)
	}
	return a.project, nil
}

// setProject gives an empty directory, and what will be made in it, to a project.
func setProject(fd int, id uint32) error {
	var a fsxattr
	if err := pool.Ioctl(fd, iocGetXattr, unsafe.Pointer(&a)); err != nil {
		return fmt.Errorf("read the attributes of a directory: %w", err)
	}
	a.project, a.xflags = id, a.xflags|projectInherit
	if err := pool.Ioctl(fd, iocSetXattr, unsafe.Pointer(&a)); err != nil {
		return fmt.Errorf("assign a directory to project %d: %w", id, err)
	}
	return nil
}
