package files

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
)

// minHole is the least hole that is kept as one: a shorter one would make two small chunks.
const minHole = 64 << 10

// Save puts what is in a directory, which may change meanwhile and which a guest may have filled. A
// file that is written to meanwhile is saved as it was read; a name that goes meanwhile is left out.
// spool is the directory for a file without a name. An error of the target or of this host is a
// chunks.SinkError; any other is about this tree alone.
func Save(ctx context.Context, to *chunks.Session, dir, spool string) (t Tree, err error) {
	stream, err := os.OpenFile(spool, unix.O_TMPFILE|os.O_RDWR, 0o600)
	if err != nil {
		return t, chunks.SinkError{Err: fmt.Errorf("make a file in %s: %w", spool, err)}
	}
	defer stream.Close()
	top, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NOATIME, 0)
	if err != nil {
		return t, err
	}
	s := saver{ctx: ctx, to: to, out: bufio.NewWriterSize(sink{stream}, 64<<10), tree: &t, met: tree.Inodes{}, first: map[uint64]string{}}
	s.names.Max, s.links.Max = tree.MaxNames, tree.MaxNames
	err = errors.Join(s.top(top), top.Close())
	if err == nil {
		err = s.out.Flush()
	}
	if err != nil {
		return t, err
	}
	if _, err := stream.Seek(0, io.SeekStart); err != nil {
		return t, chunks.SinkError{Err: err}
	}
	return t, to.Split(ctx, stream, func(id chunks.ID, _ int) error {
		t.Stream = append(t.Stream, id)
		return nil
	})
}

// sink marks the errors of what the stream is written to.
type sink struct{ f *os.File }

func (s sink) Write(b []byte) (int, error) {
	n, err := s.f.Write(b)
	if err != nil {
		err = chunks.SinkError{Err: fmt.Errorf("write the list of files: %w", err)}
	}
	return n, err
}

// A saver walks a tree.
type saver struct {
	ctx   context.Context
	to    *chunks.Session
	out   *bufio.Writer
	tree  *Tree
	names tree.Names // of the directories that the walk is in
	links tree.Names // in first
	met   tree.Inodes
	first map[uint64]string // the first name of a file with several, by inode
	attrs []byte
	depth int
}

func (s *saver) top(dir *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return &os.PathError{Op: "fstat", Path: dir.Name(), Err: err}
	}
	e := entryOf(dirBegin, "", &st)
	var err error
	if e.Attrs, err = s.attributes(dir, "."); err != nil {
		return err
	}
	return s.dir(dir, "", e)
}

// entryOf makes an entry of what the kernel says.
func entryOf(kind byte, name string, st *unix.Stat_t) Entry {
	return Entry{
		Type: kind, Name: name, Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid, Sec: st.Mtim.Sec, Nsec: uint32(st.Mtim.Nsec),
	}
}

// dir saves a directory that is at path, with all that is in it.
func (s *saver) dir(dir *os.File, at string, e Entry) error {
	if s.depth++; s.depth > maxDepth {
		return fmt.Errorf("%s: more than %d directories are nested", at, maxDepth)
	}
	defer func() { s.depth-- }()
	if err := e.write(s.out); err != nil {
		return err
	}
	names, err := s.names.Read(dir, nil)
	if err != nil && !errors.Is(err, unix.ENOENT) { // the directory was removed meanwhile
		return err
	}
	slices.Sort(names)
	for _, name := range names {
		if s.ctx.Err() != nil {
			return chunks.SinkError{Err: context.Cause(s.ctx)}
		}
		err := s.name(dir, name, path.Join(at, name))
		s.names.Drop(name)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	end := Entry{Type: dirEnd}
	return end.write(s.out)
}

// name saves a name of a directory. Before anything is written it may fail with ENOENT: the name has
// gone.
func (s *saver) name(dir *os.File, name, at string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &os.PathError{Op: "fstatat", Path: at, Err: err}
	}
	if s.met.Seen(&st) && s.first[st.Ino] != "" {
		e := entryOf(hardlink, name, &st)
		e.Target = s.first[st.Ino]
		s.tree.Files++
		return e.write(s.out)
	}
	before := s.tree.Files
	err := s.kind(dir, name, at, &st)
	saved := err == nil && s.tree.Files > before && st.Mode&unix.S_IFMT != unix.S_IFDIR
	if saved && st.Nlink > 1 && len(at) <= maxPath && s.links.Add(at) == nil {
		s.first[st.Ino] = at // else each of its names becomes a file
	}
	return err
}

// kind saves a name as what it is.
func (s *saver) kind(dir *os.File, name, at string, st *unix.Stat_t) error {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR, unix.S_IFREG:
		return s.open(dir, name, at, st.Mode&unix.S_IFMT == unix.S_IFDIR)
	case unix.S_IFCHR, unix.S_IFBLK:
		if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0 {
			s.tree.Devices++
			return nil
		}
		return s.special(dir, entryOf(whiteout, name, st))
	case unix.S_IFIFO:
		return s.special(dir, entryOf(fifo, name, st))
	case unix.S_IFSOCK:
		return s.special(dir, entryOf(socket, name, st))
	case unix.S_IFLNK:
		e := entryOf(symlink, name, st)
		buf := make([]byte, maxPath+1)
		n, err := unix.Readlinkat(int(dir.Fd()), name, buf)
		if err == nil && n > maxPath {
			err = unix.ENAMETOOLONG
		}
		if err != nil {
			return replaced(&os.PathError{Op: "readlinkat", Path: at, Err: err})
		}
		e.Target = string(buf[:n])
		return s.special(dir, e)
	}
	return fmt.Errorf("%s: a file of mode %o", at, st.Mode)
}

// special saves a name that has no content.
func (s *saver) special(dir *os.File, e Entry) (err error) {
	if e.Attrs, err = s.attributes(dir, e.Name); err != nil {
		return err
	}
	s.tree.Files++
	return e.write(s.out)
}

// open saves a directory or a file. What it opens may be something else than the name was before.
func (s *saver) open(dir *os.File, name, at string, isDir bool) error {
	flags := unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_NOATIME
	if isDir {
		flags |= unix.O_DIRECTORY
	}
	fd, err := tree.OpenBeneath(int(dir.Fd()), name, flags)
	if err != nil {
		return replaced(err)
	}
	f := os.NewFile(uintptr(fd), at)
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "fstat", Path: at, Err: err}
	}
	attrs, err := s.attributes(dir, name)
	if err != nil {
		return err
	}
	switch {
	case isDir:
		e := entryOf(dirBegin, name, &st)
		e.Attrs = attrs
		return gone(s.dir(f, at, e))
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return &os.PathError{Op: "open", Path: at, Err: unix.ENOENT} // it was replaced
	}
	e := entryOf(file, name, &st)
	e.Attrs, e.Size = attrs, st.Size
	s.tree.Files++
	if err := e.write(s.out); err != nil {
		return err
	}
	return gone(s.content(f, st.Size))
}

// replaced makes ENOENT of what the kernel says of a name that has become another kind of file since it
// was looked at: that one has gone.
func replaced(err error) error {
	for _, e := range []unix.Errno{unix.ELOOP, unix.ENOTDIR, unix.EINVAL, unix.ENXIO} {
		if errors.Is(err, e) {
			return fmt.Errorf("%w: %w", unix.ENOENT, err)
		}
	}
	return err
}

// gone says that an error is none of a name that has gone: something of it is written already.
func gone(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("changed while it was read: %s", err)
	}
	return err
}

// content saves the pieces of a file.
func (s *saver) content(f *os.File, size int64) error {
	for off := int64(0); off < size; {
		begin, end, err := dataAt(f, off, size)
		if err != nil {
			return err
		}
		if begin > off {
			hole := Piece{Bytes: begin - off, Hole: true}
			if err := hole.write(s.out); err != nil {
				return err
			}
		}
		if err := s.to.Split(s.ctx, io.NewSectionReader(f, begin, end-begin), func(id chunks.ID, bytes int) error {
			s.tree.Bytes += int64(bytes)
			p := Piece{Bytes: int64(bytes), ID: id}
			return p.write(s.out)
		}); err != nil {
			return err
		}
		off = end
	}
	return (&Piece{}).write(s.out)
}

// dataAt finds the next data of a file at or after off, up to the next hole. Short holes are data.
func dataAt(f *os.File, off, size int64) (begin, end int64, err error) {
	seek := func(from int64, whence int) (int64, error) {
		to, err := unix.Seek(int(f.Fd()), from, whence)
		if errors.Is(err, unix.ENXIO) {
			return size, nil // no data there, or the file has become shorter
		}
		if err != nil {
			return 0, &os.PathError{Op: "lseek", Path: f.Name(), Err: err}
		}
		return min(to, size), nil
	}
	if begin, err = seek(off, unix.SEEK_DATA); err != nil {
		return 0, 0, err
	}
	if begin-off < minHole && begin < size {
		begin = off
	}
	for end = begin; end < size; {
		hole, err := seek(end, unix.SEEK_HOLE)
		if err != nil {
			return 0, 0, err
		}
		next, err := seek(hole, unix.SEEK_DATA)
		if err != nil {
			return 0, 0, err
		}
		if end = hole; next-hole >= minHole || next >= size {
			break
		}
		end = next
	}
	return begin, max(end, begin), nil
}

// kept says which attributes are saved: not those that a host gives, such as labels of SELinux.
func kept(name string) bool {
	return strings.HasPrefix(name, "user.") || strings.HasPrefix(name, "trusted.") || name == "security.capability" ||
		strings.HasPrefix(name, "system.posix_acl_")
}

// attributes reads the extended attributes of a name, sorted.
func (s *saver) attributes(dir *os.File, name string) (all []Attr, err error) {
	at := tree.ProcFD(int(dir.Fd())) + "/" + name // there is no call that takes a directory
	if s.attrs == nil {
		s.attrs = make([]byte, maxValue)
	}
	n, err := unix.Llistxattr(at, s.attrs)
	if errors.Is(err, unix.EOPNOTSUPP) || err == nil && n == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "llistxattr", Path: name, Err: err}
	}
	keys := strings.Split(strings.TrimSuffix(string(s.attrs[:n]), "\x00"), "\x00")
	slices.Sort(keys)
	total := 0
	for _, key := range keys {
		if !kept(key) {
			continue
		}
		n, err := unix.Lgetxattr(at, key, s.attrs)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: "lgetxattr", Path: name, Err: err}
		}
		if total += len(key) + n; total > maxAttrs {
			return nil, fmt.Errorf("%s: it has more than %d bytes of extended attributes", name, maxAttrs)
		}
		all = append(all, Attr{key, string(s.attrs[:n])})
	}
	return all, nil
}
