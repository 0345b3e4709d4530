package tree

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
)

// Steps say how [Descend] walks.
type Steps struct {
	Make      bool           // make the directories that are missing, with mode 0755
	Kind      uint32         // of the last name, if it is made: S_IFDIR, or S_IFREG for an empty file
	SameMount bool           // enter no other mount
	As        func(f func()) // runs f, which makes one name, with the right owner; nil: f()
}

// Descend opens a relative, clean path below top. It goes step by step, each from the
// descriptor of the last one, and follows no link: renaming a directory meanwhile does
// not change the steps already made.
func Descend(top *os.File, rel string, how Steps) (*os.File, error) {
	at, err := Dup(top)
	if err != nil {
		return nil, err
	}
	names := strings.Split(rel, "/")
	for i, name := range names {
		last := i == len(names)-1
		next, err := how.step(at, name, last)
		at.Close()
		if err != nil {
			return nil, err
		}
		at = next
	}
	return at, nil
}

func (how Steps) step(at *os.File, name string, last bool) (*os.File, error) {
	open := unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	if weak.Off(weak.HostLinks) {
		open.Resolve = 0
	}
	kind := how.Kind
	if !last {
		open.Flags |= unix.O_DIRECTORY
		kind = unix.S_IFDIR
	}
	if how.SameMount {
		open.Resolve |= unix.RESOLVE_NO_XDEV
	}
	fd, err := openat2(int(at.Fd()), name, &open)
	if errors.Is(err, unix.ENOENT) && how.Make {
		make := func() { err = MakeEntry(int(at.Fd()), name, kind) }
		if how.As == nil {
			make()
		} else {
			how.As(make)
		}
		if err != nil && !errors.Is(err, unix.EEXIST) { // by another sandbox, meanwhile
			return nil, &os.PathError{Op: "make", Path: name, Err: err}
		}
		fd, err = openat2(int(at.Fd()), name, &open)
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), filepath.Join(at.Name(), name)), nil
}

// MakeEntry makes a directory (kind S_IFDIR) or an empty file in the directory of a
// descriptor, with mode 0755 or 0644 whatever the umask.
func MakeEntry(dir int, name string, kind uint32) error {
	flags, mode := unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, uint32(0o644)
	if kind == unix.S_IFDIR {
		mode = 0o755
		if err := unix.Mkdirat(dir, name, mode); err != nil {
			return err
		}
		flags |= unix.O_DIRECTORY
	} else {
		flags |= unix.O_CREAT | unix.O_EXCL
	}
	fd, err := unix.Openat(dir, name, flags, mode)
	if err != nil {
		return err
	}
	return errors.Join(unix.Fchmod(fd, mode), unix.Close(fd))
}

// Dup returns another descriptor of the same open file.
func Dup(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate the descriptor of %s: %w", f.Name(), err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// NameOf is the path that the kernel gives for a descriptor.
func NameOf(f *os.File) (string, error) { return os.Readlink(ProcFD(int(f.Fd()))) }

// Enter opens a path as a process does whose root is root, and makes the names that
// are missing. It follows links in the names that are there, within root. It also
// returns the path without links, from root.
func Enter(root *os.File, p string, how Steps) (f *os.File, at string, err error) {
	have := p
	fd, err := OpenInRoot(int(root.Fd()), p, unix.O_PATH)
	for errors.Is(err, unix.ENOENT) && have != "/" {
		have = path.Dir(have)
		fd, err = OpenInRoot(int(root.Fd()), have, unix.O_PATH|unix.O_DIRECTORY)
	}
	if err != nil {
		return nil, "", err
	}
	f = os.NewFile(uintptr(fd), have)
	if have != p {
		top := f
		defer top.Close()
		if f, err = Descend(top, strings.TrimPrefix(strings.TrimPrefix(p, have), "/"), how); err != nil {
			return nil, "", err
		}
	}
	above, err := NameOf(root)
	if err == nil {
		at, err = NameOf(f)
	}
	if err != nil {
		f.Close()
		return nil, "", err
	}
	return f, path.Join("/", strings.TrimPrefix(at, above)), nil
}
