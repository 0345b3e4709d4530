package snapshot

import (
	"context"
	"os"
	"path/filepath"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

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
