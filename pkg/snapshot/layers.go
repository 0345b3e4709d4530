package snapshot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// newPrefix marks what is still being made; Open removes it.
const newPrefix = "new-"

// digestPrefix names the only digest in use: sha256 of the uncompressed tar,
// which OCI calls the diffID.
const digestPrefix = "sha256:"

// sizeAttr remembers the bytes of a layer's files, in decimal.
const sizeAttr = "trusted.sandboxd.size"

// StageLayer unpacks an uncompressed tar, in a child without privileges, into a
// layer that has no name yet. It returns what CommitLayer and DropStage want,
// the digest of the tar and the bytes of the layer's files. progress, if not
// nil, is told the bytes read so far. The layer is on disk when this returns; a
// failed one leaves nothing.
//
// Owners, modes with setuid, times, links and file capabilities are kept,
// whiteouts become those of overlayfs. What lies below dev, proc and sys is
// dropped: the runtime makes it. It fails with errs.Invalid if the tar is none
// or holds what no layer may, with errs.Exhausted if the disk is full.
func (s *Store) StageLayer(ctx context.Context, r io.Reader, progress func(int64)) (stage, digest string, bytes int64, err error) {
	dir, err := os.MkdirTemp(s.layerDir, newPrefix)
	if err != nil {
		return "", "", 0, fmt.Errorf("import layer: %w", err)
	}
	h := sha256.New()
	in := &meter{ctx: ctx, r: io.TeeReader(r, h), progress: progress, room: s.Room}
	bytes, err = unpack(ctx, dir, in)
	if err == nil {
		err = unix.Setxattr(dir, sizeAttr, []byte(strconv.FormatInt(bytes, 10)), 0)
	}
	if err == nil {
		err = settleLayer(dir)
	}
	if err != nil {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			err = errs.Wrap(err, errs.Exhausted, "%s", diskFull)
		}
		return "", "", 0, errors.Join(fmt.Errorf("import layer: %w", err), tree.Remove(dir))
	}
	return filepath.Base(dir), digestPrefix + hex.EncodeToString(h.Sum(nil)), bytes, nil
}

// CommitLayer names a staged layer by its digest. One that is here already is
// fine, and the stage is dropped.
func (s *Store) CommitLayer(_ context.Context, stage, digest string) error {
	final, err := s.layerDirOf(digest)
	if err != nil {
		return err
	}
	if err := nameLayer(filepath.Join(s.layerDir, stage), final); err != nil {
		return fmt.Errorf("import layer %s: %w", digest, err)
	}
	return s.DropStage(stage) // absent by now, unless another was faster
}

// DropStage removes a staged layer; absent is fine, also one that was named.
func (s *Store) DropStage(stage string) error {
	dir, err := s.stagePath(stage)
	if err != nil {
		return fmt.Errorf("drop staged layer: %w", err)
	}
	return tree.Remove(dir)
}

func (s *Store) stagePath(stage string) (string, error) {
	if !strings.HasPrefix(stage, newPrefix) || filepath.Base(stage) != stage {
		return "", fmt.Errorf("%q is no staged layer", stage)
	}
	return filepath.Join(s.layerDir, stage), nil
}

// ImportLayer is StageLayer and CommitLayer. The same tar again is the same layer.
func (s *Store) ImportLayer(ctx context.Context, r io.Reader, progress func(int64)) (digest string, bytes int64, err error) {
	stage, digest, bytes, err := s.StageLayer(ctx, r, progress)
	if err != nil {
		return "", 0, err
	}
	return digest, bytes, s.CommitLayer(ctx, stage, digest)
}

// LayerSize is the bytes of a layer's files. It fails as LayerPath does.
func (s *Store) LayerSize(ctx context.Context, digest string) (size int64, err error) {
	dir, err := s.LayerPath(digest)
	if err != nil {
		return 0, err
	}
	var b [32]byte
	n, err := unix.Lgetxattr(dir, sizeAttr, b[:])
	if errors.Is(err, unix.ENODATA) {
		// It is of a release that did not write it down.
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

// reserved is what imports leave of the state directory's disk, of which
// records, logs and everybody else live too: a 32nd part, at most 1 GiB.
const reserved = 1 << 30

// Room fails with errs.Exhausted when the disk of the state directory is as
// full as imports may make it.
func (s *Store) Room() error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.layerDir, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: s.layerDir, Err: err}
	}
	free, keep := int64(st.Bavail)*st.Bsize, min(int64(st.Blocks)*st.Bsize/32, reserved)
	if free < keep || st.Files > 0 && st.Ffree < st.Files/32 {
		return errs.New(errs.Exhausted, "%s; %d MiB and %d files are left, and imports leave %d MiB to everything else", diskFull, free>>20, st.Ffree, keep>>20)
	}
	return nil
}

// meter is a reader that ends with its context and where there is no more room,
// and counts.
type meter struct {
	ctx      context.Context
	r        io.Reader
	n        int64
	asked    int64 // for room, when n was that
	progress func(int64)
	room     func() error
}

// askEvery is how many bytes may come between two looks at the disk: of a tar of
// nothing but directories, eight times as many are on it.
const askEvery = 4 << 20

func (m *meter) Read(p []byte) (int, error) {
	if err := m.ctx.Err(); err != nil {
		return 0, err
	}
	if m.n == 0 || m.n-m.asked >= askEvery {
		m.asked = m.n
		if err := m.room(); err != nil {
			return 0, err
		}
	}
	n, err := m.r.Read(p)
	m.n += int64(n)
	if m.progress != nil && n > 0 {
		m.progress(m.n)
	}
	return n, err
}

// layerDirOf is where a layer is if it is here.
func (s *Store) layerDirOf(digest string) (string, error) {
	sum, ok := strings.CutPrefix(digest, digestPrefix)
	if !ok || !isHex64(sum) {
		return "", errs.New(errs.Invalid, "layer %.100q: want sha256: and 64 hex digits", digest)
	}
	return filepath.Join(s.layerDir, sum), nil
}

// LayerPath is the directory of a layer. It fails with errs.Invalid if digest
// is none, and with errs.NotFound if the layer is not here.
func (s *Store) LayerPath(digest string) (string, error) {
	dir, err := s.layerDirOf(digest)
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

// RemoveLayer removes a layer; absent is fine. The caller knows that no image
// and no sandbox stands on it.
func (s *Store) RemoveLayer(_ context.Context, digest string) error {
	dir, err := s.LayerPath(digest)
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	// Without its name first: half a layer must never have one.
	gone, err := os.MkdirTemp(s.layerDir, newPrefix)
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

// ListLayers returns the digests of the layers on this host.
func (s *Store) ListLayers(context.Context) ([]string, error) {
	entries, err := os.ReadDir(s.layerDir)
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
