package tarball

import (
	"archive/tar"
	"cmp"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Place copies the one file or directory in a tar to the path dst, by the rules of docker cp. name
// is what it is called in dst if dst is a directory that exists; "." means that the contents of the
// tar's directory go there.
//
//	dst                      a file                a directory
//	is absent                becomes dst           becomes dst
//	is absent, ends in "/"   refused               becomes dst
//	is a file                replaces dst          refused
//	is a directory           becomes dst/name      becomes dst/name, or is merged with it
//
// Links at the end of dst are followed. Directories above dst are not made. The first entry of
// the tar is what is copied, whatever it is called, and all others must be below it; a guest's is
// no link. Errors are a Refusal, a Broken tar, LeftOut, or of the file system.
func Place(r io.Reader, dst, name string, o Options) error {
	u := o.unpacker(r)
	h, err := u.next()
	if err != nil {
		return err
	}
	if h == nil {
		return refuse("the tar is empty")
	}
	if name != "." && (name == "" || name == ".." || strings.Contains(name, "/")) {
		return refuse("%q cannot be the name of a file", name)
	}
	if o.Untrusted && h.Typeflag == tar.TypeSymlink {
		return refuse("it is a symbolic link to %.80q, and a later copy to %s would write there; -L copies what it leads to",
			h.Linkname, dst)
	}
	isDir := h.Typeflag == tar.TypeDir
	dir, base, err := target(dst, name, isDir)
	if err != nil {
		return err
	}
	from, err := clean(h.Name)
	switch {
	case err != nil:
		return err
	case strings.Contains(from, "/"), from == "." && !isDir:
		return refuse("the tar holds %.80q instead of one file or directory", h.Name)
	}
	u.from = from
	if u.root, err = os.OpenRoot(dir); err != nil {
		return err
	}
	defer u.close()
	if isDir {
		err = u.enter(base, h)
	} else {
		u.alone = true
		err = u.entry(base, h)
	}
	if err != nil {
		return err
	}
	return u.rest()
}

// Unpack unpacks a tar into a directory, or a link to one.
func Unpack(r io.Reader, dir string, o Options) error {
	u := o.unpacker(r)
	fi, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &Refusal{"the directory " + dir + " does not exist; create it first", true}
	case err != nil:
		return err
	case !fi.IsDir():
		return refuse("%s is not a directory; a tar can only be unpacked into a directory", dir)
	}
	if u.root, err = os.OpenRoot(dir); err != nil {
		return err
	}
	defer u.close()
	u.from = "."
	return u.rest()
}

// target finds the directory and the name in it that something is copied to.
func target(dst, name string, isDir bool) (dir, base string, err error) {
	fi, err := os.Stat(dst)
	switch {
	case err == nil && fi.IsDir():
		return dst, name, nil
	case err == nil && isDir:
		return "", "", refuse("%s is a file, and a directory cannot be copied to a file", dst)
	case err == nil && !fi.Mode().IsRegular():
		return "", "", refuse("%s is a device, pipe or socket; copy to a directory or a regular file", dst)
	case errors.Is(err, unix.ENOTDIR):
		return "", "", refuse("a part of the path %s is not a directory", dst)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return "", "", err
	case err != nil && assertsDir(dst) && !isDir:
		return "", "", &Refusal{"the directory " + dst + " does not exist; create it first", true}
	}
	for assertsDir(dst) && dst != "/" && dst != "." {
		dst = strings.TrimSuffix(strings.TrimSuffix(dst, "."), "/")
	}
	if dst, err = followLinks(dst); err != nil {
		return "", "", err
	}
	dir, base = filepath.Split(dst) // not Dir, which would take ".." by its letters
	dir = cmp.Or(dir, ".")
	if base == "" || base == "." || base == ".." {
		return "", "", &Refusal{dst + " does not exist", true}
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return "", "", &Refusal{"the directory " + path.Clean(dir) + " does not exist; create it first", true}
	} else if err != nil {
		return "", "", err
	}
	return dir, base, nil
}

// followLinks follows links at the end of a path, also one that leads to nothing, so that what is
// written through a link is written where it points.
func followLinks(name string) (string, error) {
	for range 40 { // as the kernel does
		to, err := os.Readlink(name)
		if err != nil {
			return name, nil // no link, or nothing there: either will do
		}
		if !filepath.IsAbs(to) {
			dir, _ := filepath.Split(name)
			to = dir + to
		}
		name = to
	}
	return "", &fs.PathError{Op: "open", Path: name, Err: unix.ELOOP}
}

// enter makes or meets the directory that all entries are below from here on.
func (u *unpacker) enter(base string, h *tar.Header) error {
	if base == "." { // the directory is the user's, and keeps its attributes
		return nil
	}
	if err := u.entry(base, h); err != nil {
		return err
	}
	below, err := u.root.OpenRoot(base)
	if err != nil {
		return err
	}
	u.close()
	u.root, u.dirs = below, map[string]*tar.Header{".": metaOf(h)}
	return nil
}
