package target

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// directory is a Target. It must exist: a disk that is not mounted is no place for backups.
type directory string

func (d directory) String() string { return string(d) }

// open opens the directory. Names lead out of an os.Root by no link.
func (d directory) open() (*os.Root, error) {
	root, err := os.OpenRoot(string(d))
	if errors.Is(err, fs.ErrNotExist) {
		// Not %w: it is the target that is missing, and no backup.
		return nil, fmt.Errorf("directory %s is not there: mount it, or make it with mode 0700", d)
	}
	if err != nil {
		return nil, err
	}
	fi, err := root.Stat(".")
	if err == nil && fi.Mode().Perm()&0o022 != 0 {
		err = fmt.Errorf("directory %s has mode %04o, so others can replace backups: chmod go-w %s", d, fi.Mode().Perm(), d)
	}
	if err != nil {
		root.Close()
		return nil, err
	}
	return root, nil
}

// part is what a file is called until all of it is on disk. It is one name for each owner, so a
// host that loses its power leaves one such file at most, and the next Put replaces it.
func part(name string) string {
	if b, ok := ParseName(strings.TrimSuffix(strings.TrimSuffix(name, Suffix), ListSuffix)); ok {
		name = "sandboxd-" + b.Owner
	} else if p, ok := ParsePack(name); ok {
		name = "sandboxd-" + p.Owner
	}
	return "." + name + ".part"
}

// Put writes all of r before it has its name.
func (d directory) Put(ctx context.Context, name string, r io.ReadSeeker, bytes int64) (err error) {
	root, err := d.open()
	if err != nil {
		return err
	}
	defer root.Close()
	tmp := part(name)
	defer func() {
		switch {
		case err == nil:
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
			err = fmt.Errorf("%s %w: %w", d, ErrFull, err)
		default:
			err = fmt.Errorf("write to %s: %w", d, err)
		}
		if err != nil {
			err = errors.Join(err, absent(root.Remove(tmp)))
		}
	}()
	if err := absent(root.Remove(tmp)); err != nil {
		return err
	}
	f, err := root.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(f, within{ctx, r})
	if err == nil && n != bytes {
		err = io.ErrUnexpectedEOF
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if _, err := root.Lstat(name); err == nil {
		return fmt.Errorf("%s: %w", name, fs.ErrExist)
	}
	if err := root.Rename(tmp, name); err != nil {
		return err
	}
	return sync(root)
}

// sync makes the names of a directory durable.
func sync(root *os.Root) error {
	f, err := root.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// List lists the regular files.
func (d directory) List(context.Context) (all []Object, err error) {
	root, err := d.open()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", d, err)
	}
	for _, e := range entries {
		fi, err := e.Info()
		if err != nil || !fi.Mode().IsRegular() { // removed just now
			continue
		}
		all = append(all, Object{e.Name(), fi.Size()})
	}
	return all, nil
}

// Get reads from the disk and not from the page cache, which has what Put has written whether or
// not the disk has it.
func (d directory) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	root, err := d.open()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	f, err := root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0) // not to wait for the writer of a pipe
	if err != nil {
		return nil, fmt.Errorf("read from %s: %w", d, err)
	}
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		f.Close()
		return nil, fmt.Errorf("read from %s: %s is no file", d, name)
	}
	unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) //nolint:errcheck // some file systems have no cache to drop
	return struct {
		io.Reader
		io.Closer
	}{within{ctx, f}, f}, nil
}

// Remove removes a file, durably.
func (d directory) Remove(_ context.Context, name string) error {
	root, err := d.open()
	if err != nil {
		return err
	}
	defer root.Close()
	if err := absent(root.Remove(name)); err != nil {
		return fmt.Errorf("remove from %s: %w", d, err)
	}
	return sync(root)
}

func absent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// within reads until its context ends.
type within struct {
	ctx context.Context
	io.Reader
}

func (w within) Read(b []byte) (int, error) {
	if err := w.ctx.Err(); err != nil {
		return 0, context.Cause(w.ctx)
	}
	return w.Reader.Read(b)
}
