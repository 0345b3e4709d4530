package layer

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

// Stage unpacks an uncompressed tar, in a child without privileges, into a layer
// that has no name yet. It returns the stage, which Commit and Drop take, the
// digest of the tar and the bytes of the layer's files. progress, if not nil, is
// called with the bytes read so far. The layer is on disk when Stage returns; a
// failed one leaves nothing.
//
// Owners, modes with setuid, times, links and file capabilities are kept,
// whiteouts become those of overlayfs. Devices, pipes, and files below dev, proc and sys
// are dropped: the runtime makes those. It fails with errs.Invalid if r is no tar or holds what
// no layer may have, with errs.Exhausted if the disk is full.
func (s *Store) Stage(ctx context.Context, r io.Reader, progress func(int64)) (stage, digest string, bytes int64, err error) {
	dir, err := s.TempDir()
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
		err = settle(dir)
	}
	if err != nil {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			err = errs.Wrap(err, errs.Exhausted, "%s", diskFull)
		}
		return "", "", 0, errors.Join(fmt.Errorf("import layer: %w", err), tree.Remove(dir))
	}
	return filepath.Base(dir), digestPrefix + hex.EncodeToString(h.Sum(nil)), bytes, nil
}

// Commit names a staged layer by its digest. If that layer is here already, the
// stage is dropped.
func (s *Store) Commit(_ context.Context, stage, digest string) error {
	final, err := s.dirOf(digest)
	if err != nil {
		return err
	}
	if err := rename(filepath.Join(s.dir, stage), final); err != nil {
		return fmt.Errorf("import layer %s: %w", digest, err)
	}
	return s.Drop(stage) // absent by now, unless another was faster
}

// Drop removes a staged layer; absent is fine, and so is one that has its name.
func (s *Store) Drop(stage string) error {
	dir, err := s.stagePath(stage)
	if err != nil {
		return fmt.Errorf("drop staged layer: %w", err)
	}
	return tree.Remove(dir)
}

// StageHas reports whether a staged layer has a regular file of this name at its top.
func (s *Store) StageHas(stage, name string) (bool, error) {
	dir, err := s.stagePath(stage)
	if err == nil && filepath.Base(name) != name {
		err = fmt.Errorf("%q is not the name of a file", name)
	}
	if err != nil {
		return false, fmt.Errorf("look into staged layer: %w", err)
	}
	fi, err := os.Lstat(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && fi.Mode().IsRegular(), err
}

func (s *Store) stagePath(stage string) (string, error) {
	if !strings.HasPrefix(stage, newPrefix) || filepath.Base(stage) != stage {
		return "", fmt.Errorf("%q is not a staged layer", stage)
	}
	return filepath.Join(s.dir, stage), nil
}

// Import is Stage and Commit. The same tar again is the same layer.
func (s *Store) Import(ctx context.Context, r io.Reader, progress func(int64)) (digest string, bytes int64, err error) {
	stage, digest, bytes, err := s.Stage(ctx, r, progress)
	if err != nil {
		return "", 0, err
	}
	return digest, bytes, s.Commit(ctx, stage, digest)
}

// reserved is what imports leave free on the disk of the layers, where records and
// logs are too: a 32nd part, at most 1 GiB.
const reserved = 1 << 30

// Room fails with errs.Exhausted when the disk of the layers is as full as imports
// may make it.
func (s *Store) Room() error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.dir, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: s.dir, Err: err}
	}
	free, keep := int64(st.Bavail)*st.Bsize, min(int64(st.Blocks)*st.Bsize/32, reserved)
	if free < keep || st.Files > 0 && st.Ffree < st.Files/32 {
		return errs.New(errs.Exhausted, "%s; %d MiB and %d files are free, and imports must leave %d MiB and %d files free", diskFull,
			free>>20, st.Ffree, keep>>20, st.Files/32)
	}
	return nil
}

// meter is a reader that counts. It fails when its context ends, and when there is
// no more room.
type meter struct {
	ctx      context.Context
	r        io.Reader
	n        int64
	asked    int64 // n when room was last called
	progress func(int64)
	room     func() error
}

// askEvery is how many bytes may be read between two calls of room. It is small,
// because a tar of directories alone takes eight times its size on the disk.
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
