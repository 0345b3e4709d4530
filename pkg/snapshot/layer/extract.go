package layer

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/tarball"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// limits bound one layer. The daemon passes them to the child that unpacks it.
type limits struct {
	Bytes   int64 // of all files, counting holes as data
	Entries int   // files, directories, links
	Name    int   // bytes of one name
	Depth   int   // components of one name
}

// layerLimits are far above what honest images have.
var layerLimits = limits{Bytes: 64 << 30, Entries: 2 << 20, Name: 4096, Depth: 256}

const (
	maxComponent = 255
	maxOpenDirs  = 256      // descriptors kept for parents; one entry may add two
	holeSize     = 64 << 10 // this many zeroes in a row are not written
	copySize     = 1 << 20
)

// extractor unpacks one tar below a directory. Every name is walked from root
// by descriptor, through directories only: no link in the tar is ever followed.
type extractor struct {
	root   int
	owner  int // of directories that the tar leaves out
	limits limits
	opaque func(dir string) error // is called at the end with each directory that hides the layers below it

	dirs map[string]int // open parents; "." is not in it
	// times are those of directories. They are set at the end, because each new file changes
	// them.
	times    map[string]time.Time
	hides    map[string]bool // the directories for opaque
	replaced int             // directories with something in them
	n        int
	bytes    int64
	buf      []byte
}

func newExtractor(root, owner int, l limits, opaque func(dir string) error) extractor {
	return extractor{
		root: root, owner: owner, limits: l, opaque: opaque,
		dirs: map[string]int{}, times: map[string]time.Time{}, hides: map[string]bool{},
	}
}

// closeMany closes the open parents when there are many. It runs between entries
// only: an entry that is being made uses up to two of them.
func (x *extractor) closeMany() {
	if len(x.dirs) >= maxOpenDirs {
		x.close()
	}
}

func (x *extractor) close() {
	for _, fd := range x.dirs {
		unix.Close(fd)
	}
	clear(x.dirs)
}

func (x *extractor) extract(r io.Reader) error {
	in := &tarball.EndReader{R: r}
	tr := tar.NewReader(in)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			if in.Ended && x.n > 0 { // some programs write no bytes at all for a layer that changes nothing
				return errs.New(errs.Invalid, "the layer is cut off: its tar has no end")
			}
			break
		}
		if err != nil {
			return errs.Wrap(err, errs.Invalid, "the layer is not a valid tar")
		}
		if x.n++; x.n > x.limits.Entries {
			return errs.New(errs.Invalid, "the layer has more than %d entries", x.limits.Entries)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		name, err := x.cleanName(h.Name)
		if err != nil {
			return err
		}
		if Ignored(name) {
			continue
		}
		if err := x.entry(name, h, tr); err != nil {
			return tarError(name, err)
		}
	}
	for name, at := range x.times {
		if err := x.setDirTime(name, at); err != nil {
			return err
		}
	}
	for dir := range x.hides {
		if err := x.opaque(dir); err != nil {
			return tarError(dir, err)
		}
	}
	return nil
}

// tarError makes errs.Invalid of the errors that are the tar's fault: the file system
// refuses a tar that contradicts itself, for example by a file below a link.
func tarError(name string, err error) error {
	errno, ok := errors.AsType[unix.Errno](err)
	if !ok {
		return err
	}
	switch errno {
	case unix.ELOOP:
		return errs.New(errs.Invalid, "the layer cannot be unpacked: %.200q lies below a symbolic link of the layer, and links are not "+
			"followed; name it by its directory", name)
	case unix.ENOTDIR, unix.EISDIR, unix.EEXIST, unix.ENOENT, unix.ENAMETOOLONG, unix.EXDEV,
		unix.EINVAL, unix.ERANGE, unix.E2BIG, unix.EMLINK, unix.EPERM, unix.EOPNOTSUPP:
		return errs.New(errs.Invalid, "the layer cannot be unpacked: %.200q: %v", name, err)
	}
	return fmt.Errorf("unpack %.200q: %w", name, err)
}

// cleanName returns a name as a path below the root of the layer, or refuses it. As for
// docker, "/etc", "./etc" and "usr/../etc" are etc, and "" and "/" are the root itself.
func (x *extractor) cleanName(name string) (string, error) {
	bad := func(why string) (string, error) {
		return "", errs.New(errs.Invalid, "the layer has an invalid file name %.80q: %s", name, why)
	}
	if len(name) > x.limits.Name {
		return bad("too long")
	}
	if strings.ContainsRune(name, 0) {
		return bad("contains a zero byte")
	}
	clean := path.Clean(strings.TrimLeft(name, "/"))
	if clean == ".." || strings.HasPrefix(clean, "../") {
		return bad("leaves the layer")
	}
	if strings.Count(clean, "/") > x.limits.Depth {
		return bad("nested too deeply")
	}
	for c := range strings.SplitSeq(clean, "/") {
		if len(c) > maxComponent {
			return bad("a component is too long")
		}
	}
	return clean, nil
}

// Ignored reports whether an import ignores the entries of a name, which is clean: the root is
// there, the runtime makes its own files, and aufs' have no meaning.
func Ignored(name string) bool { return name == "." || unwanted(name) }

// LeftOut reports whether an import makes nothing of an entry but the directories above it. As
// what is below dev, devices and pipes are left out: no guest may use a device that an image
// brings, and a commit keeps no pipe. So is a hard link to what is ignored.
func LeftOut(h *tar.Header) bool {
	switch h.Typeflag {
	case tar.TypeChar: // 0:0 is how overlayfs spells a whiteout; an image's tar has another word for it
		return h.Devmajor != 0 || h.Devminor != 0
	case tar.TypeBlock, tar.TypeFifo:
		return true
	case tar.TypeLink:
		return unwanted(path.Clean(strings.TrimLeft(h.Linkname, "/")))
	}
	return false
}

func unwanted(name string) bool { return madeByRuntime(name) || ofAufs(name) }

// madeByRuntime reports whether the runtime makes the file of this name.
func madeByRuntime(name string) bool {
	top, below, _ := strings.Cut(name, "/")
	return below != "" && (top == "dev" || top == "proc" || top == "sys")
}

func (x *extractor) entry(name string, h *tar.Header, content io.Reader) error {
	x.closeMany()
	parent, err := x.parent(path.Dir(name))
	if err != nil {
		return err
	}
	base := path.Base(name)
	if strings.HasPrefix(base, whiteoutPrefix) {
		return x.whiteout(parent, name)
	}
	if LeftOut(h) {
		return nil
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return x.dir(parent, base, name, h)
	case tar.TypeReg, tar.TypeGNUSparse:
		return x.file(parent, name, h, content)
	case tar.TypeSymlink:
		err := x.replacing(parent, name, func() error { return unix.Symlinkat(h.Linkname, parent, base) })
		if err != nil {
			return err
		}
		return setOwnerAndTime(parent, base, h)
	case tar.TypeLink:
		return x.link(parent, name, h.Linkname)
	}
	return errs.New(errs.Invalid, "the layer contains %s, which is not a file, directory or link (type %q)", name, h.Typeflag)
}

// parent returns a descriptor of a directory, made if the tar did not.
func (x *extractor) parent(name string) (int, error) {
	if name == "." {
		return x.root, nil
	}
	if fd, ok := x.dirs[name]; ok {
		return fd, nil
	}
	fd, err := tree.OpenBeneath(x.root, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) {
		fd, err = x.makeAll(name)
	}
	if err != nil {
		return -1, err
	}
	x.dirs[name] = fd
	return fd, nil
}

// makeAll walks from root to a directory, making what is missing, with at most
// two descriptors at a time: a name may have two thousand components.
func (x *extractor) makeAll(name string) (int, error) {
	at := x.root
	for c := range strings.SplitSeq(name, "/") {
		next := -1
		err := unix.Mkdirat(at, c, 0o755)
		if err == nil {
			err = unix.Fchownat(at, c, x.owner, x.owner, unix.AT_SYMLINK_NOFOLLOW)
		}
		if err == nil || errors.Is(err, unix.EEXIST) {
			next, err = tree.OpenBeneath(at, c, unix.O_RDONLY|unix.O_DIRECTORY)
		}
		if at != x.root {
			unix.Close(at)
		}
		if err != nil {
			return -1, err
		}
		at = next
	}
	return at, nil
}

func (x *extractor) dir(parent int, base, name string, h *tar.Header) error {
	err := unix.Mkdirat(parent, base, 0o700)
	if errors.Is(err, unix.EEXIST) {
		err = x.dirOver(parent, base, name)
	}
	if err != nil {
		return err
	}
	fd, err := unix.Openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err // of a file or link by that name too
	}
	defer unix.Close(fd)
	x.times[name] = h.ModTime
	return setMeta(fd, h)
}

func (x *extractor) setDirTime(name string, at time.Time) error {
	x.closeMany()
	parent, err := x.parent(path.Dir(name))
	if err != nil {
		return err
	}
	return setTime(parent, path.Base(name), at)
}

func (x *extractor) file(parent int, name string, h *tar.Header, content io.Reader) error {
	if h.Size > x.limits.Bytes-x.bytes {
		return errs.New(errs.Invalid, "the layer holds more than %d bytes", x.limits.Bytes)
	}
	var fd int
	base := path.Base(name)
	err := x.replacing(parent, name, func() (err error) {
		fd, err = unix.Openat(parent, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		return err
	})
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	x.bytes += h.Size
	if err := x.fill(fd, h.Size, content); err != nil {
		return err
	}
	if err := setMeta(fd, h); err != nil {
		return err
	}
	return setTime(parent, base, h.ModTime)
}

// fill writes a file, leaving long runs of zeroes out: a tar may hold a terabyte of
// zeroes in a few bytes.
func (x *extractor) fill(fd int, size int64, content io.Reader) error {
	if x.buf == nil {
		x.buf = make([]byte, copySize)
	}
	for at := int64(0); at < size; {
		n, err := io.ReadFull(content, x.buf[:min(size-at, copySize)])
		if err != nil {
			return errs.Wrap(err, errs.Invalid, "the layer ends in the middle of a file")
		}
		for b := x.buf[:n]; len(b) > 0; {
			part := b[:min(len(b), holeSize)]
			b = b[len(part):]
			if len(part) == holeSize && bytes.Equal(part, zeroes[:]) {
				at += holeSize
				continue
			}
			if err := writeAt(fd, part, at); err != nil {
				return err
			}
			at += int64(len(part))
		}
	}
	return unix.Ftruncate(fd, size) // it may end with a hole
}

var zeroes [holeSize]byte

func writeAt(fd int, b []byte, at int64) error {
	for len(b) > 0 {
		n, err := unix.Pwrite(fd, b, at)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return &fs.PathError{Op: "write", Path: "file", Err: err}
		}
		b, at = b[n:], at+int64(n)
	}
	return nil
}

// link makes a hard link to a file, or to a symbolic link, that came before in this layer.
// It follows neither.
func (x *extractor) link(parent int, name, target string) error {
	target, err := x.cleanName(target)
	if err != nil {
		return err
	}
	if strings.HasPrefix(target, name+"/") {
		return errs.New(errs.Invalid, "the layer has %.80q as a directory and as a hard link to a file in that", name)
	}
	from, err := x.parent(path.Dir(target))
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstatat(from, path.Base(target), &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("hard link to %s: %w", target, err)
	}
	if kind := st.Mode & unix.S_IFMT; kind != unix.S_IFREG && kind != unix.S_IFLNK {
		return errs.New(errs.Invalid, "the layer has a hard link to %s, which is neither a regular file nor a symbolic link", target)
	}
	return x.replacing(parent, name, func() error { return unix.Linkat(from, path.Base(target), parent, path.Base(name), 0) })
}

// setMeta gives an open file or directory owner, extended attributes and mode,
// in the order in which none undoes another: chown clears capabilities and setuid.
func setMeta(fd int, h *tar.Header) error {
	if err := checkOwner(h); err != nil {
		return err
	}
	if err := unix.Fchown(fd, h.Uid, h.Gid); err != nil {
		return &fs.PathError{Op: "fchown", Path: h.Name, Err: err}
	}
	for k, v := range h.PAXRecords {
		name, ok := strings.CutPrefix(k, "SCHILY.xattr.")
		if !ok || !keepXattr(name) {
			continue
		}
		// As docker does: what the file system does not have, or does not let a layer set, is left out.
		err := unix.Fsetxattr(fd, name, []byte(v), 0)
		if err != nil && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EPERM) {
			return &fs.PathError{Op: "set " + name, Path: h.Name, Err: err}
		}
	}
	if err := unix.Fchmod(fd, uint32(h.Mode)&0o7777); err != nil {
		return &fs.PathError{Op: "fchmod", Path: h.Name, Err: err}
	}
	return nil
}

// keepXattr accepts the attributes that have a meaning in a sandbox and none on the
// host. overlayfs would obey trusted.*.
func keepXattr(name string) bool {
	switch name {
	case "security.capability", "system.posix_acl_access", "system.posix_acl_default":
		return true
	}
	return strings.HasPrefix(name, "user.") && !strings.HasPrefix(name, "user.overlay.")
}

// checkOwner refuses ids that no sandbox can map.
func checkOwner(h *tar.Header) error {
	if h.Uid < 0 || h.Uid > 65535 || h.Gid < 0 || h.Gid > 65535 {
		return errs.New(errs.Invalid, "the layer sets the owner of %.80q to %d:%d, and a sandbox has only the ids 0 to 65535: change the "+
			"owner where the image is made (chown)", h.Name, h.Uid, h.Gid)
	}
	return nil
}

func setOwnerAndTime(parent int, base string, h *tar.Header) error {
	if err := checkOwner(h); err != nil {
		return err
	}
	if err := unix.Fchownat(parent, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &fs.PathError{Op: "fchownat", Path: h.Name, Err: err}
	}
	return setTime(parent, base, h.ModTime)
}

func setTime(parent int, base string, at time.Time) error {
	ts := unix.NsecToTimespec(at.UnixNano())
	if err := unix.UtimesNanoAt(parent, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &fs.PathError{Op: "utimensat", Path: base, Err: err}
	}
	return nil
}
