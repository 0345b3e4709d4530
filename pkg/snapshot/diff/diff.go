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
	maxOpen    = 2048     // about how many descriptors are open: of each directory one for each layer that has it
	maxChanges = 1 << 20  // changes
	maxPath    = 16 << 10 // bytes of a path: a system call takes 4,096 (PATH_MAX)
)

// Trees calls emit for each difference between the tree with the upper of and the
// tree with the upper base, or the lowers alone if base is empty. Paths are
// absolute and come in order, a directory before what is in it. A path for which
// hide returns true is left out with everything below it. What has a path of more than
// maxPath bytes is not reported, but the directories above it are: else a guest that
// nests directories would cause an output as large as the square of their number.
//
// A file counts as unchanged if its type, owner, mode, size, time of change, link
// target and extended attributes are the same. Changes that a guest makes meanwhile may
// or may not be reported. An upper that does not exist is fs.ErrNotExist with its path.
// Too many changes, and more names in nested directories than fit into tree.MaxNames, are
// errs.Exhausted; that is some 400,000 directories in one another.
func Trees(ctx context.Context, of, base string, lowers []string, hide func(path string) bool, emit func(kind, path string) error) error {
	d := differ{ctx: ctx, hide: hide, emit: emit, held: tree.Names{Max: tree.MaxNames}, maxOpen: maxOpen}
	top := &dirs{}
	if err := d.openTop(top, of, base, lowers); err != nil {
		d.close(top)
		return err
	}
	return d.walk(top)
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

// dirs are one name in both trees and in the layers. Those that are directories are open.
type dirs struct {
	a, b   node
	lowers []int // the layers that have it, the topmost first
	all    []int // the descriptors
}

type differ struct {
	ctx   context.Context
	hide  func(path string) bool
	emit  func(kind, path string) error
	count int        // changes that were emitted
	held  tree.Names // the names in the directories on the way down
	descent

	maxOpen, fds int // the most descriptors, and how many are open
}

// openTop opens the tops of the trees and of the layers.
func (d *differ) openTop(top *dirs, of, base string, lowers []string) (err error) {
	upper := func(n *node, dir string) error {
		n.dir, n.below = true, true
		if dir != "" {
			n.upper, err = d.open(top, unix.AT_FDCWD, dir)
			n.own = true
		}
		return err
	}
	if err := upper(&top.a, of); err != nil {
		return err
	}
	if err := upper(&top.b, base); err != nil {
		return err
	}
	for _, dir := range lowers {
		fd, err := d.open(top, unix.AT_FDCWD, dir)
		if err != nil {
			return err
		}
		top.lowers = append(top.lowers, fd)
	}
	return nil
}

// open opens a directory as one of in.
func (d *differ) open(in *dirs, at int, name string) (int, error) {
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NOATIME, 0)
	if err != nil {
		return -1, &fs.PathError{Op: "openat", Path: name, Err: err}
	}
	in.all = append(in.all, fd)
	d.fds++
	return fd, nil
}

func (d *differ) close(in *dirs) {
	for _, fd := range in.all {
		unix.Close(fd) //nolint:errcheck // only read from
	}
	d.fds -= len(in.all)
	in.all = nil
}

// report emits the change of a name in the present directory, and before it the
// directories that it lies in. One whose path is too long is not emitted itself.
func (d *differ) report(kind, name string, long bool) error {
	for ; d.told < d.short; d.told++ {
		if err := d.reportOne(Changed, string(d.path[:d.levels[d.told].end])); err != nil {
			return err
		}
	}
	if long {
		return nil
	}
	return d.reportOne(kind, d.pathOf(name))
}

func (d *differ) reportOne(kind, path string) error {
	if d.count++; d.count > maxChanges {
		return errs.New(errs.Exhausted, "there are more than %d changes; the comparison stops here", maxChanges)
	}
	return d.emit(kind, path)
}

// walk compares two trees from their tops on, and closes them.
func (d *differ) walk(top *dirs) error {
	defer d.leaveAll()
	if err := d.enter(level{told: true}, top); err != nil {
		return err
	}
	for len(d.levels) > 0 {
		l := d.present()
		if len(l.names) == 0 {
			d.leave()
			continue
		}
		name := l.names[0]
		l.names = l.names[1:]
		long := d.tooLong(name)
		if long && d.told == d.short || !long && d.hide(d.pathOf(name)) {
			continue // nothing in it would be reported
		}
		if err := d.ctx.Err(); err != nil {
			return context.Cause(d.ctx)
		}
		in, err := d.reach()
		if err != nil {
			return err
		}
		if in == nil { // the directory is gone
			d.leave()
			continue
		}
		if err := d.entry(in, name, long); err != nil {
			return err
		}
	}
	return nil
}

// names lists, in order, the names that may differ: those in either upper, and if
// only one of the trees shows the layers, those in the layers.
func (d *differ) names(in *dirs) ([]string, error) {
	var from []int
	if in.a.own {
		from = append(from, in.a.upper)
	}
	if in.b.own {
		from = append(from, in.b.upper)
	}
	if in.a.below != in.b.below {
		from = append(from, in.lowers...)
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

// entry compares one name, and enters it if it is a directory in which there may be
// changes.
func (d *differ) entry(in *dirs, name string, long bool) error {
	at, err := d.find(in, name)
	if err != nil {
		return err
	}
	l, enter, err := d.compare(at, name, long)
	if err != nil || !enter {
		d.close(at)
		return err
	}
	return d.enter(l, at)
}

// compare reports the change of one name itself. It says whether to enter it, and as what.
func (d *differ) compare(at *dirs, name string, long bool) (l level, enter bool, err error) {
	l = level{name: name, long: long}
	x, y := at.a, at.b
	if !x.own && !y.own && x.at == y.at && x.below == y.below && x.absent() == y.absent() {
		return l, false, nil // both are the layers'
	}
	kind := ""
	switch {
	case x.absent() && y.absent():
		return l, false, nil
	case x.absent():
		return l, false, d.report(Deleted, name, long)
	case y.absent():
		kind, l.added = Added, true // y may be a whiteout
	case x.dir != y.dir:
		kind, l.added = Changed, true
	default:
		unchanged, err := same(name, x, y)
		if err != nil {
			return l, false, err
		}
		if !unchanged {
			kind = Changed
		}
	}
	if kind == "" {
		return l, x.dir, nil
	}
	l.told = true
	// Below a path that is too long it is enough to know of one change.
	return l, x.dir && !long, d.report(kind, name, long)
}

// find finds one name of the directories in both trees.
func (d *differ) find(in *dirs, name string) (*dirs, error) {
	at := &dirs{}
	base, err := d.lower(at, in.lowers, name)
	if err == nil {
		at.a, err = d.findIn(at, in.a, name, base)
	}
	if err == nil {
		at.b, err = d.findIn(at, in.b, name, base)
	}
	if err != nil {
		d.close(at)
		return nil, err
	}
	return at, nil
}

// lower finds a name in the layers as overlayfs does, the topmost first. If it is a
// directory, the directories that are merged become those of the layers in at.
func (d *differ) lower(at *dirs, lowers []int, name string) (n node, err error) {
	for _, fd := range lowers {
		found, err := d.entryOf(at, fd, name)
		switch {
		case err != nil:
			return node{}, err
		case found.absent() && found.own: // a whiteout
			return n, nil
		case found.absent():
			continue
		case found.file:
			if n.absent() {
				found.own = false
				n = found
			}
			return n, nil
		}
		if n.absent() {
			n = node{dir: true, stat: found.stat, at: fd, below: true}
		}
		at.lowers = append(at.lowers, found.upper)
		if !found.below { // opaque
			return n, nil
		}
	}
	return n, nil
}

// entryOf finds a name in one directory; if it is a directory too, it is opened as one of
// at. A whiteout is absent with own set.
func (d *differ) entryOf(at *dirs, fd int, name string) (n node, err error) {
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
		if n.upper, err = d.open(at, fd, name); err != nil {
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

// findIn finds a name in a tree whose layers have base.
func (d *differ) findIn(at *dirs, in node, name string, base node) (n node, err error) {
	if in.own {
		if n, err = d.entryOf(at, in.upper, name); err != nil || n.own {
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
