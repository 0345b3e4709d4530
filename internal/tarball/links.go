package tarball

import (
	"archive/tar"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// symlink makes a link, unless it is a guest's and leads out of root. One that leads into a
// directory and out of it again ("sub/../a") waits for the end of the tar, when it is known whether
// "sub" is a directory: behind a link, ".." leads elsewhere.
func (u *unpacker) symlink(parent *os.File, base, name string, h *tar.Header) error {
	if u.Untrusted && escapes(name, h.Linkname, func(string) bool { return true }) {
		u.outside(name, h.Linkname)
		return nil
	}
	if u.Untrusted && escapes(name, h.Linkname, u.isDir) {
		late := metaOf(h)
		late.Linkname = h.Linkname
		u.late[name] = late
		return nil
	}
	in := int(parent.Fd())
	return u.replace(parent, base, func(draft string) error {
		if err := unix.Symlinkat(h.Linkname, in, draft); err != nil {
			return err
		}
		return u.lmeta(in, draft, h)
	})
}

// lateLinks makes the links that are made in the end.
func (u *unpacker) lateLinks() error {
	for _, name := range slices.Sorted(maps.Keys(u.late)) {
		h := u.late[name]
		if escapes(name, h.Linkname, u.isDir) {
			u.outside(name, h.Linkname)
		} else if err := u.entry(name, h); err != nil {
			return err
		}
	}
	return nil
}

// escapes reports whether a link by a name in root may lead out of root. ".." leads to the
// directory above only behind a directory, and not behind a link.
func escapes(name, to string, isDir func(string) bool) bool {
	if path.IsAbs(to) {
		return true
	}
	at, named := path.Dir(name), false
	for part := range strings.SplitSeq(to, "/") {
		switch part {
		case "", ".":
		case "..":
			if at == "." || named && !isDir(at) {
				return true
			}
			at = path.Dir(at)
		default:
			at, named = path.Join(at, part), true
		}
	}
	return false
}

// isDir reports whether a name in root is a directory, without a link on the way.
func (u *unpacker) isDir(name string) bool {
	f, err := u.openDir(name)
	if err != nil {
		return false
	}
	f.Close()
	return true
}

func (u *unpacker) outside(name, to string) {
	u.left = append(u.left, fmt.Sprintf("%.80q is a link to %.80q, which is outside of what is copied", name, to))
}

// link makes a hard link to an earlier entry.
func (u *unpacker) link(parent *os.File, base, at, to string) error {
	first, err := u.below(to)
	if err != nil {
		return err
	}
	dir, err := u.openDir(path.Dir(first))
	if errors.Is(err, fs.ErrNotExist) && u.Untrusted {
		return u.unlinked(at, to)
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	from, name, in := int(dir.Fd()), path.Base(first), int(parent.Fd())
	var old, have unix.Stat_t
	err = unix.Fstatat(from, name, &old, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) && u.Untrusted {
		return u.unlinked(at, to)
	}
	if err == nil && unix.Fstatat(in, base, &have, unix.AT_SYMLINK_NOFOLLOW) == nil && old.Dev == have.Dev && old.Ino == have.Ino {
		return nil // rename(2) would do nothing, and leave the draft
	}
	if err == nil && old.Mode&unix.S_IFMT == unix.S_IFLNK { // a link leads elsewhere from here
		target := make([]byte, maxName)
		n, err := unix.Readlinkat(from, name, target)
		if err != nil {
			return err
		}
		if u.Untrusted && escapes(at, string(target[:n]), u.isDir) {
			u.outside(at, string(target[:n]))
			return nil
		}
	}
	return u.replace(parent, base, func(draft string) error { return unix.Linkat(from, name, in, draft, 0) })
}

// unlinked notes that a hard link is left out with what it is a link to.
func (u *unpacker) unlinked(at, to string) error {
	u.left = append(u.left, fmt.Sprintf("%.80q is a hard link to %.80q, which was not copied", at, to))
	return nil
}
