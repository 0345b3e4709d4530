// Package layer keeps the unpacked layers of images, and turns tars into layers
// and layers into tars.
//
//	<dir>/<hex>    one layer, named by the sha256 of its uncompressed tar; it never changes
//	<dir>/new-*    a layer that is being made, or removed; [Open] clears these away
//
// On the way in, [Store.Stage] feeds the tar to a child process without privileges
// ([Unpack]), and [Store.Commit] gives the result its name. [Store.Read] is the way
// out. Files carry the ids of the tar, 0..65535, which are those of the guest.
//
// What surprises: the child has no right to set trusted.* attributes, with which
// overlayfs marks a directory that hides the layers below. The child reports such
// a directory, and the daemon sets the mark (see whiteout.go).
package layer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// newPrefix marks a directory that is still being made; Open removes it.
const newPrefix = "new-"

// digestPrefix names the only digest in use: sha256 of the uncompressed tar,
// which OCI calls the diffID.
const digestPrefix = "sha256:"

// sizeAttr remembers the bytes of a layer's files, in decimal.
const sizeAttr = "trusted.sandboxd.size"

// Store keeps layers in one directory. Its methods may be called at the same time.
type Store struct{ dir string }

// Open takes the directory dir, which exists, into use. It removes what a killed
// daemon left half made there.
func Open(dir string) (*Store, error) {
	s := &Store{dir: dir}
	left, err := filepath.Glob(filepath.Join(dir, newPrefix+"*"))
	if err != nil {
		return nil, err
	}
	for _, dir := range left {
		if err := tree.Remove(dir); err != nil {
			return nil, fmt.Errorf("remove leftover of an import: %w", err)
		}
	}
	return s, nil
}

// TempDir makes a directory beside the layers, which the next Open removes at the
// latest.
func (s *Store) TempDir() (string, error) { return os.MkdirTemp(s.dir, newPrefix) }

// Make makes a layer that does not come from a tar, unless there is one of that name.
// It calls fill with an empty directory. It returns the directory of the layer, which
// List leaves out.
func (s *Store) Make(name string, fill func(dir string) error) (string, error) {
	final := filepath.Join(s.dir, name)
	if ok, err := tree.Exists(final); ok || err != nil {
		return final, err
	}
	dir, err := s.TempDir()
	if err != nil {
		return "", err
	}
	defer tree.Remove(dir) //nolint:errcheck // renamed away, or cleared at the next Open
	if err := fill(dir); err != nil {
		return "", err
	}
	if err := settle(dir); err != nil {
		return "", err
	}
	return final, rename(dir, final)
}

// dirOf is the directory of a layer, whether it is here or not.
func (s *Store) dirOf(digest string) (string, error) {
	sum, ok := strings.CutPrefix(digest, digestPrefix)
	if !ok || !isHex64(sum) {
		return "", errs.New(errs.Invalid, "layer %.100q: want sha256: and 64 hex digits", digest)
	}
	return filepath.Join(s.dir, sum), nil
}

// Path is the directory of a layer. It fails with errs.Invalid if digest is no
// digest, and with errs.NotFound if the layer is not here.
func (s *Store) Path(digest string) (string, error) {
	dir, err := s.dirOf(digest)
	if err != nil {
		return "", err
	}
	if ok, err := tree.Exists(dir); err != nil {
		return "", err
	} else if !ok {
		return "", errs.New(errs.NotFound, "layer %s is not on this host: build or import its image again", digest)
	}
	return dir, nil
}

func isHex64(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// Remove removes a layer; absent is fine. The caller knows that no image and no
// sandbox needs it.
func (s *Store) Remove(_ context.Context, digest string) error {
	dir, err := s.Path(digest)
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	// Rename it first: half a layer must never have a layer's name.
	gone, err := s.TempDir()
	if err != nil {
		return fmt.Errorf("remove layer %s: %w", digest, err)
	}
	if err := os.Rename(dir, filepath.Join(gone, "layer")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove layer %s: %w", digest, err)
	}
	if err := tree.Remove(gone); err != nil {
		return fmt.Errorf("remove layer %s: %w", digest, err)
	}
	return nil
}

// List returns the digests of the layers on this host.
func (s *Store) List(context.Context) ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("list layers: %w", err)
	}
	var digests []string
	for _, e := range entries {
		if isHex64(e.Name()) {
			digests = append(digests, digestPrefix+e.Name())
		}
	}
	return digests, nil
}

// Size is the bytes of a layer's files. It fails as Path does.
func (s *Store) Size(ctx context.Context, digest string) (size int64, err error) {
	dir, err := s.Path(digest)
	if err != nil {
		return 0, err
	}
	var b [32]byte
	n, err := unix.Lgetxattr(dir, sizeAttr, b[:])
	if errors.Is(err, unix.ENODATA) {
		// An older release has unpacked it, without noting the size.
		err = tree.Walk(ctx, dir, func(st *unix.Stat_t) {
			if st.Mode&unix.S_IFMT == unix.S_IFREG {
				size += st.Size
			}
		})
		return size, err
	}
	if err != nil {
		return 0, &os.PathError{Op: "getxattr", Path: dir, Err: err}
	}
	return strconv.ParseInt(string(b[:n]), 10, 64)
}

// DiskBytes is what the files of a layer take on the disk, hard links once. It
// walks the layer, 30 ms for 10,000 files. A layer never changes, so callers ask
// once.
func (s *Store) DiskBytes(ctx context.Context, digest string) (bytes int64, err error) {
	dir, err := s.Path(digest)
	if err != nil {
		return 0, err
	}
	err = tree.Walk(ctx, dir, func(st *unix.Stat_t) { bytes += st.Blocks * 512 })
	return bytes, err
}

// settle gives the top directory of a layer the mode and time that all layers
// have, and puts the layer on disk.
func settle(dir string) error {
	if err := errors.Join(os.Chmod(dir, 0o755), os.Chtimes(dir, time.Unix(0, 0), time.Unix(0, 0))); err != nil {
		return err
	}
	return tree.WithDir(dir, unix.Syncfs)
}

// rename gives a layer its name. If the same layer is there already, dir stays
// where it is.
func rename(dir, final string) error {
	if err := os.Rename(dir, final); err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return tree.WithDir(filepath.Dir(final), unix.Fsync)
}
