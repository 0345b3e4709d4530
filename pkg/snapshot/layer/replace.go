package layer

import (
	"errors"
	"io/fs"
	"maps"
	"path"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// replacing makes an entry, and removes an earlier one of the same name: the last in
// the tar wins, also over a directory.
func (x *extractor) replacing(parent int, name string, make func() error) error {
	err := make()
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	base := path.Base(name)
	switch err := unix.Unlinkat(parent, base, 0); {
	case errors.Is(err, unix.EISDIR):
		if err := x.removeDir(parent, name); err != nil {
			return err
		}
	case err != nil:
		return err
	}
	return make()
}

// maxReplaced bounds the directories with something in them that a layer makes and then
// replaces: each costs a look at all directories of the layer.
const maxReplaced = 1000

// removeDir removes a directory that the layer has made, and forgets what was to be done
// with it and below it.
func (x *extractor) removeDir(parent int, name string) error {
	err := unix.Unlinkat(parent, path.Base(name), unix.AT_REMOVEDIR)
	below := func(n string) bool { return n == name }
	if errors.Is(err, unix.ENOTEMPTY) {
		if x.replaced++; x.replaced > maxReplaced {
			return errs.New(errs.Invalid, "the layer makes more than %d directories that it then replaces by something else", maxReplaced)
		}
		below = func(n string) bool { return n == name || strings.HasPrefix(n, name+"/") }
		err = tree.RemoveAt(parent, path.Base(name))
		if errors.Is(err, unix.ENOSYS) { // it would rename, which the child may not
			return errs.New(errs.Invalid, "the layer replaces %.80q by something else, a directory nested too deeply for that", name)
		}
		maps.DeleteFunc(x.times, func(n string, _ time.Time) bool { return below(n) })
		maps.DeleteFunc(x.hides, func(n string, _ bool) bool { return below(n) })
	}
	delete(x.times, name)
	delete(x.hides, name)
	for n, fd := range x.dirs {
		if below(n) {
			unix.Close(fd)
			delete(x.dirs, n)
		}
	}
	return err
}

// dirOver handles a directory whose name is taken. An existing directory stays. All else is
// replaced, and a whiteout by a directory that hides the layers below it.
func (x *extractor) dirOver(parent int, base, name string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(parent, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return nil
	}
	if err := unix.Unlinkat(parent, base, 0); err != nil {
		return err
	}
	if err := unix.Mkdirat(parent, base, 0o700); err != nil {
		return err
	}
	if isWhiteout(&st) {
		x.hides[name] = true
	}
	return nil
}
