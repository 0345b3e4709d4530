package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// ReadFile reads at most max bytes of a regular file in the upper of id: a file that
// the guest has written, not one of the image.
//
// The upper may be hostile. ReadFile follows no link, reaches nothing above the upper
// or mounted in it, and does not block on a fifo. The guest may have written anything
// into the file.
func (d *Disks) ReadFile(_ context.Context, id, path string, max int64) ([]byte, error) {
	f, err := d.OpenFile(id, path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, max))
	if err != nil {
		return nil, fmt.Errorf("read %s on disk %s: %w", path, id, err)
	}
	return b, nil
}

// OpenFile opens a file as ReadFile does. The guest may change it at any time.
func (d *Disks) OpenFile(id, path string) (f *os.File, err error) {
	dir, err := d.pool.diskDir(id)
	if err != nil {
		return nil, err
	}
	err = tree.WithDir(filepath.Join(dir, "u"), func(upper int) error {
		fd, err := tree.OpenBeneath(upper, path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
		if err != nil {
			return err
		}
		f = os.NewFile(uintptr(fd), path)
		fi, err := f.Stat()
		if err == nil && !fi.Mode().IsRegular() {
			err = &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("not a regular file but %s", fi.Mode().Type())}
		}
		if err != nil {
			f.Close()
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open %s on disk %s: %w", path, id, err)
	}
	return f, nil
}

// RemoveFile removes a file from the upper of id, which must not be mounted;
// absent is fine. Like ReadFile it follows no link.
func (d *Disks) RemoveFile(_ context.Context, id, path string) error {
	dir, err := d.pool.diskDir(id)
	if err != nil {
		return err
	}
	err = tree.WithDir(filepath.Join(dir, "u"), func(upper int) error {
		parent, err := tree.OpenBeneath(upper, filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		return errors.Join(unix.Unlinkat(parent, filepath.Base(path), 0), unix.Close(parent))
	})
	switch {
	case err == nil, errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EISDIR):
		return nil // no file is there: the guest has put something else in its place
	}
	return fmt.Errorf("remove %s from disk %s: %w", path, id, err)
}
