package files

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
)

// Restore fills a directory, which is empty, with a tree. The stream may come from anywhere: nothing
// leaves the directory. After an error a part of the tree is there.
//
// A file of which the target has lost a part, or has changed it, is left out, and Restore calls left with
// its path and why. With a nil left it is an error.
func Restore(ctx context.Context, from *chunks.Reader, t Tree, dir string, left func(path string, err error)) error {
	top, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	r := restorer{
		ctx: ctx, d: newDecoder(from.Stream(ctx, t.Stream)), top: top,
		get: func(id chunks.ID) ([]byte, error) { return from.Get(ctx, id) }, left: left, lost: map[string]bool{},
	}
	return errors.Join(r.all(), top.Close())
}

// Check reads the stream of a tree, and no file of it. It returns how many names and bytes it has. For each
// chunk of a file it calls chunk, unless that is nil, with the path of the file.
func Check(r io.Reader, chunk func(path string, id chunks.ID)) (names int, size int64, err error) {
	d, depth := newDecoder(r), 0
	var in []string // the directories that it is in
	for {
		e, err := d.next()
		if errors.Is(err, io.EOF) && depth == 0 && names > 0 {
			return names, size, nil
		}
		if err != nil {
			return names, size, whole(err)
		}
		if depth == 0 && (names > 0 || e.Type != dirBegin) {
			return names, size, bad("it does not begin and end with one directory")
		}
		names++
		switch e.Type {
		case dirBegin:
			in = append(in, e.Name)
			depth++
		case dirEnd:
			in = in[:len(in)-1]
			depth--
		case file:
			path := strings.Join(append(in[1:len(in):len(in)], e.Name), "/")
			for {
				p, err := d.piece()
				if err != nil {
					return names, size, err
				}
				if p.Bytes == 0 {
					break
				}
				if p.Hole {
					continue
				}
				size += p.Bytes
				if chunk != nil {
					chunk(path, p.ID)
				}
			}
		}
	}
}

// A restorer makes a tree.
type restorer struct {
	ctx context.Context
	d   *decoder
	get func(chunks.ID) ([]byte, error)
	top *os.File
	in  []made // the directories that it is in

	left func(path string, err error) // may be nil
	lost map[string]bool              // the paths of files that were left out
}

type made struct {
	dir *os.File
	e   Entry
}

func (r *restorer) all() (err error) {
	defer func() {
		for _, m := range r.in {
			m.dir.Close() //nolint:errcheck // read only
		}
	}()
	e, err := r.d.next()
	if err != nil {
		return whole(err)
	}
	if e.Type != dirBegin || e.Name != "" {
		return bad("it does not begin with a directory")
	}
	dir, err := tree.Dup(r.top)
	if err != nil {
		return err
	}
	r.in = append(r.in, made{dir, e})
	for len(r.in) > 0 {
		if r.ctx.Err() != nil {
			return context.Cause(r.ctx)
		}
		if e, err = r.d.next(); err != nil {
			return whole(err)
		}
		if err := r.entry(&e); err != nil {
			return err
		}
	}
	if _, err := r.d.next(); !errors.Is(err, io.EOF) {
		return bad("something follows its end")
	}
	return nil
}

// at is the directory that it is in.
func (r *restorer) at() *made { return &r.in[len(r.in)-1] }

func (r *restorer) entry(e *Entry) error {
	if e.Type == dirEnd {
		m := r.at()
		r.in = r.in[:len(r.in)-1]
		err := attributes(m.dir, ".", &m.e)
		return errors.Join(err, m.dir.Close())
	}
	if e.Name == "" || e.Name == "." || e.Name == ".." || strings.ContainsAny(e.Name, "/\x00") {
		return bad("it has the name %q", e.Name)
	}
	dir := r.at().dir
	switch e.Type {
	case hardlink:
		if r.lost[e.Target] {
			r.leave(e, fmt.Errorf("it is another name of %s", e.Target))
			return nil
		}
		return r.link(int(dir.Fd()), e)
	case file:
		bad, err := r.file(dir, e)
		if err == nil && bad != nil {
			if r.left == nil {
				return bad
			}
			r.leave(e, bad)
			return unix.Unlinkat(int(dir.Fd()), e.Name, 0)
		}
		if err != nil {
			return err
		}
	default:
		if err := r.make(dir, e); err != nil || e.Type == dirBegin {
			return err
		}
	}
	return attributes(dir, e.Name, e)
}

// leave leaves a file out. Its path in the tree is as hard links name it.
func (r *restorer) leave(e *Entry, err error) {
	path := ""
	for _, m := range r.in {
		path = filepath.Join(path, m.e.Name)
	}
	path = filepath.Join(path, e.Name)
	r.lost[path] = true
	r.left(path, err)
}

func (r *restorer) make(dir *os.File, e *Entry) (err error) {
	fd := int(dir.Fd())
	switch e.Type {
	case dirBegin:
		if len(r.in) >= maxDepth {
			return bad("more than %d directories are nested", maxDepth)
		}
		if err = unix.Mkdirat(fd, e.Name, 0o700); err == nil {
			var sub *os.File
			if sub, err = tree.OpenDir(fd, e.Name); err == nil {
				r.in = append(r.in, made{sub, *e})
			}
		}
	case symlink:
		err = unix.Symlinkat(e.Target, fd, e.Name)
	case whiteout:
		err = unix.Mknodat(fd, e.Name, unix.S_IFCHR, 0)
	case fifo:
		err = unix.Mknodat(fd, e.Name, unix.S_IFIFO|0o600, 0)
	case socket:
		err = unix.Mknodat(fd, e.Name, unix.S_IFSOCK|0o600, 0)
	}
	if err != nil {
		return &os.PathError{Op: "make", Path: e.Name, Err: err}
	}
	return nil
}

// link gives another name to a file of this tree.
func (r *restorer) link(dir int, e *Entry) error {
	if e.Target == "" || filepath.IsAbs(e.Target) || filepath.Clean(e.Target) != e.Target {
		return bad("it links %q to %q", e.Name, e.Target)
	}
	fd, err := tree.OpenBeneath(int(r.top.Fd()), e.Target, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Linkat(fd, "", dir, e.Name, unix.AT_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "link", Path: e.Name, Err: err}
	}
	return nil
}

// file makes a file of its pieces. Blocks of zeros become holes, as small holes have become zeros. It
// returns as lost why the target does not have all of it, after it has read the list of its pieces to
// the end.
func (r *restorer) file(dir *os.File, e *Entry) (lost, err error) {
	fd, err := unix.Openat(int(dir.Fd()), e.Name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &os.PathError{Op: "create", Path: e.Name, Err: err}
	}
	f := os.NewFile(uintptr(fd), e.Name)
	defer func() { err = errors.Join(err, f.Close()) }()
	off := int64(0)
	for {
		p, err := r.d.piece()
		if err != nil {
			return nil, err
		}
		if p.Bytes == 0 {
			return lost, f.Truncate(e.Size)
		}
		if p.Bytes > e.Size-off {
			return nil, bad("file %q has more than its %d bytes", e.Name, e.Size)
		}
		if !p.Hole && lost == nil {
			b, err := r.get(p.ID)
			switch {
			case errors.Is(err, chunks.ErrBad):
				lost = err
			case err != nil: // the target is gone, or the key is not here: it is not this file alone
				return nil, err
			case int64(len(b)) != p.Bytes:
				return nil, bad("a piece of %q has %d bytes and not %d", e.Name, len(b), p.Bytes)
			default:
				if err := writeAt(f, b, off); err != nil {
					return nil, err
				}
			}
		}
		off += p.Bytes
	}
}

var zeros [4096]byte

// writeAt writes what is not zero.
func writeAt(f *os.File, b []byte, off int64) error {
	for len(b) > 0 {
		// Blocks of the file, not of the piece.
		n := min(len(b), len(zeros)-int(off%int64(len(zeros))))
		if bytes.Equal(b[:n], zeros[:n]) {
			b, off = b[n:], off+int64(n)
			continue
		}
		for n < len(b) {
			m := min(len(b)-n, len(zeros))
			if bytes.Equal(b[n:n+m], zeros[:m]) {
				break
			}
			n += m
		}
		if _, err := f.WriteAt(b[:n], off); err != nil {
			return err
		}
		b, off = b[n:], off+int64(n)
	}
	return nil
}

// attributes sets owner, mode, extended attributes and time of a name, in this order: a change of
// the owner takes modes and attributes away.
func attributes(dir *os.File, name string, e *Entry) error {
	fd := int(dir.Fd())
	if err := unix.Fchownat(fd, name, int(e.UID), int(e.GID), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &os.PathError{Op: "chown", Path: name, Err: err}
	}
	if e.Type != symlink {
		// fchmodat(2) follows links. This name is none: this process has just made it.
		if err := unix.Fchmodat(fd, name, e.Mode, 0); err != nil {
			return &os.PathError{Op: "chmod", Path: name, Err: err}
		}
	}
	for _, a := range e.Attrs {
		if !kept(a.Name) {
			return bad("%q has the attribute %q", e.Name, a.Name)
		}
		if err := unix.Lsetxattr(tree.ProcFD(fd)+"/"+name, a.Name, []byte(a.Value), 0); err != nil {
			return &os.PathError{Op: "setxattr " + a.Name, Path: name, Err: err}
		}
	}
	at := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: e.Sec, Nsec: int64(e.Nsec)}}
	if err := unix.UtimesNanoAt(fd, name, at, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("set the time of %s: %w", name, err)
	}
	return nil
}
