// Package tree opens, walks and removes directories that somebody else has
// filled: a guest, or the author of an image.
//
//	[OpenBeneath], [OpenInRoot]   one name below a directory
//	[Descend], [Enter]            step by step, making what is missing
//	[Walk], [Names], [Inodes]     all names, with bounds on what is held in memory
//	[Remove], [RemoveAt]          all names, however deep
//
// What surprises: nothing here trusts a path. Each step starts at the descriptor
// of the last one and follows no symbolic link (but for [OpenInRoot] and [Enter],
// which follow links within their root). So a directory that is renamed meanwhile
// leads nowhere else.
package tree

import (
	"errors"
	"io/fs"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// OpenBeneath opens a path that a guest or a tar has named, below the directory
// of the descriptor dir. It leaves dir nowhere, follows no link and enters no
// other mount. flags are those of open(2).
func OpenBeneath(dir int, path string, flags int) (int, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags | unix.O_CLOEXEC),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	return openat2(dir, path, &how)
}

// OpenInRoot opens a path as a process does whose root is dir: links are followed, but
// do not lead out of dir.
func OpenInRoot(dir int, path string, flags int) (int, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags | unix.O_CLOEXEC),
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	return openat2(dir, path, &how)
}

// openat2 is openat2(2), repeated if the kernel asks for that.
func openat2(dir int, path string, how *unix.OpenHow) (int, error) {
	for {
		fd, err := unix.Openat2(dir, path, how)
		switch err {
		case nil:
			return fd, nil
		case unix.EINTR, unix.EAGAIN: // EAGAIN: a rename elsewhere raced with ".."
			continue
		}
		return -1, &fs.PathError{Op: "openat2", Path: path, Err: err}
	}
}

// OpenDir opens a directory for reading, by its name in the directory of a
// descriptor.
func OpenDir(parent int, name string) (*os.File, error) {
	fd, err := unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "openat", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// WithDir runs f on a descriptor of the directory path.
func WithDir(path string, f func(fd int) error) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	return errors.Join(f(fd), unix.Close(fd))
}

// Exists reports whether anything has this name; a link counts, wherever it leads.
func Exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// IsMountPoint reports whether a file system is mounted on dir.
func IsMountPoint(dir string) (bool, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st); err != nil {
		return false, &os.PathError{Op: "statx", Path: dir, Err: err}
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// ProcFD is a path that leads to what a descriptor of this process has open, for
// calls that take no descriptor.
func ProcFD(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }
