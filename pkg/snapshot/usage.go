package snapshot

import (
	"context"
	"os"
	"path/filepath"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// LayerBytes is what the files of a layer take on the disk, hard links once. It
// walks the layer, 30 ms for 10,000 files; a layer never changes, so once is
// enough.
func (s *Store) LayerBytes(ctx context.Context, digest string) (bytes int64, err error) {
	dir, err := s.LayerPath(digest)
	if err != nil {
		return 0, err
	}
	err = tree.Walk(ctx, dir, func(st *unix.Stat_t) { bytes += st.Blocks * 512 })
	return bytes, err
}

// ListLost returns the ids of disks and snapshots in lost+found.
func (s *Store) ListLost(context.Context) (ids []string, err error) {
	entries, err := os.ReadDir(filepath.Join(s.poolDir, lostDir))
	for _, e := range entries {
		if id, since := cutStray(e.Name()); !since.IsZero() && (record.IsID(id) || record.IsSnapshotID(id)) {
			ids = append(ids, id)
		}
	}
	return ids, err
}
