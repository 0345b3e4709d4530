package store

import (
	"reflect"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func TestSnapshots(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{})
	ctx := t.Context()
	s := record.Snapshot{
		ID: "snap-daaaaaaaaaaa", Name: "one", Source: "daaaaaaaaaaa", State: record.SnapshotCreating,
		Image: record.Image{Name: "base", Layers: []string{"sha256:x"}}, Created: time.Now().Round(0).UTC(),
	}
	other := record.Snapshot{ID: "snap-dbbbbbbbbbbb", State: record.SnapshotFailed, Message: "why"}
	for _, put := range []record.Snapshot{s, other} {
		if err := db.PutSnapshot(ctx, put); err != nil {
			t.Fatal(err)
		}
	}
	s.State, s.Bytes = record.SnapshotReady, 7
	if err := db.PutSnapshot(ctx, s); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := db.DeleteSnapshotRecord(ctx, other.ID); err != nil {
			t.Fatal(err)
		}
	}
	// One that is damaged, and one that lies about its id.
	if err := db.bolt.Update(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketSnapshots)
		if err := b.Put([]byte("snap-dccccccccccc"), []byte("{")); err != nil {
			return err
		}
		return b.Put([]byte("snap-dddddddddddd"), []byte(`{"id":"snap-daaaaaaaaaaa"}`))
	}); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path, Options{})
	list, bad, err := db.SnapshotRecords(ctx)
	if err != nil || !reflect.DeepEqual(list, []record.Snapshot{s}) ||
		!reflect.DeepEqual(bad, []string{"snap-dccccccccccc", "snap-dddddddddddd"}) {
		t.Fatalf("%+v, %v, %v; want %+v", list, bad, err, s)
	}
	if got, ok, err := db.SnapshotRecord(ctx, s.ID); err != nil || !ok || !reflect.DeepEqual(got, s) {
		t.Errorf("%+v, %v, %v; want %+v", got, ok, err, s)
	}
	for _, id := range append([]string{other.ID, "one", ""}, bad...) { // deleted, a name, damaged
		if got, ok, err := db.SnapshotRecord(ctx, id); err != nil || ok {
			t.Errorf("%q: %+v, %v", id, got, err)
		}
	}
	for _, id := range bad {
		if err := db.DeleteSnapshotRecord(ctx, id); err != nil {
			t.Fatal(err)
		}
	}
	if _, bad, _ = db.SnapshotRecords(ctx); len(bad) > 0 {
		t.Errorf("still %v", bad)
	}
}

// A file of the release before gets what it lacks, and keeps what it has.
func TestFromSchema1(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{})
	r := insert(t, db, "daaaaaaaaaaa", "lab")
	if err := db.bolt.Update(func(tx *bbolt.Tx) error {
		if err := tx.DeleteBucket(bucketSnapshots); err != nil {
			return err
		}
		return tx.Bucket(bucketMeta).Put(keySchema, []byte("1"))
	}); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path, Options{})
	if got, ok, err := db.Get(t.Context(), "lab"); err != nil || !ok || got.ID != r.ID {
		t.Errorf("%+v, %v, %v", got, ok, err)
	}
	if err := db.PutSnapshot(t.Context(), record.Snapshot{ID: "snap-daaaaaaaaaaa"}); err != nil {
		t.Error(err)
	}
}
