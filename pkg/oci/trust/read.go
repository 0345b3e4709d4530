package trust

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A found is a store of the guest.
type found struct {
	target string // its path, without links
	data   []byte
}

// open reads a store. Links are followed as a process does whose root is the guest's.
//
// It is openat2(2) with RESOLVE_IN_ROOT and not os.Root, which takes an absolute link for an
// escape: RHEL's /etc/pki/tls/certs/ca-bundle.crt is one.
func (p *planner) open(name string) (*found, error) {
	at, err := p.resolve(name, unix.O_PATH, 0)
	if err != nil {
		return nil, err
	}
	defer at.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(at.Fd()), &st); err != nil {
		return nil, os.NewSyscallError("fstat", err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, errors.New("not a regular file")
	case st.Mode&0o004 == 0:
		// The copy can be read by all users of the guest.
		return nil, errors.New("not all users of the guest may read it")
	case st.Size > maxFile:
		return nil, fmt.Errorf("%d bytes, more than %d MiB", st.Size, maxFile>>20)
	case p.read+st.Size > maxRead:
		return nil, fmt.Errorf("all stores together have more than %d MiB", maxRead>>20)
	}
	target, err := p.target(at, &st)
	if err != nil {
		return nil, err
	}
	// Only now it is opened to be read. A fifo would block, and a device would act.
	fd, err := unix.Open(procFD(at), unix.O_RDONLY|unix.O_NOATIME|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("open", err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	p.read += st.Size
	b, err := io.ReadAll(io.LimitReader(f, st.Size)) // nobody makes it longer meanwhile
	if err != nil {
		return nil, err
	}
	return &found{target, b}, nil
}

// target is the path of an open file, from the root. The kernel's name for the file must
// lead to it without a link.
func (p *planner) target(at *os.File, st *unix.Stat_t) (string, error) {
	target, err := p.within(at)
	if err != nil {
		return "", err
	}
	if err := checkTarget(target); err != nil {
		return "", err
	}
	again, err := p.resolve(target, unix.O_PATH, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return "", err
	}
	defer again.Close()
	var other unix.Stat_t
	if err := unix.Fstat(int(again.Fd()), &other); err != nil || other.Dev != st.Dev || other.Ino != st.Ino {
		return "", fmt.Errorf("%.200q is another file", target)
	}
	return target, nil
}

// within is the kernel's name for an open file, from the root.
func (p *planner) within(at *os.File) (string, error) {
	name, err := nameOf(at)
	if err != nil {
		return "", err
	}
	target, ok := strings.CutPrefix(name, strings.TrimSuffix(p.base, "/"))
	if !ok || !strings.HasPrefix(target, "/") {
		return "", errors.New("it is not in the root")
	}
	return target, nil
}

// place is where a mount at name will be: the part of name that exists, without links, and
// the rest.
func (p *planner) place(name string) string {
	name = path.Clean(name)
	for dir, rest := name, ""; dir != "/" && dir != "."; dir, rest = path.Dir(dir), path.Join(path.Base(dir), rest) {
		f, err := p.resolve(dir, unix.O_PATH, 0)
		if err != nil {
			continue
		}
		at, err := p.within(f)
		f.Close()
		if err == nil {
			return path.Join(at, rest)
		}
	}
	return name
}

// names are the names in a directory of the guest that begin with prefix, sorted. More than
// maxNames are an error, and so are more than maxListed of all.
func (p *planner) names(dir, prefix string) ([]string, error) {
	f, err := p.resolve(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOATIME, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(maxListed + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if len(names) > maxListed {
		return nil, fmt.Errorf("more than %d names", maxListed)
	}
	names = slices.DeleteFunc(names, func(name string) bool { return !strings.HasPrefix(name, prefix) })
	if len(names) > maxNames {
		return nil, fmt.Errorf("more than %d names %s*", maxNames, prefix)
	}
	slices.Sort(names)
	return names, nil
}

// maxTries bounds how often the kernel may ask for another try: it does when something was
// renamed anywhere on the host while it followed a "..".
const maxTries = 1000

// resolve opens a path within the root, on the root's own mount.
func (p *planner) resolve(name string, flags, more uint64) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: more | unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	var err error
	for range maxTries {
		var fd int
		if fd, err = unix.Openat2(int(p.root.Fd()), name, &how); err == nil {
			return os.NewFile(uintptr(fd), name), nil
		}
		if err != unix.EAGAIN && err != unix.EINTR { //nolint:errorlint // openat2 returns an Errno
			break
		}
	}
	return nil, os.NewSyscallError("openat2", err)
}

// exists reports whether anything is at a path.
func (p *planner) exists(name string) bool {
	f, err := p.resolve(name, unix.O_PATH, 0)
	if err != nil {
		return !isAbsent(err)
	}
	f.Close()
	return true
}

// isAbsent reports whether an error says that there is nothing.
func isAbsent(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR)
}

// nameOf is the path that the kernel gives for an open file.
func nameOf(f *os.File) (string, error) { return os.Readlink(procFD(f)) }

func procFD(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }
