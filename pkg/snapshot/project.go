package snapshot

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"unsafe"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// project is a pool on an xfs or ext4 that enforces project quotas: the files
// of each disk carry a project id of their own, which has a limit of bytes and
// of files. Guests can not change it: in their user namespace the kernel
// refuses, and gVisor passes no such ioctl on.
//
// Snapshots are copies, on xfs of references to blocks.
type project struct {
	plain
	mu sync.Mutex // held from the choice of a project id until it has a limit
}

// Every disk may have minFiles files, and one for each bytesPerFile of its limit.
const (
	bytesPerFile = 8 << 10
	minFiles     = 1 << 16
)

func (p *project) kind() string { return PoolProject }

func (p *project) describe() string {
	return fmt.Sprintf("%s: %s, project quotas of bytes and files", PoolProject, p.dir)
}

func (p *project) open(_ context.Context, dir string) error {
	p.dir = dir
	if _, err := os.Stat(p.image); err == nil {
		return errs.New(errs.WrongState, "the state directory holds a pool of kind %q: set pool = %q, or remove %s and the sandboxes on "+
			"it", PoolBtrfsLoop, PoolBtrfsLoop, p.image)
	}
	if err := EnforcesProjects(dir); err != nil {
		return err
	}
	return os.Chmod(dir, 0o700)
}

func (p *project) create(path string, bytes int64) error {
	if err := p.make(path); err != nil {
		return err
	}
	return p.limit(path, bytes)
}

// make makes a directory with a project id that nothing else has.
func (p *project) make(path string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	return tree.WithDir(path, func(fd int) error {
		for {
			id := 1<<20 + rand.Uint32N(1<<30) // low ones are people's
			q, err := getQuota(fd, id)
			if err != nil {
				return err
			}
			if q.used > 0 || q.files > 0 || q.limit > 0 || q.maxFiles > 0 {
				continue
			}
			return setProject(fd, id) // from here on the directory itself is a file of it
		}
	})
}

func (p *project) limit(path string, bytes int64) error {
	return tree.WithDir(path, func(fd int) error {
		id, err := projectOf(fd)
		if err != nil {
			return err
		}
		q := quota{limit: bytes}
		if bytes > 0 {
			q.maxFiles = minFiles + bytes/bytesPerFile
		}
		return setQuota(fd, id, q)
	})
}

func (p *project) branch(ctx context.Context, from, to string, bytes int64) error {
	if err := p.make(to); err != nil {
		return err
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := p.copy(ctx, filepath.Join(from, e.Name()), filepath.Join(to, e.Name())); err != nil {
			return err
		}
	}
	// Last: a limit below what a snapshot holds means that nothing more can be written.
	return p.limit(to, bytes)
}

// destroy forgets the limit first: killed in between, what is left is a
// directory that will be destroyed again, and no quota of nobody.
func (p *project) destroy(path string) error {
	if there, err := tree.Exists(path); err != nil || !there {
		return err
	}
	err := tree.WithDir(path, func(fd int) error {
		id, err := projectOf(fd)
		if err != nil || id == 0 { // snapshots belong to no project
			return err
		}
		return setQuota(fd, id, quota{})
	})
	return errors.Join(err, tree.Remove(path))
}

// usage of a snapshot, which has no project, is not counted.
func (p *project) usage(path string) (used, limit int64, err error) {
	err = tree.WithDir(path, func(fd int) error {
		id, err := projectOf(fd)
		if err != nil {
			return err
		}
		if id == 0 {
			return errs.New(errs.Unsupported, "%s belongs to no project, as snapshots do on this pool: nothing counts it", path)
		}
		q, err := getQuota(fd, id)
		used, limit = q.used, q.limit
		if q.maxFiles > 0 && q.files >= q.maxFiles {
			used = max(used, limit) // full, of files
		}
		return err
	})
	return used, limit, err
}

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

// quota is what a project has and may have, in bytes and files; limits of 0
// are none.
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

// EnforcesProjects fails with what to do unless the file system of dir limits
// projects.
func EnforcesProjects(dir string) error {
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
		"%q", PoolProject, PoolBtrfsLoop)
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
	if err := ioctl(fd, iocGetXattr, unsafe.Pointer(&a)); err != nil {
		return 0, fmt.Errorf("read the project of a directory: %w", err)
	}
	return a.project, nil
}

// setProject gives an empty directory, and what will be made in it, to a project.
func setProject(fd int, id uint32) error {
	var a fsxattr
	if err := ioctl(fd, iocGetXattr, unsafe.Pointer(&a)); err != nil {
		return fmt.Errorf("read the attributes of a directory: %w", err)
	}
	a.project, a.xflags = id, a.xflags|projectInherit
	if err := ioctl(fd, iocSetXattr, unsafe.Pointer(&a)); err != nil {
		return fmt.Errorf("give a directory to project %d: %w", id, err)
	}
	return nil
}
