package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/layer"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
)

// Snapshots are frozen disks: copies, each of one disk at one moment, that nobody
// changes. A disk that was made from a snapshot does not need it afterwards.
type Snapshots struct {
	pool  *Pool
	whole known
}

// snapshotDir is the directory of a snapshot, whether it is there or not.
func (p *Pool) snapshotDir(snap string) (string, error) {
	if !record.IsSnapshotID(snap) {
		return "", fmt.Errorf("snapshot %q: not an id", snap)
	}
	return filepath.Join(p.dir, snap), nil
}

// PrepareSnapshot writes out data that is only in memory, so that TakeSnapshot need not
// do so while the guest is frozen.
func (s *Snapshots) PrepareSnapshot(ctx context.Context) error {
	if err := s.pool.driver.Flush(ctx); err != nil {
		return fmt.Errorf("sync storage pool: %w", err)
	}
	return nil
}

// TakeSnapshot freezes the disk of id, which must not change meanwhile: this takes a
// moment on btrfs, and as long as copying on other pools. It fails with
// errs.Exhausted if the pool is full, and with errs.WrongState if the disk was in use
// without syncing when the host went down. DeleteSnapshot removes what a failed one
// leaves.
func (s *Snapshots) TakeSnapshot(ctx context.Context, snap, id string) error {
	to, err := s.pool.snapshotDir(snap)
	if err != nil {
		return err
	}
	from, err := s.pool.diskDir(id)
	if err != nil {
		return err
	}
	if _, err = volatileMark(from); err == nil {
		err = s.pool.driver.Freeze(ctx, from, to)
	}
	if err != nil {
		return poolFull(fmt.Errorf("take snapshot %s of disk %s: %w", snap, id, err))
	}
	return nil
}

// FinishSnapshot makes a snapshot survive a crash of the host. It returns the bytes
// that its source, the disk of id, is charged with; 0 if the pool does not count.
func (s *Snapshots) FinishSnapshot(ctx context.Context, snap, id string) (bytes int64, err error) {
	dir, err := s.pool.diskDir(id)
	if err != nil {
		return 0, err
	}
	if err = s.pool.driver.Settle(ctx); err == nil {
		bytes, _, err = s.pool.driver.Usage(dir)
	}
	if err != nil && !errs.Is(err, errs.Unsupported) {
		return 0, fmt.Errorf("finish snapshot %s: %w", snap, err)
	}
	return bytes, nil
}

// SyncDisk makes the disk of id, which must not change meanwhile, survive a crash of the host, also
// while it is mounted volatile. See [Mounts.Keep].
func (s *Snapshots) SyncDisk(ctx context.Context, id string) error {
	disk, err := s.pool.diskDir(id)
	if err != nil {
		return err
	}
	if err := s.pool.driver.Sync(ctx, disk); err != nil {
		return poolFull(fmt.Errorf("sync disk %s: %w", id, err))
	}
	return nil
}

// PackSnapshot writes the files of a snapshot, without the layers below them, as the tar of
// a layer. See layer.Pack.
func (s *Snapshots) PackSnapshot(ctx context.Context, snap string, hide func(path string) bool, w io.Writer) error {
	dir, err := s.pool.snapshotDir(snap)
	if err != nil {
		return err
	}
	if err := layer.Pack(ctx, filepath.Join(dir, "u"), hide, w); err != nil {
		return fmt.Errorf("pack snapshot %s: %w", snap, err)
	}
	return nil
}

// Upper is the directory with the files of a snapshot, whether it is there or not.
func (s *Snapshots) Upper(snap string) (string, error) {
	dir, err := s.pool.snapshotDir(snap)
	return filepath.Join(dir, "u"), err
}

// RestoreSnapshot makes a snapshot with the files that fill puts into a directory. It fails with
// fs.ErrExist if the snapshot is there.
func (s *Snapshots) RestoreSnapshot(ctx context.Context, snap string, fill func(dir string) error) error {
	to, err := s.pool.snapshotDir(snap)
	if err != nil {
		return err
	}
	if there, err := tree.Exists(to); err != nil || there {
		return errors.Join(err, fs.ErrExist)
	}
	disk, err := s.pool.backupPath(snap)
	if err == nil {
		err = s.pool.driver.Create(disk, 0)
	}
	if err != nil {
		return err
	}
	upper := filepath.Join(disk, "u")
	err = errors.Join(os.Mkdir(upper, 0o700), os.Mkdir(filepath.Join(disk, "w"), 0o700))
	if err == nil {
		err = fill(upper)
	}
	if err == nil {
		err = s.freezeRestored(ctx, disk, to)
	}
	return errors.Join(poolFull(err), s.pool.driver.Destroy(disk))
}

// freezeRestored makes a snapshot of a disk: at to it is whole or not there.
func (s *Snapshots) freezeRestored(ctx context.Context, disk, to string) error {
	if s.pool.freezes() {
		return s.pool.driver.Freeze(ctx, disk, to)
	}
	half, err := s.pool.backupPath(filepath.Base(to) + "-copy")
	if err == nil {
		err = s.pool.driver.Freeze(ctx, disk, half)
	}
	if err == nil {
		err = s.pool.driver.Settle(ctx)
	}
	if err == nil {
		err = os.Rename(half, to)
	}
	return errors.Join(err, s.pool.driver.Destroy(half))
}

// DeleteSnapshot removes a snapshot, and its memory image, also half of one; absent is fine.
// The space comes back soon after.
func (s *Snapshots) DeleteSnapshot(ctx context.Context, snap string) error {
	dir, err := s.pool.snapshotDir(snap)
	if err != nil {
		return err
	}
	err = errors.Join(s.DeleteMemory(ctx, snap), s.pool.destroyLater(dir, s.move(dir, s.pool.trashPath(snap))))
	if err != nil {
		return fmt.Errorf("delete snapshot %s: %w", snap, err)
	}
	return nil
}

// MoveStraySnapshot is MoveStray for a snapshot. Its memory image is removed: without the
// record nobody can restore it.
func (s *Snapshots) MoveStraySnapshot(ctx context.Context, snap string) error {
	dir, err := s.pool.snapshotDir(snap)
	if err != nil {
		return err
	}
	if err := errors.Join(s.DeleteMemory(ctx, snap), s.move(dir, s.pool.lostPath(snap))); err != nil {
		return fmt.Errorf("move stray snapshot %s: %w", snap, err)
	}
	return nil
}

// move renames a snapshot; absent is fine.
func (s *Snapshots) move(from, to string) error {
	err := s.pool.driver.Unfreeze(from)
	if err == nil {
		err = os.Rename(from, to)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// ListSnapshots returns the ids that have a snapshot, or half of one.
func (s *Snapshots) ListSnapshots(context.Context) ([]string, error) {
	ids, err := s.pool.ids(record.IsSnapshotID)
	memories, merr := s.pool.memories(record.IsSnapshotID)
	if err := errors.Join(err, merr); err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	ids = append(ids, memories...)
	slices.Sort(ids)
	return slices.Compact(ids), nil
}
