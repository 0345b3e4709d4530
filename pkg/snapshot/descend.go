package snapshot

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"golang.org/x/sys/unix"
)

// steps say how descend walks.
type steps struct {
	make      bool           // what is missing, directories with mode 0755
	kind      uint32         // of the last that is made: S_IFDIR, or S_IFREG for an empty file
	sameMount bool           // what is mounted below is not entered
	as        func(f func()) // makes; nil: f()
}

// descend opens what lies at a relative, clean path below top. It goes step by
// step, each from the descriptor of the last, and follows no link: who changes
// names at the same time changes nothing about what has been passed.
func descend(top *os.File, rel string, how steps) (*os.File, error) {
	at, err := dup(top)
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

func (how steps) step(at *os.File, name string, last bool) (*os.File, error) {
	open := unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	kind := how.kind
	if !last {
		open.Flags |= unix.O_DIRECTORY
		kind = unix.S_IFDIR
	}
	if how.sameMount {
		open.Resolve |= unix.RESOLVE_NO_XDEV
	}
	fd, err := openat2(int(at.Fd()), name, &open)
	if errors.Is(err, unix.ENOENT) && how.make {
		make := func() { err = makeEntry(int(at.Fd()), name, kind) }
		if how.as == nil {
			make()
		} else {
			how.as(make)
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

// makeEntry makes a directory or an empty file, whatever the umask.
func makeEntry(dir int, name string, kind uint32) error {
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

func dup(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate the descriptor of %s: %w", f.Name(), err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// nameOf is where the kernel says that a descriptor is.
func nameOf(f *os.File) (string, error) { return os.Readlink(procFD(int(f.Fd()))) }

// enter opens what a path means to who has root as root, and makes what is missing
// of it. Links are followed as far as something is there, within root. It returns
// where that is.
func enter(root *os.File, p string, how steps) (f *os.File, at string, err error) {
	have := p
	fd, err := openInRoot(int(root.Fd()), p, unix.O_PATH)
	for errors.Is(err, unix.ENOENT) && have != "/" {
		have = path.Dir(have)
		fd, err = openInRoot(int(root.Fd()), have, unix.O_PATH|unix.O_DIRECTORY)
	}
	if err != nil {
		return nil, "", err
	}
	f = os.NewFile(uintptr(fd), have)
	if have != p {
		top := f
		defer top.Close()
		if f, err = descend(top, strings.TrimPrefix(strings.TrimPrefix(p, have), "/"), how); err != nil {
			return nil, "", err
		}
	}
	above, err := nameOf(root)
	if err == nil {
		at, err = nameOf(f)
	}
	if err != nil {
		f.Close()
		return nil, "", err
	}
	return f, path.Join("/", strings.TrimPrefix(at, above)), nil
}

// badPath says what a client may know of why a path can not be mounted.
func badPath(err error, wire, what string) error {
	if _, ok := errors.AsType[*errs.Error](err); ok {
		return err
	}
	why := "it can not be opened; the daemon's log says why"
	switch {
	case errors.Is(err, unix.ELOOP):
		why = "it leads through a symbolic link, and links are not followed there"
	case errors.Is(err, unix.ENOTDIR):
		why = "a part of it is no directory"
	case errors.Is(err, unix.EXDEV):
		why = "it leads into another file system"
	case errors.Is(err, unix.ENOENT):
		why = "there is no such file or directory"
	case errors.Is(err, unix.ENAMETOOLONG):
		why = "it, or a part of it, is too long"
	case errors.Is(err, unix.EROFS):
		why = "it does not exist and can not be made: what it lies on is read-only"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errs.Wire(errs.Wrap(err, errs.Exhausted, "%s: it does not exist and can not be made: what it lies on is full", what), wire)
	}
	return errs.Wire(errs.Wrap(err, errs.Invalid, "%s: %s", what, why), wire)
}
