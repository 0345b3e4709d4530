package tree

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// maxDepth bounds the descriptors that removing a tree holds.
const maxDepth = 32

// Remove removes path with everything in it, by descriptors, following no link.
// Absent is fine.
//
// A guest can nest directories deeper than there are descriptors: a directory
// deeper than maxDepth is moved up to the top of the tree and removed from there.
func Remove(path string) error {
	parent, err := unix.Open(filepath.Dir(path), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: filepath.Dir(path), Err: err}
	}
	defer unix.Close(parent)
	if err := RemoveAt(parent, filepath.Base(path)); err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// RemoveAt is Remove for a name in the directory of a descriptor.
func RemoveAt(parent int, name string) error {
	err := unix.Unlinkat(parent, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	top, err := OpenDir(parent, name)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer top.Close()
	r := remover{top: int(top.Fd())}
	for {
		r.moved = false
		if err := r.empty(top, 0); err != nil {
			return err
		}
		if !r.moved {
			break
		}
		if _, err := top.Seek(0, io.SeekStart); err != nil {
			return err
		}
	}
	if err := unix.Unlinkat(parent, name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return &fs.PathError{Op: "rmdir", Path: name, Err: err}
	}
	return nil
}

type remover struct {
	top   int
	n     int  // names given at the top
	moved bool // the top must be read again
}

// empty removes everything in dir.
func (r *remover) empty(dir *os.File, depth int) error {
	for {
		entries, err := dir.ReadDir(256)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := r.remove(int(dir.Fd()), e.Name(), depth); err != nil {
				return err
			}
		}
	}
}

func (r *remover) remove(dir int, name string, depth int) error {
	err := unix.Unlinkat(dir, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if !errors.Is(err, unix.EISDIR) {
		return &fs.PathError{Op: "unlinkat", Path: name, Err: err}
	}
	if err := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR); err == nil {
		return nil
	}
	if depth >= maxDepth {
		return r.lift(dir, name)
	}
	sub, err := OpenDir(dir, name)
	if err != nil {
		return err
	}
	err = r.empty(sub, depth+1)
	if err = errors.Join(err, sub.Close()); err != nil {
		return err
	}
	err = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return &fs.PathError{Op: "rmdir", Path: name, Err: err}
	}
	return nil
}

// lift moves a directory to the top of the tree that is being removed.
func (r *remover) lift(dir int, name string) error {
	for {
		r.n++
		err := unix.Renameat2(dir, name, r.top, ".lifted-"+strconv.Itoa(r.n), unix.RENAME_NOREPLACE)
		if errors.Is(err, unix.EEXIST) {
			continue // the guest thought of that name
		}
		if err != nil {
			return &fs.PathError{Op: "renameat", Path: name, Err: err}
		}
		r.moved = true
		return nil
	}
}
