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
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"golang.org/x/sys/unix"
)

// strayFor is how long a disk without a record is kept.
const strayFor = 24 * time.Hour

// Directories of a pool beside the disks.
const (
	lostDir  = "lost+found" // strays, as ID-UNIXTIME
	trashDir = ".trash"     // what is being destroyed
)

func (s *Store) diskDir(id string) (string, error) {
	if !record.IsID(id) {
		return "", fmt.Errorf("disk %q: not an id", id)
	}
	return filepath.Join(s.poolDir, id), nil
}

// CreateDisk makes an empty disk that holds at most bytes, metadata included;
// 0 is no limit. It fails with fs.ErrExist if there is one, with errs.Exhausted
// if the pool is full, with errs.Unsupported if the pool can not limit.
func (s *Store) CreateDisk(_ context.Context, id string, bytes int64) error {
	dir, err := s.diskDir(id)
	if err != nil {
		return err
	}
	if err := s.pool.create(dir, bytes); err != nil {
		return s.createFailed(id, err)
	}
	// Guest root owns the root of what it will see.
	err = unix.Mkdir(filepath.Join(dir, "u"), 0o755)
	if err == nil {
		err = unix.Mkdir(filepath.Join(dir, "w"), 0o700)
	}
	if err != nil {
		return s.createFailed(id, errors.Join(err, s.pool.destroy(dir)))
	}
	return nil
}

func (s *Store) createFailed(id string, err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errs.Wrap(fmt.Errorf("create disk %s: %w", id, err), errs.Exhausted, "the storage pool is full: delete sandboxes, or make pool_size larger")
	}
	return fmt.Errorf("create disk %s: %w", id, err)
}

// DeleteDisk removes the disk of id; absent is fine. It is renamed away and
// destroyed in the background: dropping what is dirty in the page cache takes
// 3 ms for 20 MB. The space comes back soon after.
func (s *Store) DeleteDisk(_ context.Context, id string) error {
	dir, err := s.diskDir(id)
	if err != nil {
		return err
	}
	// Ids are never used twice, so this name is free.
	if err := os.Rename(dir, filepath.Join(s.poolDir, trashDir, id)); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("delete disk %s: %w", id, err)
	}
	s.bg.Go(s.emptyTrash)
	return nil
}

// emptyTrash removes what was thrown away. What it can not remove stays for
// the next sweep, which says so.
func (s *Store) emptyTrash() { _ = s.removeTrash(context.Background()) }

func (s *Store) removeTrash(ctx context.Context) error {
	select {
	case s.trash <- struct{}{}:
		defer func() { <-s.trash }()
	case <-ctx.Done():
		return ctx.Err()
	}
	dir := filepath.Join(s.poolDir, trashDir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var all error
	for _, e := range entries {
		all = errors.Join(all, s.pool.destroy(filepath.Join(dir, e.Name())), ctx.Err())
	}
	return all
}

// ListDisks returns the ids that have a disk.
func (s *Store) ListDisks(context.Context) ([]string, error) {
	entries, err := os.ReadDir(s.poolDir)
	if err != nil {
		return nil, fmt.Errorf("list disks: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if record.IsID(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// diskDirs lists the disks of a pool, strays included.
func diskDirs(pool string) (dirs []string, err error) {
	for _, in := range []string{pool, filepath.Join(pool, lostDir)} {
		entries, err := os.ReadDir(in)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			if name, _, _ := strings.Cut(e.Name(), "-"); record.IsID(name) {
				dirs = append(dirs, filepath.Join(in, e.Name()))
			}
		}
	}
	return dirs, nil
}

// MoveStray puts the disk of id into lost+found, from where Sweep removes it
// after 24 h. Absent is fine.
func (s *Store) MoveStray(_ context.Context, id string) error {
	dir, err := s.diskDir(id)
	if err != nil {
		return err
	}
	to := filepath.Join(s.poolDir, lostDir, id+"-"+strconv.FormatInt(time.Now().Unix(), 10))
	if err := os.Rename(dir, to); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("move stray disk %s: %w", id, err)
	}
	return nil
}

// Sweep removes strays older than 24 h, what a killed daemon left in the
// trash, and what destroyed disks left inside the pool.
func (s *Store) Sweep(ctx context.Context) error {
	dir := filepath.Join(s.poolDir, lostDir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("sweep storage pool: %w", err)
	}
	for _, e := range entries {
		id, at, ok := strings.Cut(e.Name(), "-")
		since, perr := strconv.ParseInt(at, 10, 64)
		if !ok || perr != nil || !record.IsID(id) || time.Since(time.Unix(since, 0)) < strayFor {
			continue // what an operator put there is the operator's
		}
		err = errors.Join(err, s.pool.destroy(filepath.Join(dir, e.Name())))
	}
	if err = errors.Join(err, s.removeTrash(ctx), s.pool.sweep(ctx)); err != nil {
		return fmt.Errorf("sweep storage pool: %w", err)
	}
	return nil
}

// Usage returns the bytes a disk holds, writes on their way included, and its
// limit, 0 for none. It fails with errs.Unsupported on a plain pool, with
// fs.ErrNotExist without a disk.
func (s *Store) Usage(id string) (used, limit int64, err error) {
	dir, err := s.diskDir(id)
	if err != nil {
		return 0, 0, err
	}
	used, limit, err = s.pool.usage(dir)
	if err != nil {
		return 0, 0, fmt.Errorf("usage of disk %s: %w", id, err)
	}
	if limit > 0 {
		used = min(used, limit) // for a moment the kernel reserves more than it lets anybody write
	}
	return used, limit, nil
}
