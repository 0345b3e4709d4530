package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/diff"
)

// maxDiffs is how many comparisons go on at the same time.
const maxDiffs = 4

// Diff compares the files on a disk or in a snapshot with those of another one, or
// with the layers alone if base is empty, as [diff.Trees] does. Both have the same
// layers, which come lowest first. It fails with errs.Unavailable while too
// many comparisons go on, and with errs.WrongState if one of the two has no files.
func (s *Store) Diff(ctx context.Context, of, base string, layers []string, hide func(path string) bool,
	emit func(kind, path string) error,
) (err error) {
	select {
	case s.diffs <- struct{}{}:
		defer func() { <-s.diffs }()
	default:
		return errs.New(errs.Unavailable, "%d comparisons of files are running, the maximum at a time; try again later", maxDiffs)
	}
	if err := s.diff(ctx, of, base, layers, hide, emit); err != nil {
		return fmt.Errorf("diff of %s and %q: %w", of, base, err)
	}
	return nil
}

func (s *Store) diff(ctx context.Context, of, base string, layers []string, hide func(path string) bool,
	emit func(kind, path string) error,
) error {
	uppers := map[string]string{} // the ids, by the directory of their files
	upper := func(id string) (string, error) {
		if !record.IsID(id) && !record.IsSnapshotID(id) {
			return "", fmt.Errorf("%q: neither a disk nor a snapshot", id)
		}
		dir := filepath.Join(s.Pool.dir, id, "u")
		uppers[dir] = id
		return dir, nil
	}
	a, err := upper(of)
	if err != nil {
		return err
	}
	b := ""
	if base != "" {
		if b, err = upper(base); err != nil {
			return err
		}
	}
	lowers, err := s.Mounts.lowers(layers)
	if err != nil {
		return err
	}
	err = diff.Trees(ctx, a, b, lowers, hide, emit)
	if p, ok := errors.AsType[*fs.PathError](err); ok && errors.Is(err, fs.ErrNotExist) && uppers[p.Path] != "" {
		return errs.New(errs.WrongState, "%s has no files on the storage pool", uppers[p.Path])
	}
	return err
}
