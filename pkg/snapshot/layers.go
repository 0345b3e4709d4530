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
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"golang.org/x/sys/unix"
)

// newPrefix marks what is still being made; Open removes it.
const newPrefix = "new-"

// digestPrefix names the only digest in use: sha256 of the uncompressed tar,
// which OCI calls the diffID.
const digestPrefix = "sha256:"

// ImportLayer unpacks an uncompressed tar into a layer and returns its digest
// and the bytes its files hold. The same tar again is the same layer. progress,
// if not nil, is told the bytes read so far.
//
// Owners, modes with setuid, times, links and file capabilities are kept. What
// lies below dev, proc and sys is dropped: the runtime makes it. The layer is on
// disk before it has its name; a failed import leaves nothing.
func (s *Store) ImportLayer(ctx context.Context, r io.Reader, progress func(int64)) (digest string, bytes int64, err error) {
	dir, err := os.MkdirTemp(s.layerDir, newPrefix)
	if err != nil {
		return "", 0, fmt.Errorf("import layer: %w", err)
	}
	defer func() { err = errors.Join(err, removeTree(dir)) }() // absent by then, if all went well
	h := sha256.New()
	in := &meter{ctx: ctx, r: io.TeeReader(r, h), progress: progress}
	err = withDir(dir, func(fd int) error {
		x := extractor{root: fd, dirs: map[string]int{}}
		defer x.close()
		if err := x.extract(in); err != nil {
			return err
		}
		bytes = x.bytes
		return nil
	})
	if err == nil {
		_, err = io.Copy(io.Discard, in) // the digest is of all of it, padding included
	}
	if err != nil {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			err = errs.Wrap(err, errs.Exhausted, "the disk of the state directory is full: free space, or remove images (sandboxctl image ls)")
		}
		return "", 0, fmt.Errorf("import layer: %w", err)
	}
	sum := hex.EncodeToString(h.Sum(nil))
	final := filepath.Join(s.layerDir, sum)
	if have, err := exists(final); err != nil || have {
		return digestPrefix + sum, bytes, err
	}
	if err := finishLayer(dir, final); err != nil {
		return "", 0, fmt.Errorf("import layer %s: %w", sum, err)
	}
	return digestPrefix + sum, bytes, nil
}

// meter is a reader that ends with its context and counts.
type meter struct {
	ctx      context.Context
	r        io.Reader
	n        int64
	progress func(int64)
}

func (m *meter) Read(p []byte) (int, error) {
	if err := m.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := m.r.Read(p)
	m.n += int64(n)
	if m.progress != nil && n > 0 {
		m.progress(m.n)
	}
	return n, err
}

// LayerPath is the directory of a layer. It fails with errs.Invalid if digest
// is none, and with errs.NotFound if the layer is not here.
func (s *Store) LayerPath(digest string) (string, error) {
	sum, ok := strings.CutPrefix(digest, digestPrefix)
	if !ok || !isHex64(sum) {
		return "", errs.New(errs.Invalid, "layer %q: want sha256: and 64 hex digits", digest)
	}
	dir := filepath.Join(s.layerDir, sum)
	if ok, err := exists(dir); err != nil {
		return "", err
	} else if !ok {
		return "", errs.New(errs.NotFound, "layer %s is not on this host: build or pull its image again", digest)
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
	if err := removeTree(gone); err != nil {
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
