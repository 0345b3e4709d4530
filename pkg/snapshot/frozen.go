package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

func (s *Store) frozenDir(snap string) (string, error) {
	if !record.IsSnapshotID(snap) {
		return "", fmt.Errorf("snapshot %q: not an id", snap)
	}
	return filepath.Join(s.poolDir, snap), nil
}

// PrepareSnapshot writes out what the pool holds in memory only, which
// TakeSnapshot would have to while a guest stands still.
func (s *Store) PrepareSnapshot(ctx context.Context) error {
	if err := s.pool.Flush(ctx); err != nil {
		return fmt.Errorf("sync storage pool: %w", err)
	}
	return nil
}

// TakeSnapshot makes a frozen copy of the disk of id, which must not change
// meanwhile: a moment on btrfs, as long as copying takes on a plain pool. It
// fails with errs.Exhausted if the pool is full, and with errs.WrongState if
// the disk was in use without syncing when the host went down. What it leaves
// when it fails, DeleteSnapshot removes.
func (s *Store) TakeSnapshot(ctx context.Context, snap, id string) error {
	to, err := s.frozenDir(snap)
	if err != nil {
		return err
	}
	from, err := s.diskDir(id)
	if err != nil {
		return err
	}
	if _, err = trusted(from); err == nil {
		err = s.pool.Freeze(ctx, from, to)
	}
	if err != nil {
		return s.poolFull(fmt.Errorf("take snapshot %s of disk %s: %w", snap, id, err))
	}
	return nil
}

// FinishSnapshot has a snapshot survive a crash of the host, and returns the
// bytes that the disk of id is charged with, from which it was taken, 0 if the
// pool does not count.
func (s *Store) FinishSnapshot(ctx context.Context, snap, id string) (bytes int64, err error) {
	dir, err := s.diskDir(id)
	if err != nil {
		return 0, err
	}
	if err = s.pool.Settle(ctx); err == nil {
		bytes, _, err = s.pool.Usage(dir)
	}
	if err != nil && !errs.Is(err, errs.Unsupported) {
		return 0, fmt.Errorf("finish snapshot %s: %w", snap, err)
	}
	return bytes, nil
}

// DeleteSnapshot removes a snapshot, also half of one; absent is fine. The
// space comes back soon after.
func (s *Store) DeleteSnapshot(_ context.Context, snap string) error {
	dir, err := s.frozenDir(snap)
	if err != nil {
		return err
	}
	if err := s.throwAway(dir, s.moveFrozen(dir, filepath.Join(s.poolDir, pool.TrashDir, snap))); err != nil {
		return fmt.Errorf("delete snapshot %s: %w", snap, err)
	}
	return nil
}

// MoveStraySnapshot is MoveStray for a snapshot.
func (s *Store) MoveStraySnapshot(_ context.Context, snap string) error {
	dir, err := s.frozenDir(snap)
	if err != nil {
		return err
	}
	if err := s.moveFrozen(dir, s.lostPath(snap)); err != nil {
		return fmt.Errorf("move stray snapshot %s: %w", snap, err)
	}
	return nil
}

// moveFrozen renames what can not be renamed while it is read-only.
func (s *Store) moveFrozen(from, to string) error {
	err := s.pool.Unfreeze(from)
	if err == nil {
		err = os.Rename(from, to)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// ListSnapshots returns the ids that have a snapshot, or half of one.
func (s *Store) ListSnapshots(context.Context) ([]string, error) {
	entries, err := os.ReadDir(s.poolDir)
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if record.IsSnapshotID(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// branch makes the disk of id of a snapshot.
func (s *Store) branch(ctx context.Context, snap, id, dir string, bytes int64) error {
	from, err := s.frozenDir(snap)
	if err != nil {
		return err
	}
	if err := s.pool.Branch(ctx, from, dir, bytes); err != nil {
		if !errors.Is(err, fs.ErrExist) {
			err = errors.Join(err, s.pool.Destroy(dir))
		}
		if errors.Is(err, fs.ErrNotExist) {
			return errs.Wrap(err, errs.NotFound, "the files of snapshot %s are not on the storage pool any more", snap)
		}
		return s.createFailed(id, err)
	}
	// The overlay starts afresh. What it left to itself says nothing about the
	// files, which were on disk when the snapshot was taken.
	err = tree.Remove(filepath.Join(dir, "w"))
	if err == nil {
		err = unix.Mkdir(filepath.Join(dir, "w"), 0o700)
	}
	if rerr := unix.Lremovexattr(dir, bootAttr); rerr != nil && !errors.Is(rerr, unix.ENODATA) {
		err = errors.Join(err, &os.PathError{Op: "removexattr", Path: dir, Err: rerr})
	}
	if err != nil {
		return s.createFailed(id, errors.Join(err, s.pool.Destroy(dir)))
	}
	return nil
}

// poolFull says what a client may read of err if the pool is full.
func (s *Store) poolFull(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errs.Wrap(err, errs.Exhausted, "the storage pool is full: delete sandboxes or snapshots, or make pool_size larger")
	}
	return err
}

// lostPath is where a stray is kept.
func (s *Store) lostPath(id string) string {
	return filepath.Join(s.poolDir, pool.LostDir, pool.StrayName(id, time.Now()))
}
