package snapshot

import (
	"context"
	"os"
	"path/filepath"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// ListLost returns the ids of disks and snapshots in lost+found.
func (s *Store) ListLost(context.Context) (ids []string, err error) {
	entries, err := os.ReadDir(filepath.Join(s.poolDir, pool.LostDir))
	for _, e := range entries {
		if id, since := pool.CutStray(e.Name()); !since.IsZero() && (record.IsID(id) || record.IsSnapshotID(id)) {
			ids = append(ids, id)
		}
	}
	return ids, err
}
