package tarball

import (
	"archive/tar"
	"bufio"
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Options say how entries become files.
type Options struct {
	// Owners gives files the user and the group in the tar. Without it they belong to whoever
	// unpacks.
	Owners bool
	// Untrusted is for a tar of a guest: setuid, setgid and sticky bits are dropped, files with
	// holes, which say that they are larger than the tar, are refused, and links that lead out of
	// what is copied are left out: a later copy would write where such a link leads.
	Untrusted bool
}

// maxName bounds the name of an entry, in bytes: PATH_MAX of limits.h, beyond which no program
// could name the file.
const maxName = 4096

type unpacker struct {
	Options
	in    *EndReader
	tr    *tar.Reader
	root  *os.Root
	from  string // the names of all entries are below it
	alone bool   // there is but one entry

	at     *os.File // the directory of the last entry
	atName string
	dirs   map[string]*tar.Header // directories, which get their attributes in the end
	late   map[string]*tar.Header // links, which are made in the end
	left   LeftOut
	buf    []byte
}

func (o Options) unpacker(r io.Reader) *unpacker {
	in := &EndReader{R: bufio.NewReaderSize(r, bufferSize)}
	return &unpacker{
		Options: o, in: in, tr: tar.NewReader(in), buf: make([]byte, bufferSize), dirs: map[string]*tar.Header{},
		late: map[string]*tar.Header{},
	}
}

// EndReader notes that R ended. A whole tar has blocks that mark its end, and package tar does not
// say whether it found those or the end of its input.
type EndReader struct {
	R     io.Reader
	Ended bool
}

func (e *EndReader) Read(p []byte) (int, error) {
	n, err := e.R.Read(p)
	e.Ended = e.Ended || errors.Is(err, io.EOF)
	return n, err
}

// next returns the next entry; nil at the end.
func (u *unpacker) next() (*tar.Header, error) {
	for {
		h, err := u.tr.Next()
		switch {
		case errors.Is(err, io.EOF) && u.in.Ended:
			return nil, &Broken{errNoEnd}
		case errors.Is(err, io.EOF):
			if _, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{u.in}, u.buf); err != nil { // padding
				return nil, &Broken{err}
			}
			return nil, nil
		case err != nil && !errors.Is(err, tar.ErrInsecurePath): // clean says what is
			return nil, &Broken{err}
		case h.Typeflag != tar.TypeXGlobalHeader:
			return h, nil
		}
	}
}

// rest unpacks all entries that are left. Late links are made and directories get their attributes
// in the end, also after an error: files in them change their times, and modes may forbid files.
func (u *unpacker) rest() (err error) {
	defer func() {
		if lerr := u.lateLinks(); err == nil {
			err = lerr
		}
		names := slices.Sorted(maps.Keys(u.dirs))
		for _, name := range slices.Backward(names) { // what is below comes first: a mode may lock it
			if derr := u.finish(name, u.dirs[name]); err == nil {
				err = derr
			}
		}
		if err == nil {
			err = u.left.or()
		}
	}()
	for {
		h, err := u.next()
		if err != nil || h == nil {
			return err
		}
		name, err := u.below(h.Name)
		if err != nil {
			return err
		}
		if name == "." && h.Typeflag == tar.TypeDir {
			continue
		}
		if name == "." || u.alone {
			return refuse("the tar holds %.80q beside the one file or directory that it should hold", h.Name)
		}
		if err := u.entry(name, h); err != nil {
			return err
		}
	}
}

// below is the name of an entry, or of what a hard link points to, in root.
func (u *unpacker) below(name string) (string, error) {
	rel, err := clean(name)
	if err != nil || u.from == "." {
		return rel, err
	}
	if rel == u.from {
		return ".", nil
	}
	rel, ok := strings.CutPrefix(rel, u.from+"/")
	if !ok {
		return "", refuse("the tar holds %.80q, which is outside of what is copied", name)
	}
	return rel, nil
}

// clean makes a name relative, as other programs that unpack tars do.
func clean(name string) (string, error) {
	rel := path.Clean(strings.TrimLeft(name, "/"))
	if name == "" || len(name) > maxName || rel == ".." || strings.HasPrefix(rel, "../") || strings.IndexByte(name, 0) >= 0 {
		return "", refuse("the tar holds a file by the name %.80q, which is outside of the destination or too long", name)
	}
	return rel, nil
}

// entry makes one file of any kind.
func (u *unpacker) entry(name string, h *tar.Header) error {
	what := ""
	switch h.Typeflag {
	case tar.TypeDir, tar.TypeReg, tar.TypeGNUSparse, tar.TypeSymlink, tar.TypeLink, tar.TypeFifo:
	case tar.TypeChar, tar.TypeBlock:
		what = "a device"
	default:
		what = fmt.Sprintf("of the unknown type %q", h.Typeflag)
	}
	if what != "" {
		u.left = append(u.left, h.Name+" is "+what)
		return nil
	}
	parent, err := u.parent(path.Dir(name))
	if err != nil {
		return err
	}
	base := path.Base(name)
	delete(u.late, name) // of two entries with one name the last counts
	err = u.makeIn(parent, base, name, h)
	if _, ok := errors.AsType[unix.Errno](err); ok {
		if _, named := errors.AsType[*fs.PathError](err); !named {
			err = &fs.PathError{Op: "write", Path: path.Join(parent.Name(), base), Err: err}
		}
	}
	return err
}

func (u *unpacker) makeIn(parent *os.File, base, name string, h *tar.Header) error {
	there, err := u.meet(parent, base, h)
	if err != nil {
		return err
	}
	in := int(parent.Fd())
	switch h.Typeflag {
	case tar.TypeDir:
		u.dirs[name] = metaOf(h)
		if there {
			return nil
		}
		return unix.Mkdirat(in, base, 0o700)
	case tar.TypeSymlink:
		return u.symlink(parent, base, name, h)
	case tar.TypeFifo:
		return u.replace(parent, base, func(draft string) error {
			if err := unix.Mknodat(in, draft, unix.S_IFIFO|0o600, 0); err != nil {
				return err
			}
			if err := u.lmeta(in, draft, h); err != nil {
				return err
			}
			return unix.Fchmodat(in, draft, u.mode(h.Mode), 0)
		})
	case tar.TypeLink:
		return u.link(parent, base, name, h.Linkname)
	}
	return u.file(parent, base, h)
}

// meet reports whether something has the name already. A directory and something else do not
// replace each other.
func (u *unpacker) meet(parent *os.File, base string, h *tar.Header) (there bool, err error) {
	var st unix.Stat_t
	switch err := unix.Fstatat(int(parent.Fd()), base, &st, unix.AT_SYMLINK_NOFOLLOW); {
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case err != nil:
		return false, err
	}
	at, dir := path.Join(parent.Name(), base), st.Mode&unix.S_IFMT == unix.S_IFDIR
	switch {
	case dir && h.Typeflag != tar.TypeDir:
		return true, refuse("%s is a directory, and cannot be overwritten with something else", at)
	case !dir && h.Typeflag == tar.TypeDir:
		return true, refuse("%s is not a directory, and cannot be overwritten with one", at)
	}
	return true, nil
}

// parent opens a directory of root, and makes what is missing of it.
func (u *unpacker) parent(name string) (*os.File, error) {
	if u.at != nil && u.atName == name {
		return u.at, nil
	}
	f, err := u.openDir(name)
	if errors.Is(err, fs.ErrNotExist) {
		if err := u.root.MkdirAll(name, 0o755); err != nil {
			return nil, err
		}
		f, err = u.openDir(name)
	}
	if err != nil {
		return nil, err
	}
	if u.at != nil {
		u.at.Close()
	}
	u.at, u.atName = f, name
	return f, nil
}

// openDir opens a directory of root. It goes through no link if the tar is a guest's: then the
// place of an entry is the one that its name says, and leads can count on that.
func (u *unpacker) openDir(name string) (*os.File, error) {
	if !u.Untrusted {
		return u.root.OpenFile(name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	}
	dir, err := u.root.Open(".")
	if err != nil || name == "." {
		return dir, err
	}
	at := u.root.Name()
	for part := range strings.SplitSeq(name, "/") {
		at = path.Join(at, part)
		fd, err := unix.Openat(int(dir.Fd()), part, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		dir.Close()
		switch {
		case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
			return nil, refuse("%s is not a directory, and nothing is copied through a link", at)
		case err != nil:
			return nil, &fs.PathError{Op: "open", Path: at, Err: err}
		}
		dir = os.NewFile(uintptr(fd), at)
	}
	return dir, nil
}

func (u *unpacker) close() {
	if u.at != nil {
		u.at.Close()
		u.at = nil
	}
	u.root.Close()
}

// replace makes something under another name, and then gives it its own.
func (u *unpacker) replace(parent *os.File, base string, make func(draft string) error) error {
	in, draft := int(parent.Fd()), DraftPrefix+rand.Text()
	err := make(draft)
	if err == nil {
		err = unix.Renameat(in, draft, in, base)
	}
	if err != nil {
		unix.Unlinkat(in, draft, 0) //nolint:errcheck // it may not have been made
	}
	return err
}

func (u *unpacker) file(parent *os.File, base string, h *tar.Header) error {
	if u.Untrusted && sparse(h) {
		return refuse("the tar holds the file %.80q with holes, which no agent sends", h.Name)
	}
	in := int(parent.Fd())
	return u.replace(parent, base, func(draft string) error {
		fd, err := unix.Openat(in, draft, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), path.Join(parent.Name(), base))
		err = u.fill(f, h.Size)
		if err == nil {
			err = u.fmeta(f, h)
		}
		if cerr := f.Close(); err == nil { // some file systems notice only now that they are full
			err = cerr
		}
		if err != nil {
			return err
		}
		return setTime(in, draft, h)
	})
}

// sparse reports whether the tar says where the holes of a file are instead of sending them.
func sparse(h *tar.Header) bool {
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return h.Typeflag == tar.TypeGNUSparse
}

var zeros [bufferSize]byte

// fill writes the content of the entry. Long runs of zeros become holes, so that a file with holes
// takes no more room than where it came from.
func (u *unpacker) fill(f *os.File, size int64) error {
	hole := false // at the end so far
	for at := int64(0); at < size; {
		b := u.buf[:min(size-at, bufferSize)]
		if _, err := io.ReadFull(u.tr, b); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return &Broken{err}
		}
		if hole = bytes.Equal(b, zeros[:len(b)]); !hole {
			if _, err := f.WriteAt(b, at); err != nil {
				return err
			}
		}
		at += int64(len(b))
	}
	if hole {
		return f.Truncate(size)
	}
	return nil
}

// mode is that of an entry, as chmod(2) takes it.
func (u *unpacker) mode(m int64) uint32 {
	if u.Untrusted {
		return uint32(m & 0o777)
	}
	return uint32(m & 0o7777)
}

// fmeta gives an open file owner and mode. The owner comes first, because a new one clears setuid.
func (u *unpacker) fmeta(f *os.File, h *tar.Header) error {
	if u.Owners {
		if err := unix.Fchown(int(f.Fd()), h.Uid, h.Gid); err != nil {
			return &fs.PathError{Op: fmt.Sprintf("chown to %d:%d", h.Uid, h.Gid), Path: f.Name(), Err: err}
		}
	}
	return unix.Fchmod(int(f.Fd()), u.mode(h.Mode))
}

// lmeta gives what is no regular file its owner and times; a link is not followed.
func (u *unpacker) lmeta(in int, name string, h *tar.Header) error {
	if u.Owners {
		if err := unix.Fchownat(in, name, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return &fs.PathError{Op: fmt.Sprintf("chown to %d:%d", h.Uid, h.Gid), Path: h.Name, Err: err}
		}
	}
	return setTime(in, name, h)
}

// setTime gives what has a name in a directory the time of the entry; a link is not followed.
func setTime(in int, name string, h *tar.Header) error {
	t, err := unix.TimeToTimespec(h.ModTime)
	if err != nil {
		return nil // a year that no file system has
	}
	return unix.UtimesNanoAt(in, name, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW)
}

// metaOf is what finish needs of a header, which may be large.
func metaOf(h *tar.Header) *tar.Header {
	return &tar.Header{Typeflag: h.Typeflag, Name: h.Name, Mode: h.Mode, Uid: h.Uid, Gid: h.Gid, ModTime: h.ModTime}
}

// finish gives a directory its attributes.
func (u *unpacker) finish(name string, h *tar.Header) error {
	f, err := u.openDir(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := u.fmeta(f, h); err != nil {
		return err
	}
	return setTime(int(f.Fd()), ".", h)
}
