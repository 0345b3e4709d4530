package store

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A snapshotShelf keeps the records of snapshots.
type snapshotShelf struct {
	w            *committer
	snapshots    map[string]record.Snapshot // by ID; guarded by w.mu, as the next
	badSnapshots map[string]error
}

// PutSnapshot adds the record of a snapshot, or replaces it.
func (s *snapshotShelf) PutSnapshot(ctx context.Context, snap record.Snapshot) error {
	b, err := json.Marshal(snap)
	if err == nil {
		err = s.w.commit(ctx, func(tx *bbolt.Tx) error {
			return tx.Bucket(bucketSnapshots).Put([]byte(snap.ID), b)
		}, func() { s.snapshots[snap.ID] = snap })
	}
	if err != nil {
		return fmt.Errorf("put snapshot %s as %s: %w", snap.ID, snap.State, err)
	}
	return nil
}

// DeleteSnapshotRecord removes the record id, which may be unreadable. It is
// no error if there is none.
func (s *snapshotShelf) DeleteSnapshotRecord(ctx context.Context, id string) error {
	err := s.w.commit(ctx, func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketSnapshots).Delete([]byte(id))
	}, func() {
		delete(s.snapshots, id)
		delete(s.badSnapshots, id)
	})
	if err != nil {
		return fmt.Errorf("delete record of snapshot %s: %w", id, err)
	}
	return nil
}

// SnapshotRecord returns the record id; false if there is none, or it cannot be read.
func (s *snapshotShelf) SnapshotRecord(_ context.Context, id string) (record.Snapshot, bool, error) {
	s.w.mu.RLock()
	defer s.w.mu.RUnlock()
	snap, ok := s.snapshots[id]
	return snap, ok, nil
}

// SnapshotRecords returns the records of all snapshots, in no order, and the ids of
// those that cannot be read: their files are no strays.
func (s *snapshotShelf) SnapshotRecords(context.Context) (list []record.Snapshot, unreadable []string, err error) {
	s.w.mu.RLock()
	defer s.w.mu.RUnlock()
	return slices.Collect(maps.Values(s.snapshots)), slices.Sorted(maps.Keys(s.badSnapshots)), nil
}

// loadSnapshots reads every record. It reports and keeps one that cannot be read.
func (s *snapshotShelf) loadSnapshots(tx *bbolt.Tx, log *slog.Logger) error {
	return tx.Bucket(bucketSnapshots).ForEach(func(k, v []byte) error {
		var snap record.Snapshot
		id := string(k)
		err := json.Unmarshal(v, &snap)
		if err == nil && snap.ID != id {
			err = fmt.Errorf("it contains the record of %q", snap.ID)
		}
		if err != nil {
			s.badSnapshots[id] = err
			log.Error("the record of a snapshot cannot be read; its files are left alone until it is deleted", "snapshot", id,
				"err", err)
			return nil
		}
		s.snapshots[id] = snap
		return nil
	})
}
