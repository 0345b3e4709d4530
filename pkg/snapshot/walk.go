package snapshot

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"golang.org/x/sys/unix"
)

// What lies in layers and on disks was made by others, who chose how many names
// there are. No walk reads a directory whole that need not be in order, and one
// that must be counts.

// maxHeld bounds the names that one walk has in memory: of all directories that
// it is in, in bytes. A directory of a million files is below it.
const maxHeld = 64 << 20

// nameCost is what a name takes beside its bytes: a string, in a slice that grows.
const nameCost = 32

// chunk is how many names are read at once.
const chunk = 1024

// held counts the names that a walk has in memory.
type held struct{ bytes, max int }

// read adds the names in dir to all.
func (h *held) read(dir *os.File, all []string) ([]string, error) {
	for {
		some, err := dir.Readdirnames(chunk)
		if err := h.add(some...); err != nil {
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

func (h *held) add(names ...string) error {
	for _, n := range names {
		h.bytes += nameCost + len(n)
	}
	if h.bytes > h.max {
		return errs.New(errs.Exhausted, "directories that lie in one another have more than %d MiB of names; that is where this ends", h.max>>20)
	}
	return nil
}

// inodes counts the names of files that have several.
type inodes map[uint64]uint64

// again reports whether a file was met before by another name. What all names
// are known of is forgotten.
func (seen inodes) again(st *unix.Stat_t) bool {
	if st.Mode&unix.S_IFMT == unix.S_IFDIR || st.Nlink < 2 {
		return false
	}
	n := seen[st.Ino] + 1
	if n == uint64(st.Nlink) {
		delete(seen, st.Ino)
	} else {
		seen[st.Ino] = n
	}
	return n > 1
}

// walk calls f for dir and all that is below it, in no order, files with several
// names once. It follows no link and holds one descriptor for each directory
// that it is in: layers are not deep.
func walk(ctx context.Context, dir string, f func(*unix.Stat_t)) error {
	top, err := openDir(unix.AT_FDCWD, dir)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err = unix.Fstat(int(top.Fd()), &st); err == nil {
		f(&st)
		err = walkIn(ctx, top, inodes{}, f)
	}
	return errors.Join(err, top.Close())
}

func walkIn(ctx context.Context, dir *os.File, seen inodes, f func(*unix.Stat_t)) error {
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
			if !seen.again(&st) {
				f(&st)
			}
			if st.Mode&unix.S_IFMT != unix.S_IFDIR {
				continue
			}
			sub, err := openDir(int(dir.Fd()), name)
			if err == nil {
				err = errors.Join(walkIn(ctx, sub, seen, f), sub.Close())
			}
			if err != nil {
				return err
			}
		}
	}
}
