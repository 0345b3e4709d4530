package layer

import (
	"errors"
	"io/fs"
	"path"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// Whiteouts name the files that a layer hides in the layers below it. A tar spells
// them as empty files with these names (OCI image-spec, layer.md), overlayfs as
// character devices 0:0 and as directories with an attribute (kernel, overlayfs.rst).
//
// A character device 0:0 may be made by anyone since Linux 5.8 (mknod(2) asks
// for CAP_MKNOD for all others), so the unpacking child makes it. trusted.*
// attributes need CAP_SYS_ADMIN on the host, which the child does not have: it
// names the directory and the daemon sets the attribute, walking there by
// openat2 beneath the layer. The attribute that users may set, user.overlay.opaque,
// would need overlays mounted with userxattr, where guests could set it too.
const (
	whiteoutPrefix = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
	whiteoutMeta   = ".wh..wh." // aufs' own bookkeeping

	opaqueAttr = "trusted.overlay.opaque"
)

// ofAufs reports whether a name is in aufs' own bookkeeping at the root of a layer, which
// no other file system reads.
func ofAufs(name string) bool {
	return strings.HasPrefix(name, whiteoutMeta) && name != whiteoutOpaque
}

// whiteout makes the whiteout that the tar gives as an empty file of this name.
func (x *extractor) whiteout(parent int, name string) error {
	dir, base := path.Split(name)
	dir = path.Clean(dir)
	switch {
	case base == whiteoutOpaque && dir == ".":
		return errs.New(errs.Invalid, "the layer hides all layers below it; build the image without those layers")
	case base == whiteoutOpaque:
		x.hides[dir] = true
		return nil
	case strings.HasPrefix(base, whiteoutMeta):
		return nil
	}
	hidden := strings.TrimPrefix(base, whiteoutPrefix)
	if hidden == "" || hidden == "." || hidden == ".." {
		return errs.New(errs.Invalid, "the layer has a whiteout of %q, which is not a file name", hidden)
	}
	err := unix.Mknodat(parent, hidden, unix.S_IFCHR, 0)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	// The layer's own file replaces the one below anyhow; a directory would be
	// merged with it.
	var st unix.Stat_t
	if err := unix.Fstatat(parent, hidden, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &fs.PathError{Op: "stat", Path: hidden, Err: err}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		x.hides[path.Join(dir, hidden)] = true
	}
	return nil
}

func isWhiteout(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
}

// setOpaque marks a directory that the child has reported.
func setOpaque(root int, dir string) error {
	fd, err := tree.OpenBeneath(root, dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Fsetxattr(fd, opaqueAttr, []byte("y"), 0); err != nil {
		return &fs.PathError{Op: "set " + opaqueAttr, Path: dir, Err: err}
	}
	return nil
}
