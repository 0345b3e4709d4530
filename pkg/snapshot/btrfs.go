package snapshot

import (
	"context"
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
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// btrfs is a pool in a btrfs that somebody mounted on it: one subvolume with a
// qgroup for each disk.
//
// Two ways of counting. Simple quotas, where the kernel has them (Linux 6.7):
// who writes a block is charged with it for as long as anything holds it, so a
// disk is not charged with the snapshot it began as, and goes on being charged
// with what it deleted and a snapshot of it still holds. Full qgroups count
// what a disk refers to; they have to walk all that is shared for it, at each
// commit and each deletion. A file system keeps the way it began with.
type btrfs struct {
	dir    string
	sysfs  string // /sys/fs/btrfs/<uuid>/qgroups
	full   bool   // full qgroups also where the kernel has simple ones
	simple bool

	flushing atomic.Bool
}

func (b *btrfs) kind() string { return PoolBtrfs }

func (b *btrfs) describe() string {
	return fmt.Sprintf("%s: %s, %s", PoolBtrfs, b.dir, b.quotas())
}

func (b *btrfs) quotas() string {
	if b.simple {
		return "simple quotas"
	}
	return "qgroup limits"
}

func (b *btrfs) open(_ context.Context, dir string) error {
	b.dir = dir
	if mounted, err := tree.IsMountPoint(dir); err != nil || !mounted {
		return errors.Join(err, errs.New(errs.Unsupported, "a pool of kind %q is a btrfs of its own, and none is mounted there: mount "+
			"one (fstab), or set pool = %q, which makes one in a file", PoolBtrfs, PoolBtrfsLoop))
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return err
	}
	return b.begin()
}

// begin takes the file system at b.dir into use.
func (b *btrfs) begin() error {
	var st unix.Statfs_t
	if err := unix.Statfs(b.dir, &st); err != nil {
		return err
	}
	if st.Type != btrfsMagic {
		return errs.New(errs.Unsupported, "a file system that is no btrfs (type %#x) is mounted there: unmount it, or set pool = %q if "+
			"it is an xfs or ext4 with project quotas", st.Type, PoolProject)
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		return errors.New("the pool is read-only, as btrfs makes it after an I/O error: see dmesg, unmount it, run btrfs check on it")
	}
	return tree.WithDir(b.dir, b.quota)
}

// apart refuses layers on the same file system: see the package's text.
func (b *btrfs) apart(layers string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(layers, &st); err != nil || st.Type != btrfsMagic {
		return err
	}
	return tree.WithDir(layers, func(fd int) error {
		uuid, err := fsUUID(fd)
		if err == nil && filepath.Join("/sys/fs/btrfs", uuid, "qgroups") == b.sysfs {
			err = errs.New(errs.Unsupported, "%s is on the same btrfs as the pool, and an overlay of two of its subvolumes would mix up "+
				"files: mount another file system on one of the two, or set pool = %q", layers, PoolBtrfsLoop)
		}
		return err
	})
}

func (b *btrfs) close() error { return nil } // who mounted it unmounts it

// quota turns qgroups on and mends their count after a power cut.
func (b *btrfs) quota(fd int) error {
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

func (b *btrfs) create(path string, bytes int64) error {
	if err := createSubvolume(path); err != nil {
		return err
	}
	if bytes <= 0 {
		return nil
	}
	return b.limit(path, bytes)
}

func (b *btrfs) limit(path string, bytes int64) error {
	return tree.WithDir(path, func(fd int) error { return limitSubvolume(fd, bytes) })
}

// flushPatience is how long a flush may hold up a snapshot.
const flushPatience = 2 * time.Second

// flush is there to make freeze short, which works without. The writes of a
// neighbour whose I/O is limited may take hours; so it waits for that long, and
// while one goes on the next does not begin another.
func (b *btrfs) flush(ctx context.Context) error {
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

func (b *btrfs) freeze(_ context.Context, from, to string) error {
	if err := b.room(); err != nil {
		return err
	}
	return snapshotSubvolume(from, to, true)
}

// room keeps snapshots off the last sixtieth of the pool. What they take of
// it is not given back by deleting them: the kernel's cleaner needs room, too.
// (Measured on 6.18: with 596 snapshots of one subvolume on a file system that
// was full before, nothing was free minutes after all were destroyed.)
func (b *btrfs) room() error {
	var st unix.Statfs_t
	if err := unix.Statfs(b.dir, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: b.dir, Err: err}
	}
	if need := st.Blocks / 60; st.Bavail < need {
		return fmt.Errorf("%d MiB are left of the pool, and the last %d are not for snapshots: %w",
			int64(st.Bavail)*st.Bsize>>20, int64(need)*st.Bsize>>20, unix.ENOSPC)
	}
	return nil
}

func (b *btrfs) settle(context.Context) error { return nil } // freeze commits

func (b *btrfs) branch(_ context.Context, from, to string, bytes int64) error {
	if err := b.room(); err != nil {
		return err
	}
	if err := snapshotSubvolume(from, to, false); err != nil {
		return err
	}
	return tree.WithDir(to, func(fd int) error { return limitSubvolume(fd, bytes) })
}

func (b *btrfs) unfreeze(path string) error { return unlockSubvolume(path) }

func (b *btrfs) destroy(path string) error {
	if err := destroySubvolume(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// usage reads what the kernel holds in memory: what is on disk and what is
// reserved for writes on their way.
func (b *btrfs) usage(path string) (used, limit int64, err error) {
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

// sweep removes qgroups whose subvolume is gone, which kernels before 6.10 keep.
// The list of qgroups is read before that of subvolumes: in the other order a
// disk born in between would lose its limit.
func (b *btrfs) sweep(ctx context.Context) error {
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
