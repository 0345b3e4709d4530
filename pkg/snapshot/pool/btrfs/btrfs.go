// Package btrfs is the pool in a btrfs: [Pool] in one that an operator has mounted,
// [LoopPool] in one in a file and [DiskPool] in one on a block device, which sandboxd
// makes and mounts.
//
// Each disk is a subvolume with a qgroup, which counts and limits its bytes. A
// snapshot is a read-only subvolume that shares all blocks with its disk.
//
// What surprises: two subvolumes of one btrfs must never be in one overlay. Both
// number their inodes from 256 and overlayfs shows both under one st_dev, so a
// program that knows files by (dev, ino), as gVisor does, opens the wrong file.
// CheckLayers keeps image layers on another file system.
package btrfs

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// Pool is a [pool.Driver] on a btrfs that an operator has mounted on the directory
// of the pool.
//
// There are two ways of counting. Simple quotas, where the kernel has them (Linux 6.7),
// charge a disk with each block that it writes, for as long as anything holds the
// block. So a disk is not charged with the snapshot that it began as, and goes on being
// charged with files that it has deleted while a snapshot of it still has them. Full
// qgroups count what a disk refers to; for that they walk all shared blocks, at each
// commit and each deletion. A file system keeps the way in which it was made.
type Pool struct {
	dir    string
	sysfs  string // /sys/fs/btrfs/<uuid>/qgroups
	full   bool   // full qgroups also where the kernel has simple ones
	simple bool   // which of the two the file system has

	flushing atomic.Bool
}

// New returns the driver. With full, a new file system counts by full qgroups even
// where the kernel has simple quotas.
func New(full bool) *Pool { return &Pool{full: full} }

// Kind is pool.Btrfs.
func (b *Pool) Kind() string { return pool.Btrfs }

// Describe also says how it counts.
func (b *Pool) Describe() string {
	return fmt.Sprintf("%s: %s, %s", pool.Btrfs, b.dir, b.quotas())
}

func (b *Pool) quotas() string {
	if b.simple {
		return "simple quotas"
	}
	return "qgroup limits"
}

// Open fails unless a btrfs is mounted at dir.
func (b *Pool) Open(_ context.Context, dir string) error {
	b.dir = dir
	if mounted, err := tree.IsMountPoint(dir); err != nil || !mounted {
		return errors.Join(err, errs.New(errs.Unsupported, "a pool of kind %q needs a btrfs of its own, and none is mounted there: mount "+
			"one (fstab), name a blank disk in storage.device, or set pool = %q, which creates one in a file", pool.Btrfs, pool.BtrfsLoop))
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return err
	}
	return b.begin()
}

// begin checks the file system at b.dir and turns its quotas on.
func (b *Pool) begin() error {
	var st unix.Statfs_t
	if err := unix.Statfs(b.dir, &st); err != nil {
		return err
	}
	if st.Type != magic {
		return errs.New(errs.Unsupported, "a file system other than btrfs (type %#x) is mounted there: unmount it, or set pool = %q if it "+
			"is an xfs or ext4 with project quotas", st.Type, pool.Project)
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		return errors.New("the pool is read-only; btrfs makes it so after an I/O error: see dmesg, unmount it, run btrfs check on it")
	}
	return tree.WithDir(b.dir, b.quota)
}

// CheckLayers refuses layers on the same file system: see the package's text.
func (b *Pool) CheckLayers(layers string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(layers, &st); err != nil || st.Type != magic {
		return err
	}
	return tree.WithDir(layers, func(fd int) error {
		uuid, err := fsUUID(fd)
		if err == nil && filepath.Join("/sys/fs/btrfs", uuid, "qgroups") == b.sysfs {
			err = errs.New(errs.Unsupported, "%s is on the same btrfs as the pool, and an overlay of two of its subvolumes would mix up "+
				"files: move one of the two to another file system, or set pool = %q", layers, pool.BtrfsLoop)
		}
		return err
	})
}

// Close does nothing: the operator who mounted the pool unmounts it.
func (b *Pool) Close() error { return nil }

// quota turns qgroups on and repairs their count after a power cut.
func (b *Pool) quota(fd int) error {
	if err := enableQuota(fd, !b.full); err != nil {
		return err
	}
	uuid, err := fsUUID(fd)
	if err != nil {
		return err
	}
	b.sysfs = filepath.Join("/sys/fs/btrfs", uuid, "qgroups")
	mode, err := os.ReadFile(filepath.Join(b.sysfs, "mode"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if b.simple = strings.TrimSpace(string(mode)) == "squota"; b.simple {
		return nil // never inconsistent
	}
	v, err := readNumber(filepath.Join(b.sysfs, "inconsistent"))
	if err != nil {
		return err
	}
	if v != 0 {
		return rescanQuota(fd)
	}
	return nil
}

// Create makes a subvolume.
func (b *Pool) Create(path string, bytes int64) error {
	if err := createSubvolume(path); err != nil {
		return err
	}
	if bytes <= 0 {
		return nil
	}
	return b.Limit(path, bytes)
}

// Limit limits the qgroup of a subvolume, metadata included.
func (b *Pool) Limit(path string, bytes int64) error {
	return tree.WithDir(path, func(fd int) error { return limitSubvolume(fd, bytes) })
}

// flushPatience is how long a flush may delay a snapshot.
const flushPatience = 2 * time.Second

// Flush syncs the file system. Without it Freeze works too, but takes longer. The
// writes of another disk whose I/O is limited may take hours, so Flush gives up waiting
// after flushPatience, and returns at once while an earlier one still goes on.
func (b *Pool) Flush(ctx context.Context) error {
	if !b.flushing.CompareAndSwap(false, true) {
		return nil
	}
	done := make(chan error, 1)
	go func() {
		defer b.flushing.Store(false)
		done <- tree.WithDir(b.dir, unix.Syncfs)
	}()
	late := time.NewTimer(flushPatience)
	defer late.Stop()
	select {
	case err := <-done:
		return err
	case <-late.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Freeze makes a read-only subvolume, which is on disk when it returns.
func (b *Pool) Freeze(_ context.Context, from, to string) error {
	if err := b.room(); err != nil {
		return err
	}
	return copySubvolume(from, to, true)
}

// room keeps snapshots off the last sixtieth of the pool. If snapshots took that space,
// deleting them would not free it: the kernel's cleaner needs room too. (Measured on
// 6.18: with 596 snapshots of one subvolume on a file system that was full before,
// nothing was free minutes after all were destroyed.)
func (b *Pool) room() error {
	var st unix.Statfs_t
	if err := unix.Statfs(b.dir, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: b.dir, Err: err}
	}
	if need := st.Blocks / 60; st.Bavail < need {
		return fmt.Errorf("%d MiB of the pool are free, and snapshots must leave %d MiB free: %w", int64(st.Bavail)*st.Bsize>>20,
			int64(need)*st.Bsize>>20, unix.ENOSPC)
	}
	return nil
}

// Settle does nothing: Freeze has committed.
func (b *Pool) Settle(context.Context) error { return nil }

// Sync makes a snapshot for a moment: the kernel writes out what the disk has, and commits. The
// writes of other disks, which may take hours, do not delay it as they do [Pool.Flush].
func (b *Pool) Sync(ctx context.Context, path string) error {
	moment := filepath.Join(b.dir, pool.TrashDir, filepath.Base(path)+"-sync-"+rand.Text()) // a dead daemon's goes with the trash
	done := make(chan error, 1)
	go func() { // the kernel is not to be interrupted
		done <- errors.Join(b.Freeze(context.WithoutCancel(ctx), path, moment), b.Destroy(moment))
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Branch makes a subvolume that shares all blocks with a snapshot.
func (b *Pool) Branch(_ context.Context, from, to string, bytes int64) error {
	if err := b.room(); err != nil {
		return err
	}
	if err := copySubvolume(from, to, false); err != nil {
		return err
	}
	return tree.WithDir(to, func(fd int) error { return limitSubvolume(fd, bytes) })
}

// Unfreeze makes a subvolume writable: a read-only one cannot be renamed.
func (b *Pool) Unfreeze(path string) error { return unlockSubvolume(path) }

// Destroy unlinks a subvolume. The kernel frees its space in the background.
func (b *Pool) Destroy(path string) error {
	if err := destroySubvolume(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Usage reads the kernel's counters, which are in memory: of what is on disk and of
// what is reserved for writes that are not.
func (b *Pool) Usage(path string) (used, limit int64, err error) {
	var dir string
	if err := tree.WithDir(path, func(fd int) error {
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

// Sweep removes qgroups whose subvolume is gone, which kernels before 6.10 keep. It
// lists the qgroups before the subvolumes: in the other order a disk made in between
// would lose its limit.
func (b *Pool) Sweep(ctx context.Context) error {
	qgroups, err := os.ReadDir(b.sysfs)
	if err != nil {
		return err
	}
	disks, err := pool.Disks(b.dir)
	if err != nil {
		return err
	}
	alive := map[uint64]bool{}
	for _, dir := range disks {
		err := tree.WithDir(dir, func(fd int) error {
			id, err := subvolumeID(fd)
			alive[id] = true
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return tree.WithDir(b.dir, func(fd int) error {
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
