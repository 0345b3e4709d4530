package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// Disks are the files that sandboxes write, one disk each.
type Disks struct{ pool *Pool }

// diskDir is the directory of a disk, whether it is there or not.
func (p *Pool) diskDir(id string) (string, error) {
	if !record.IsID(id) {
		return "", fmt.Errorf("disk %q: not an id", id)
	}
	return filepath.Join(p.dir, id), nil
}

// CreateDisk makes a disk that holds at most bytes, metadata included; 0 is no limit.
// It is empty, or begins with the files of a snapshot, which it does not need
// afterwards. CreateDisk fails with fs.ErrExist if the disk exists, with errs.NotFound
// if the snapshot does not, with errs.Exhausted if the pool is full, and with
// errs.Unsupported if the pool cannot limit.
func (d *Disks) CreateDisk(ctx context.Context, id, snapshot string, bytes int64) error {
	dir, err := d.pool.diskDir(id)
	if err != nil {
		return err
	}
	if weak.Off(weak.Disk) {
		bytes = 0
	}
	if snapshot != "" {
		return d.branch(ctx, snapshot, id, dir, bytes)
	}
	if err := d.pool.driver.Create(dir, bytes); err != nil {
		return createFailed(id, err)
	}
	// Guest root owns the root directory that it will see.
	err = unix.Mkdir(filepath.Join(dir, "u"), 0o755)
	if err == nil {
		err = unix.Mkdir(filepath.Join(dir, "w"), 0o700)
	}
	if err != nil {
		return createFailed(id, errors.Join(err, d.pool.driver.Destroy(dir)))
	}
	return nil
}

// branch makes the disk of id, at dir, from a snapshot.
func (d *Disks) branch(ctx context.Context, snap, id, dir string, bytes int64) error {
	from, err := d.pool.snapshotDir(snap)
	if err != nil {
		return err
	}
	if err := d.pool.driver.Branch(ctx, from, dir, bytes); err != nil {
		if !errors.Is(err, fs.ErrExist) {
			err = errors.Join(err, d.pool.driver.Destroy(dir))
		}
		if errors.Is(err, fs.ErrNotExist) {
			return errs.Wrap(err, errs.NotFound, "the files of snapshot %s are not on the storage pool any more", snap)
		}
		return createFailed(id, err)
	}
	// The overlay starts afresh. The marks that it left in its work directory say
	// nothing about the files, which were on disk when the snapshot was taken.
	err = tree.Remove(filepath.Join(dir, "w"))
	if err == nil {
		err = unix.Mkdir(filepath.Join(dir, "w"), 0o700)
	}
	if rerr := unix.Lremovexattr(dir, bootAttr); rerr != nil && !errors.Is(rerr, unix.ENODATA) {
		err = errors.Join(err, &os.PathError{Op: "removexattr", Path: dir, Err: rerr})
	}
	if err != nil {
		return createFailed(id, errors.Join(err, d.pool.driver.Destroy(dir)))
	}
	return nil
}

// LimitDisk lets the disk of id hold at most bytes, metadata included. If it holds
// more already, nothing more can be written. It fails with errs.Unsupported if the
// pool cannot limit.
func (d *Disks) LimitDisk(_ context.Context, id string, bytes int64) error {
	dir, err := d.pool.diskDir(id)
	if err != nil {
		return err
	}
	if _, now, err := d.pool.driver.Usage(dir); err == nil && now == bytes {
		return nil // the sweep calls this every minute, and a write would wake the disk
	}
	if err := d.pool.driver.Limit(dir, bytes); err != nil {
		return fmt.Errorf("limit disk %s: %w", id, err)
	}
	return nil
}

func createFailed(id string, err error) error {
	return poolFull(fmt.Errorf("create disk %s: %w", id, err))
}

// DeleteDisk removes the disk of id; absent is fine. It is renamed away and
// destroyed in the background: dropping what is dirty in the page cache takes
// 3 ms for 20 MB. The space comes back soon after.
func (d *Disks) DeleteDisk(_ context.Context, id string) error {
	dir, err := d.pool.diskDir(id)
	if err != nil {
		return err
	}
	if err := d.pool.destroyLater(dir, os.Rename(dir, d.pool.trashPath(id))); err != nil {
		return fmt.Errorf("delete disk %s: %w", id, err)
	}
	return nil
}

// ListDisks returns the ids that have a disk. It fails when the pool is not there: a
// pool that somebody has unmounted has not lost its disks.
func (d *Disks) ListDisks(context.Context) ([]string, error) {
	if id, err := os.ReadFile(filepath.Join(d.pool.dir, pool.IDFile)); err != nil || strings.TrimSpace(string(id)) != d.pool.id {
		return nil, fmt.Errorf("list disks: the storage pool is no longer at %s; if it was unmounted, restart sandboxd, which mounts it "+
			"again", d.pool.dir)
	}
	ids, err := d.pool.ids(record.IsID)
	if err != nil {
		return nil, fmt.Errorf("list disks: %w", err)
	}
	return ids, nil
}

// MoveStray puts the disk of id into lost+found, from where Sweep removes it
// after 24 h. Absent is fine.
func (d *Disks) MoveStray(_ context.Context, id string) error {
	dir, err := d.pool.diskDir(id)
	if err != nil {
		return err
	}
	if err := os.Rename(dir, d.pool.lostPath(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("move stray disk %s: %w", id, err)
	}
	return nil
}

// Usage returns the bytes that a disk is charged with, including writes that are still
// in memory, and its limit, 0 for none. It fails with errs.Unsupported on a plain
// pool, with fs.ErrNotExist without a disk.
func (d *Disks) Usage(id string) (used, limit int64, err error) {
	dir, err := d.pool.diskDir(id)
	if err != nil {
		return 0, 0, err
	}
	used, limit, err = d.pool.driver.Usage(dir)
	if err != nil {
		return 0, 0, fmt.Errorf("usage of disk %s: %w", id, err)
	}
	if limit > 0 {
		used = min(used, limit) // for a moment the kernel may reserve more than the limit
	}
	return used, limit, nil
}
