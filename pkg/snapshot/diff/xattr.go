package diff

import (
	"errors"
	"io/fs"
	"maps"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// maxXattrs bounds a list of attributes and the value of one, in bytes
// (XATTR_LIST_MAX, XATTR_SIZE_MAX in xattr(7)).
const maxXattrs = 64 << 10

// sameXattrs compares the extended attributes of a name in two directories,
// without those of overlayfs.
func sameXattrs(x, y int, name string) (bool, error) {
	a, err := xattrsAt(x, name)
	if err != nil {
		return false, err
	}
	b, err := xattrsAt(y, name)
	return maps.Equal(a, b), err
}

func xattrsAt(fd int, name string) (map[string]string, error) {
	path := tree.ProcFD(fd) + "/" + name // there is no call that takes a directory
	buf := make([]byte, maxXattrs)
	n, err := unix.Llistxattr(path, buf)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	if err != nil {
		return nil, &fs.PathError{Op: "llistxattr", Path: name, Err: err}
	}
	all := map[string]string{}
	list := string(buf[:n])
	for key := range strings.SplitSeq(strings.TrimSuffix(list, "\x00"), "\x00") {
		if key == "" || strings.HasPrefix(key, "trusted.overlay.") {
			continue
		}
		n, err := unix.Lgetxattr(path, key, buf)
		if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, &fs.PathError{Op: "lgetxattr", Path: name, Err: err}
		}
		all[key] = string(buf[:n])
	}
	return all, nil
}
