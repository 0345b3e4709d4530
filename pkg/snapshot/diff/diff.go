// Package diff compares two trees of files that have the same layers below them.
//
// A tree is what overlayfs would show: a directory that one sandbox has written
// (its upper), on top of directories that never change (the lowers, topmost
// first). Nothing is mounted; the package reads uppers and lowers as overlayfs
// does, whiteouts and opaque directories included.
//
// What surprises: only names in the two uppers are compared, and no contents. In the
// lowers it reads only the names that a change hides or uncovers.
package diff

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// The kinds of a change, as `docker diff` calls them.
const (
	Added   = "A"
	Changed = "C" // also a directory in which something has changed
	Deleted = "D" // with everything in it
)

// Bounds of a comparison: guests wrote what is compared.
const (
	maxDepth   = 256     // directories in one another
	maxOpen    = 8192    // descriptors: of each directory one for each layer that has it
	maxChanges = 1 << 20 // changes
)

// Trees calls emit for each difference between the tree with the upper of and the
// tree with the upper base, or the lowers alone if base is empty. Paths are
// absolute and come in order, a directory before what is in it. A path for which
// hide returns true is left out with everything below it.
//
// A file counts as unchanged if its type, owner, mode, size, time of change, link
// target and extended attributes are the same. Changes that a guest makes meanwhile may
// or may not be reported. An upper that does not exist is fs.ErrNotExist with its path.
// A tree that is too deep is errs.Unsupported, and too many changes are errs.Exhausted.
func Trees(ctx context.Context, of, base string, lowers []string, hide func(path string) bool, emit func(kind, path string) error) error {
	d := differ{ctx: ctx, hide: hide, emit: emit, held: tree.Names{Max: tree.MaxNames}}
	defer d.closeFrom(0)
	a, err := d.upper(of)
	if err != nil {
		return err
	}
	var b node
	if base != "" {
		if b, err = d.upper(base); err != nil {
			return err
		}
	}
	a.below, b.below = true, true
	var below []int
	for _, dir := range lowers {
		fd, err := d.open(unix.AT_FDCWD, dir)
		if err != nil {
			return err
		}
		below = append(below, fd)
	}
	return d.directory("", a, b, below)
}

// A node is one name in one of the trees: absent (neither dir nor file), a file,
// or a directory.
type node struct {
	dir, file bool
	stat      unix.Stat_t
	at        int // the directory that a file is in

	// For a directory: own is set if the tree's upper has it, which is then open as
	// upper, and below says whether the layers show through.
	upper int
	own   bool
	below bool
}

func (n node) absent() bool { return !n.dir && !n.file }

type differ struct {
	ctx   context.Context
	hide  func(path string) bool
	emit  func(kind, path string) error
	fds   []int      // open directories
	above []*above   // the directories on the way down, outermost first
	count int        // changes that were emitted
	held  tree.Names // the names in the directories on the way down
}

// above is a directory that is reported before the first change in it.
type above struct {
	path     string
	reported bool
}

// upper opens the top of a tree.
func (d *differ) upper(dir string) (node, error) {
	fd, err := d.open(unix.AT_FDCWD, dir)
	return node{dir: true, upper: fd, own: true}, err
}

func (d *differ) open(at int, name string) (int, error) {
	if len(d.fds) >= maxOpen {
		return -1, errs.New(errs.Unsupported, "directories are nested too deeply for so many layers; the comparison stops here")
	}
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NOATIME, 0)
	if err != nil {
		return -1, &fs.PathError{Op: "openat", Path: name, Err: err}
	}
	d.fds = append(d.fds, fd)
	return fd, nil
}

func (d *differ) closeFrom(n int) {
	for _, fd := range d.fds[n:] {
		unix.Close(fd) //nolint:errcheck // only read from
	}
	d.fds = d.fds[:n]
}

// report emits a change, and before it the directories that it lies in.
func (d *differ) report(kind, path string) error {
	for _, up := range d.above {
		if !up.reported && up.path != "" {
			up.reported = true
			if err := d.reportOne(Changed, up.path); err != nil {
				return err
			}
		}
	}
	return d.reportOne(kind, path)
}

func (d *differ) reportOne(kind, path string) error {
	if d.count++; d.count > maxChanges {
		return errs.New(errs.Exhausted, "there are more than %d changes; the comparison stops here", maxChanges)
	}
	return d.emit(kind, path)
}

// directory compares the contents of two directories; either may be absent.
func (d *differ) directory(path string, a, b node, lowers []int) error {
	if len(d.above) > maxDepth {
		return errs.New(errs.Unsupported, "directories are nested deeper than %d; the comparison stops here", maxDepth)
	}
	before := d.held.Bytes
	names, err := d.names(a, b, lowers)
	if err != nil {
		return err
	}
	defer func() { d.held.Bytes = before }()
	for _, name := range names {
		p := path + "/" + name
		if d.hide(p) {
			continue
		}
		if err := d.ctx.Err(); err != nil {
			return context.Cause(d.ctx)
		}
		n := len(d.fds)
		if err := d.entry(p, name, a, b, lowers); err != nil {
			return err
		}
		d.closeFrom(n)
	}
	return nil
}

// names lists, in order, the names that may differ: those in either upper, and if
// only one of the trees shows the layers, those in the layers.
func (d *differ) names(a, b node, lowers []int) ([]string, error) {
	var from []int
	if a.own {
		from = append(from, a.upper)
	}
	if b.own {
		from = append(from, b.upper)
	}
	if a.below != b.below {
		from = append(from, lowers...)
	}
	var all []string
	for _, fd := range from {
		dup, err := unix.Openat(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOATIME, 0)
		if err != nil {
			return nil, &fs.PathError{Op: "openat", Path: ".", Err: err}
		}
		f := os.NewFile(uintptr(dup), ".")
		all, err = d.held.Read(f, all)
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// entry compares one name.
func (d *differ) entry(path, name string, a, b node, lowers []int) error {
	base, inside, err := d.lower(lowers, name)
	if err != nil {
		return err
	}
	x, err := d.find(a, name, base)
	if err != nil {
		return err
	}
	y, err := d.find(b, name, base)
	if err != nil {
		return err
	}
	if !x.own && !y.own && x.at == y.at && x.below == y.below && x.absent() == y.absent() {
		return nil // both are the layers'
	}
	up := &above{path: path}
	switch {
	case x.absent() && y.absent():
		return nil
	case x.absent():
		return d.report(Deleted, path)
	case y.absent():
		err, up.reported = d.report(Added, path), true
		y = node{} // it may be a whiteout
	case x.dir != y.dir:
		err, up.reported = d.report(Changed, path), true
		y = node{} // everything in it now is new
	default:
		unchanged, serr := same(name, x, y)
		if serr != nil {
			return serr
		}
		if !unchanged {
			err, up.reported = d.report(Changed, path), true
		}
	}
	if err != nil || !x.dir {
		return err
	}
	d.above = append(d.above, up)
	err = d.directory(path, x, y, inside)
	d.above = d.above[:len(d.above)-1]
	return err
}

// lower finds a name in the layers as overlayfs does, the topmost first, and
// returns the directories that are merged if it is one.
func (d *differ) lower(lowers []int, name string) (n node, inside []int, err error) {
	for _, fd := range lowers {
		found, err := d.entryOf(fd, name)
		switch {
		case err != nil:
			return node{}, nil, err
		case found.absent() && found.own: // a whiteout
			return n, inside, nil
		case found.absent():
			continue
		case found.file:
			if n.absent() {
				found.own = false
				n = found
			}
			return n, inside, nil
		}
		if n.absent() {
			n = node{dir: true, stat: found.stat, at: fd, below: true}
		}
		inside = append(inside, found.upper)
		if !found.below { // opaque
			return n, inside, nil
		}
	}
	return n, inside, nil
}

// entryOf finds a name in one directory. A whiteout is absent with own set.
func (d *differ) entryOf(fd int, name string) (n node, err error) {
	n.at = fd
	err = unix.Fstatat(fd, name, &n.stat, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		return node{}, nil
	case err != nil:
		return n, &fs.PathError{Op: "fstatat", Path: name, Err: err}
	}
	n.own = true
	switch n.stat.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		if n.upper, err = d.open(fd, name); err != nil {
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
				return node{}, nil // it was something else a moment ago
			}
			return n, err
		}
		var mark [2]byte
		size, err := unix.Fgetxattr(n.upper, "trusted.overlay.opaque", mark[:])
		n.dir, n.below = true, err != nil || size != 1 || mark[0] != 'y'
	case unix.S_IFCHR:
		n.file = n.stat.Rdev != 0
	default:
		n.file = true
	}
	return n, nil
}

// find finds a name in a tree whose layers have base.
func (d *differ) find(in node, name string, base node) (n node, err error) {
	if in.own {
		if n, err = d.entryOf(in.upper, name); err != nil || n.own {
			n.below = n.below && in.below && base.dir
			return n, err
		}
	}
	if in.below {
		return base, nil
	}
	return node{}, nil
}

// same reports whether nothing about a name has changed.
func same(name string, x, y node) (bool, error) {
	a, b := &x.stat, &y.stat
	if a.Mode != b.Mode || a.Uid != b.Uid || a.Gid != b.Gid || a.Rdev != b.Rdev {
		return false, nil
	}
	if !x.dir && (a.Size != b.Size || a.Mtim != b.Mtim) {
		return false, nil
	}
	if a.Mode&unix.S_IFMT == unix.S_IFLNK {
		p, err := readlinkAt(x.at, name)
		q, err2 := readlinkAt(y.at, name)
		return p == q, errors.Join(err, err2)
	}
	if x.dir { // reading its attributes costs more than it is worth
		return true, nil
	}
	return sameXattrs(x.at, y.at, name)
}

func readlinkAt(fd int, name string) (string, error) {
	var b [4096]byte
	n, err := unix.Readlinkat(fd, name, b[:])
	if err != nil {
		return "", &fs.PathError{Op: "readlinkat", Path: name, Err: err}
	}
	return string(b[:n]), nil
}
