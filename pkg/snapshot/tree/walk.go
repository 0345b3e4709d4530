package tree

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"golang.org/x/sys/unix"
)

// The authors of layers and disks choose how many names a directory has. So no
// walk reads a directory whole, unless its names must come in order, and then it
// counts them.

// MaxNames bounds the names that one walk has in memory: of all directories that
// it is in, in bytes. A directory of a million files is below it.
const MaxNames = 64 << 20

// NameCost is what a name takes beside its bytes: a string, in a slice that grows.
const NameCost = 32

// chunk is how many names are read at once.
const chunk = 1024

// Names counts the names that a walk has in memory.
type Names struct{ Bytes, Max int }

// Read appends the names in dir to all. It fails with errs.Exhausted when that is
// more than h.Max bytes.
func (h *Names) Read(dir *os.File, all []string) ([]string, error) {
	for {
		some, err := dir.Readdirnames(chunk)
		if err := h.Add(some...); err != nil {
			return nil, err
		}
		all = append(all, some...)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// Add counts names that the caller keeps. It fails as Read does.
func (h *Names) Add(names ...string) error {
	for _, n := range names {
		h.Bytes += NameCost + len(n)
	}
	if h.Bytes > h.Max {
		return errs.New(errs.Exhausted, "nested directories have more than %d MiB of names; the walk stops here", h.Max>>20)
	}
	return nil
}

// Drop takes back what Add has counted for a name.
func (h *Names) Drop(name string) { h.Bytes -= NameCost + len(name) }

// Inodes counts, by inode number, the names that a walk has met of files that
// have several.
type Inodes map[uint64]uint64

// Seen reports whether the walk has met this file by another name. A file is
// forgotten with its last name.
func (met Inodes) Seen(st *unix.Stat_t) bool {
	if st.Mode&unix.S_IFMT == unix.S_IFDIR || st.Nlink < 2 {
		return false
	}
	n := met[st.Ino] + 1
	if n == uint64(st.Nlink) {
		delete(met, st.Ino)
	} else {
		met[st.Ino] = n
	}
	return n > 1
}

// Walk calls f for dir and everything below it, in no order; for a file with several
// names once. It follows no link and holds one descriptor for each directory
// that it is in: layers are not deep.
func Walk(ctx context.Context, dir string, f func(*unix.Stat_t)) error {
	top, err := OpenDir(unix.AT_FDCWD, dir)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err = unix.Fstat(int(top.Fd()), &st); err == nil {
		f(&st)
		err = walkIn(ctx, top, Inodes{}, f)
	}
	return errors.Join(err, top.Close())
}

func walkIn(ctx context.Context, dir *os.File, met Inodes, f func(*unix.Stat_t)) error {
	for {
		names, err := dir.Readdirnames(chunk)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err = errors.Join(err, ctx.Err()); err != nil {
			return err
		}
		for _, name := range names {
			var st unix.Stat_t
			if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				return &fs.PathError{Op: "fstatat", Path: name, Err: err}
			}
			if !met.Seen(&st) {
				f(&st)
			}
			if st.Mode&unix.S_IFMT != unix.S_IFDIR {
				continue
			}
			sub, err := OpenDir(int(dir.Fd()), name)
			if err == nil {
				err = errors.Join(walkIn(ctx, sub, met, f), sub.Close())
			}
			if err != nil {
				return err
			}
		}
	}
}
