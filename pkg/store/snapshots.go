package store

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// PutSnapshot adds the record of a snapshot, or replaces it.
func (db *DB) PutSnapshot(ctx context.Context, s record.Snapshot) error {
	b, err := json.Marshal(s)
	if err == nil {
		err = db.commit(ctx, func(tx *bbolt.Tx) error {
			return tx.Bucket(bucketSnapshots).Put([]byte(s.ID), b)
		}, func() { db.snapshots[s.ID] = s })
	}
	if err != nil {
		return fmt.Errorf("put snapshot %s as %s: %w", s.ID, s.State, err)
	}
	return nil
}

// DeleteSnapshotRecord removes the record id, which may be unreadable. It is
// no error if there is none.
func (db *DB) DeleteSnapshotRecord(ctx context.Context, id string) error {
	err := db.commit(ctx, func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketSnapshots).Delete([]byte(id))
	}, func() {
		delete(db.snapshots, id)
		delete(db.badSnapshots, id)
	})
	if err != nil {
		return fmt.Errorf("delete record of snapshot %s: %w", id, err)
	}
	return nil
}

// SnapshotRecords returns the records of all snapshots, in no order, and the ids of
// those that cannot be read: their files are no strays.
func (db *DB) SnapshotRecords(context.Context) (list []record.Snapshot, unreadable []string, err error) {
	db.mu.RLock()
	defer db.mu.RUnlock()
	return slices.Collect(maps.Values(db.snapshots)), slices.Sorted(maps.Keys(db.badSnapshots)), nil
}

// loadSnapshots reads every record. It reports and keeps one that cannot be read.
func (db *DB) loadSnapshots(tx *bbolt.Tx) error {
	return tx.Bucket(bucketSnapshots).ForEach(func(k, v []byte) error {
		var s record.Snapshot
		id := string(k)
		err := json.Unmarshal(v, &s)
		if err == nil && s.ID != id {
			err = fmt.Errorf("it contains the record of %q", s.ID)
		}
		if err != nil {
			db.badSnapshots[id] = err
			db.log.Error("the record of a snapshot cannot be read; its files are left alone until it is deleted", "snapshot", id,
				"err", err)
			return nil
		}
		db.snapshots[id] = s
		return nil
	})
}
