package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// Read writes a layer as a tar, the inverse of Stage: names in order, whiteouts written
// as OCI has them. The same layer gives the same bytes.
func (s *Store) Read(ctx context.Context, digest string, w io.Writer) error {
	dir, err := s.Path(digest)
	if err == nil {
		err = readTree(ctx, dir, w)
	}
	if err != nil {
		return fmt.Errorf("read layer %s: %w", digest, err)
	}
	return nil
}

// ReadStage is Read for a layer that has no name yet.
func (s *Store) ReadStage(ctx context.Context, stage string, w io.Writer) error {
	dir, err := s.stagePath(stage)
	if err == nil {
		err = readTree(ctx, dir, w)
	}
	if err != nil {
		return fmt.Errorf("read staged layer: %w", err)
	}
	return nil
}

// Bounds of what a guest has written, as a layer. The bytes count with holes in files.
const (
	maxGuestDepth = 256      // directories in one another
	maxGuestBytes = 64 << 30 // of all files
)

// Pack writes what a guest has written over layers, the upper of an overlay that nobody
// writes to meanwhile, as the tar of a layer. It leaves out paths for which hide returns
// true, and sockets, pipes and devices, which no layer has. It fails with
// errs.Unsupported if a file has a name that a layer cannot have, or lies too deep, and
// with errs.Exhausted if the files are too large.
func Pack(ctx context.Context, dir string, hide func(path string) bool, w io.Writer) error {
	return packTree(ctx, dir, hide, w)
}

func readTree(ctx context.Context, dir string, w io.Writer) error { return packTree(ctx, dir, nil, w) }

func packTree(ctx context.Context, dir string, hide func(path string) bool, w io.Writer) error {
	p := packer{ctx: ctx, tw: tar.NewWriter(w), met: tree.Inodes{}, first: map[uint64]string{}, buf: make([]byte, copySize), hide: hide}
	p.names.Max, p.links.Max = tree.MaxNames, tree.MaxNames
	root, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err == nil {
		err = errors.Join(p.dir(root, ""), root.Close())
	}
	if err == nil {
		err = p.tw.Close()
	}
	return err
}

// packer writes a tree as a tar. Layers do not change between listing and reading; even
// so, it follows no link.
type packer struct {
	ctx context.Context
	tw  *tar.Writer
	buf []byte

	names tree.Names // in the directories that it is in
	met   tree.Inodes
	first map[uint64]string // by inode: the first name of a file that has more to come
	links tree.Names        // those names

	hide  func(path string) bool // nil: a layer, which was checked when it was made
	bytes int64                  // of files, if a guest wrote them
}

// guests checks a name that a guest chose, and reports whether it is left out.
func (p *packer) guests(base, name string) (hidden bool, err error) {
	switch {
	case p.hide == nil:
		return false, nil
	case p.hide("/" + name):
		return true, nil
	case strings.HasPrefix(base, whiteoutPrefix):
		return false, errs.New(errs.Unsupported, "%.200q: images use names that begin with %s for removed files; rename or remove it",
			"/"+name, whiteoutPrefix)
	case strings.Count(name, "/") > maxGuestDepth:
		return false, errs.New(errs.Unsupported, "directories are nested deeper than %d, too deep for an image; remove some",
			maxGuestDepth)
	}
	return false, nil
}

// dir adds what is in d, which is called name, and not d itself.
func (p *packer) dir(d *os.File, name string) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	before := p.names.Bytes
	names, err := p.names.Read(d, nil)
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, n := range names {
		if hidden, err := p.guests(n, path.Join(name, n)); err != nil {
			return err
		} else if hidden {
			continue
		}
		if err := p.entry(int(d.Fd()), n, path.Join(name, n)); err != nil {
			return fmt.Errorf("%.200q: %w", path.Join(name, n), err)
		}
	}
	p.names.Bytes = before
	return nil
}

func (p *packer) entry(parent int, base, name string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(parent, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	h := &tar.Header{
		Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX,
	}
	if isWhiteout(&st) {
		return p.empty(path.Join(path.Dir(name), whiteoutPrefix+base))
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		b := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(parent, base, b)
		if err != nil {
			return err
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, string(b[:n])
		return p.tw.WriteHeader(h)
	case unix.S_IFREG:
		first, err := p.link(&st, name)
		if err != nil {
			return err
		}
		if first != "" {
			h.Typeflag, h.Linkname = tar.TypeLink, first
			return p.tw.WriteHeader(h)
		}
		h.Typeflag, h.Size = tar.TypeReg, st.Size
		if p.bytes += st.Size; p.hide != nil && (st.Size > maxGuestBytes || p.bytes > maxGuestBytes) {
			return errs.New(errs.Exhausted, "the files are larger than %d GiB together, holes included; remove some", maxGuestBytes>>30)
		}
	case unix.S_IFDIR:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
	default:
		if p.hide != nil {
			return nil
		}
		return fmt.Errorf("not a file, directory or link (mode %o)", st.Mode)
	}
	fd, err := unix.Openat(parent, base, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), base)
	defer f.Close()
	opaque, err := p.xattrs(fd, h)
	if err != nil {
		return err
	}
	if err := p.tw.WriteHeader(h); err != nil {
		return err
	}
	if h.Typeflag == tar.TypeReg {
		_, err := io.CopyBuffer(struct{ io.Writer }{p.tw}, struct{ io.Reader }{f}, p.buf)
		return err
	}
	if opaque {
		if err := p.empty(path.Join(name, whiteoutOpaque)); err != nil {
			return err
		}
	}
	return p.dir(f, name)
}

// link returns the name by which a file was added before. If there is none, it
// remembers this one until all names of the file were met.
func (p *packer) link(st *unix.Stat_t, name string) (first string, err error) {
	again := p.met.Seen(st)
	_, more := p.met[st.Ino]
	first = p.first[st.Ino]
	switch {
	case !again && more:
		p.first[st.Ino] = name
		return "", p.links.Add(name)
	case !again:
		return "", nil
	case !more:
		delete(p.first, st.Ino)
		p.links.Drop(first)
	}
	return first, nil
}

// empty adds an empty file.
func (p *packer) empty(name string) error {
	return p.tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o600, ModTime: time.Unix(0, 0), Format: tar.FormatPAX})
}

// xattrs adds the attributes that unpacking keeps, and reports the one that
// makes a directory opaque.
func (p *packer) xattrs(fd int, h *tar.Header) (opaque bool, err error) {
	n, err := unix.Flistxattr(fd, nil)
	if err != nil || n == 0 {
		return false, err
	}
	names := make([]byte, n)
	if n, err = unix.Flistxattr(fd, names); err != nil {
		return false, err
	}
	for raw := range bytes.SplitSeq(bytes.TrimRight(names[:n], "\x00"), []byte{0}) {
		name := string(raw)
		opaque = opaque || name == opaqueAttr
		if !keepXattr(name) || strings.Contains(name, "=") { // which PAX cannot spell
			continue
		}
		value := make([]byte, 64<<10) // XATTR_SIZE_MAX
		n, err := unix.Fgetxattr(fd, name, value)
		if err != nil {
			return false, fmt.Errorf("attribute %s: %w", name, err)
		}
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords["SCHILY.xattr."+name] = string(value[:n])
	}
	return opaque, nil
}
