package tarball

import (
	"archive/tar"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// A Source is what there is to copy. Make it with Find.
type Source struct {
	Dir    bool     // it is a directory
	Name   string   // of its entry in the tar; "." for the contents of a directory
	Hollow []string // absolute paths of directories that are copied without what is in them
	Hidden []string // absolute paths that are not copied at all

	path string // absolute, without links but at its end
}

// Find looks for what a user has named. A path that ends in "/" must be a directory, and one
// that ends in "/." stands for the contents of a directory. follow follows a link that the path
// names; it is followed in any case before a "/". A relative path begins at the directory of the
// process.
func Find(name string, follow bool) (Source, error) {
	abs, err := filepath.Abs(name) // drops what asserts a directory
	if err != nil {
		return Source{}, err
	}
	stat := os.Lstat
	if follow {
		stat = os.Stat
	}
	fi, err := stat(name) // the kernel follows a link before a "/"
	if err != nil {
		return Source{}, err
	}
	s := Source{Dir: fi.IsDir(), Name: BaseOf(abs)}
	if namesContents(name) {
		s.Name = "."
	}
	if follow || s.Dir {
		s.path, err = filepath.EvalSymlinks(name)
	} else {
		dir, base := filepath.Split(name) // not Dir, which would take ".." by its letters
		s.path, err = filepath.EvalSymlinks(cmp.Or(dir, "."))
		s.path = filepath.Join(s.path, base)
	}
	if err == nil {
		s.path, err = filepath.Abs(s.path)
	}
	return s, err
}

// BaseOf is the name that what is at a path has in a directory it is copied to; "." means that
// its contents are.
func BaseOf(name string) string {
	if base := path.Base(path.Clean(name)); base != "/" && !namesContents(name) {
		return base
	}
	return "."
}

// assertsDir reports whether a path can only be that of a directory.
func assertsDir(name string) bool { return strings.HasSuffix(name, "/") || namesContents(name) }

func namesContents(name string) bool { return name == "." || strings.HasSuffix(name, "/.") }

// Bytes is what the regular files of the source hold. Without a number that can be trusted, as of
// what changes just now, it is a guess.
func (s Source) Bytes() (sum int64) {
	_ = filepath.WalkDir(s.path, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if fi, err := d.Info(); err == nil {
				sum += fi.Size()
			}
		}
		return nil
	})
	return sum
}

// Pack writes the source as a tar. An error of LeftOut means that the tar is complete but for
// what it lists. What goes while Pack runs is not in the tar.
func (s Source) Pack(w io.Writer) error {
	p := packer{tw: tar.NewWriter(w), buf: make([]byte, bufferSize), names: map[file]string{}}
	err := filepath.WalkDir(s.path, func(at string, d fs.DirEntry, err error) error {
		if gone(err) && at != s.path {
			return nil
		}
		if err != nil {
			return err
		}
		if slices.Contains(s.Hidden, at) || strings.HasPrefix(d.Name(), DraftPrefix) {
			return skip(d)
		}
		if err := p.add(at, s.nameOf(at)); err != nil {
			if gone(err) && at != s.path {
				return nil
			}
			return err
		}
		if at != s.path && slices.Contains(s.Hollow, at) {
			return skip(d)
		}
		return nil
	})
	if err == nil {
		err = p.tw.Close()
	}
	if err != nil {
		return shorten(err)
	}
	return p.left.or()
}

// shorten makes an error readable that names a path of more characters than the kernel takes.
func shorten(err error) error {
	const long, kept = 1000, 100
	e, ok := errors.AsType[*fs.PathError](err)
	if !ok || len(e.Path) < long {
		return err
	}
	return &fs.PathError{Op: e.Op, Path: e.Path[:kept] + "…" + e.Path[len(e.Path)-kept:], Err: e.Err}
}

func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) }

func skip(d fs.DirEntry) error {
	if d.IsDir() {
		return fs.SkipDir
	}
	return nil
}

// nameOf is the name of a path in the tar.
func (s Source) nameOf(at string) string {
	below := strings.TrimPrefix(strings.TrimPrefix(at, s.path), "/")
	if below == "" {
		return s.Name
	}
	return s.Name + "/" + below
}

// file is an inode.
type file struct{ dev, ino uint64 }

type packer struct {
	tw    *tar.Writer
	buf   []byte
	names map[file]string // of files that have more than one
	left  LeftOut
}

// add writes one entry.
func (p *packer) add(at, name string) error {
	fi, err := os.Lstat(at)
	if err != nil {
		return err
	}
	h := headerOf(name, fi)
	switch fi.Mode().Type() {
	case 0:
		return p.addFile(at, h)
	case fs.ModeDir:
		h.Typeflag = tar.TypeDir
		h.Name += "/"
	case fs.ModeSymlink:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = os.Readlink(at); err != nil {
			return err
		}
	case fs.ModeNamedPipe:
		h.Typeflag = tar.TypeFifo
	case fs.ModeDevice, fs.ModeDevice | fs.ModeCharDevice:
		h.Typeflag = tar.TypeBlock
		if fi.Mode()&fs.ModeCharDevice != 0 {
			h.Typeflag = tar.TypeChar
		}
		rdev := uint64(fi.Sys().(*syscall.Stat_t).Rdev) //nolint:unconvert // int32 elsewhere
		h.Devmajor, h.Devminor = int64(unix.Major(rdev)), int64(unix.Minor(rdev))
	default:
		p.left = append(p.left, at+" is a socket")
		return nil
	}
	return p.tw.WriteHeader(h)
}

// headerOf is what all entries have. The names of user and group are not asked for: a guest has
// others.
func headerOf(name string, fi fs.FileInfo) *tar.Header {
	st := fi.Sys().(*syscall.Stat_t)
	return &tar.Header{
		Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: fi.ModTime(), Format: tar.FormatPAX,
	}
}

func (p *packer) addFile(at string, h *tar.Header) error {
	fd, err := unix.Open(at, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: at, Err: err}
	}
	unix.SetNonblock(fd, false) //nolint:errcheck // means nothing for regular files but to the poller
	f := os.NewFile(uintptr(fd), at)
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() {
		return fmt.Errorf("%s was replaced while it was read; try again when no program writes to it", at)
	}
	h = headerOf(h.Name, fi)
	h.Typeflag = tar.TypeReg
	if st := fi.Sys().(*syscall.Stat_t); st.Nlink > 1 {
		inode := file{uint64(st.Dev), st.Ino} //nolint:unconvert // int32 elsewhere
		if first, ok := p.names[inode]; ok {
			h.Typeflag, h.Linkname = tar.TypeLink, first
			return p.tw.WriteHeader(h)
		}
		p.names[inode] = h.Name
	}
	h.Size = fi.Size()
	if h.Size == 0 {
		return p.addUnsized(f, h)
	}
	if err := p.tw.WriteHeader(h); err != nil {
		return err
	}
	n, err := io.CopyBuffer(struct{ io.Writer }{p.tw}, io.LimitReader(f, h.Size), p.buf)
	if err == nil && n < h.Size {
		err = fmt.Errorf("%s became shorter while it was read: it had %d bytes; try again when no program writes to it", at, h.Size)
	}
	return err
}

// maxUnsized bounds a file whose size the kernel does not know in advance, in bytes.
const maxUnsized = 1 << 20

// addUnsized adds a file whose size is given as 0: it is empty, or it is in /proc.
func (p *packer) addUnsized(f *os.File, h *tar.Header) error {
	var content bytes.Buffer
	if _, err := io.CopyN(&content, f, maxUnsized+1); err != nil && err != io.EOF {
		return err
	}
	if content.Len() > maxUnsized {
		return fmt.Errorf("%s has more than %d bytes and no size; copy it with cat", f.Name(), maxUnsized)
	}
	h.Size = int64(content.Len())
	if err := p.tw.WriteHeader(h); err != nil {
		return err
	}
	_, err := content.WriteTo(p.tw)
	return err
}
