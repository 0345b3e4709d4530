package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// The kinds of a change, as `docker diff` calls them.
const (
	Added   = "A"
	Changed = "C" // also a directory in which something is
	Deleted = "D" // with all that is in it
)

// Bounds of a comparison: what is compared was written by guests.
const (
	maxDiffDepth = 256     // directories in one another
	maxDiffOpen  = 8192    // descriptors: of each directory one for each layer that has it
	maxDiffs     = 4       // at the same time
	maxDiffNames = 1 << 20 // changes
)

// Diff calls emit for what is different between two trees of the same layers:
// that of the disk or snapshot of, and that of base, or the layers alone if base
// is empty. Paths are absolute and come in order, a directory before what is in
// it. What hide says yes to is left out.
//
// Only what one of the two has written is looked at. A file is taken for
// unchanged if its type, owner, mode, size, time of change, link target and
// extended attributes are the same; contents are not read. What a guest does
// meanwhile may or may not be seen. It fails with errs.Unavailable while too many
// others are compared.
func (s *Store) Diff(ctx context.Context, of, base string, layers []string, hide func(path string) bool,
	emit func(kind, path string) error) (err error) {
	select {
	case s.diffs <- struct{}{}:
		defer func() { <-s.diffs }()
	default:
		return errs.New(errs.Unavailable, "%d comparisons of files are going on, and no more are made at once; try again", maxDiffs)
	}
	d := differ{ctx: ctx, hide: hide, emit: emit, held: tree.Names{Max: tree.MaxNames}}
	defer func() {
		d.closeFrom(0)
		if err != nil {
			err = fmt.Errorf("diff of %s and %q: %w", of, base, err)
		}
	}()
	var a, b node
	if a, err = s.openTree(&d, of); err != nil {
		return err
	}
	if base != "" {
		if b, err = s.openTree(&d, base); err != nil {
			return err
		}
	}
	a.below, b.below = true, true
	lowers, err := s.lowers(layers)
	if err != nil {
		return err
	}
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

// openTree opens the upper of a disk or a snapshot.
func (s *Store) openTree(d *differ, id string) (node, error) {
	if !record.IsID(id) && !record.IsSnapshotID(id) {
		return node{}, fmt.Errorf("%q: neither a disk nor a snapshot", id)
	}
	fd, err := d.open(unix.AT_FDCWD, filepath.Join(s.poolDir, id, "u"))
	if errors.Is(err, fs.ErrNotExist) {
		return node{}, errs.New(errs.WrongState, "%s has no files on the storage pool", id)
	}
	return node{dir: true, upper: fd, own: true}, err
}

// A node is one name in one of the trees: absent (neither dir nor file), a
// file, or a directory.
type node struct {
	dir, file bool
	stat      unix.Stat_t
	at        int // of a file: the directory that it is in

	// Of a directory: upper is its own part of it, if own is set, and below says
	// whether the layers' part shows through.
	upper int
	own   bool
	below bool
}

func (n node) absent() bool { return !n.dir && !n.file }

type differ struct {
	ctx   context.Context
	hide  func(string) bool
	emit  func(kind, path string) error
	fds   []int    // descriptors
	above []*above // directories on the way down, outermost first
	count int
	held  tree.Names // names of the directories on the way down
}

// above is a directory that is told of before the first change in it.
type above struct {
	path string
	told bool
}

func (d *differ) open(at int, name string) (int, error) {
	if len(d.fds) >= maxDiffOpen {
		return -1, errs.New(errs.Unsupported, "directories are nested too deeply for so many layers, and no further is looked")
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

// tell emits a change, and before it the directories it lies in.
func (d *differ) tell(kind, path string) error {
	for _, up := range d.above {
		if !up.told && up.path != "" {
			up.told = true
			if err := d.tellOne(Changed, up.path); err != nil {
				return err
			}
		}
	}
	return d.tellOne(kind, path)
}

func (d *differ) tellOne(kind, path string) error {
	if d.count++; d.count > maxDiffNames {
		return errs.New(errs.Exhausted, "there are more than %d changes; that is where this ends", maxDiffNames)
	}
	return d.emit(kind, path)
}

// directory compares what is in two directories; either may be absent.
func (d *differ) directory(path string, a, b node, lowers []int) error {
	if len(d.above) > maxDiffDepth {
		return errs.New(errs.Unsupported, "directories are nested deeper than %d, and no further is looked", maxDiffDepth)
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

// names lists, in order, what may differ: what either tree has itself, and if
// only one of them shows the layers, what these have.
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
		return d.tell(Deleted, path)
	case y.absent():
		err, up.told = d.tell(Added, path), true
		y = node{} // it may be a whiteout
	case x.dir != y.dir:
		err, up.told = d.tell(Changed, path), true
		y = node{} // what is in it now is new
	default:
		same, serr := alike(name, x, y)
		if serr != nil {
			return serr
		}
		if !same {
			err, up.told = d.tell(Changed, path), true
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
		found, err := d.look(fd, name)
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

// look finds a name in one directory. A whiteout is absent with own set.
func (d *differ) look(fd int, name string) (n node, err error) {
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
		if n, err = d.look(in.upper, name); err != nil || n.own {
			n.below = n.below && in.below && base.dir
			return n, err
		}
	}
	if in.below {
		return base, nil
	}
	return node{}, nil
}

// alike reports whether nothing about a name tells of a change.
func alike(name string, x, y node) (bool, error) {
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
	if x.dir { // its attributes say less than they cost
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
