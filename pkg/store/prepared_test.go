package store

import (
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestTakePrepared: a creation takes a prepared slot in one transaction, once, and only
// one for its runtime; a refused creation leaves it as it was.
func TestTakePrepared(t *testing.T) {
	const id = "daaaaaaaaaaa"
	path := newPath(t)
	db := openTest(t, path, Options{Slots: 2})
	slot := record.Record{ID: id, State: record.Prepared, Spec: record.Spec{Runtime: "runc"}}
	if err := db.Insert(t.Context(), &slot); err != nil {
		t.Fatal(err)
	}
	insert(t, db, "dbbbbbbbbbbb", "lab")
	take := func(runtime, name string) error {
		r := record.Record{ID: id, State: record.Creating, Prepared: true, Spec: record.Spec{Runtime: runtime, Name: name}}
		err := db.Insert(t.Context(), &r)
		if err == nil && r.Slot != slot.Slot {
			t.Errorf("it has slot %d, and the prepared slot was %d", r.Slot, slot.Slot)
		}
		return err
	}
	if err := take("runsc", ""); !errs.Is(err, errs.NotFound) {
		t.Errorf("for another runtime: %v", err)
	}
	if err := take("runc", "lab"); !errs.Is(err, errs.Exists) {
		t.Errorf("with a name that is taken: %v", err)
	}
	if r, ok, err := db.Get(t.Context(), id); err != nil || !ok || r.State != record.Prepared {
		t.Errorf("after refusals it is %+v, %v", r, err)
	}
	if err := take("runc", "other"); err != nil {
		t.Error(err)
	}
	if err := take("runc", "third"); !errs.Is(err, errs.NotFound) {
		t.Errorf("a second time: %v", err)
	}
	closeTest(t, db)
	db = openTest(t, path, Options{Slots: 2})
	if r, ok, err := db.Get(t.Context(), "other"); err != nil || !ok || r.ID != id || r.State != record.Creating || !r.Prepared {
		t.Errorf("reopened: %+v, %v", r, err)
	}
	third := record.Record{ID: "dccccccccccc", State: record.Prepared}
	if err := db.Insert(t.Context(), &third); !errs.Is(err, errs.Exhausted) {
		t.Errorf("a third record in two slots: %v", err)
	}
}

// TestRestoredWithoutPrepared: a restored store knows no prepared slots, and their
// numbers are free: sandboxes that took them since must be unknown, not empty.
func TestRestoredWithoutPrepared(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{Slots: 2})
	slot := record.Record{ID: "daaaaaaaaaaa", State: record.Prepared, Spec: record.Spec{Runtime: "runc"}}
	if err := db.Insert(t.Context(), &slot); err != nil {
		t.Fatal(err)
	}
	insert(t, db, "dbbbbbbbbbbb", "lab")
	closeTest(t, db)
	if f, err := Examine(path); err != nil || f.Sandboxes != 1 {
		t.Errorf("a backup says %+v, %v", f, err)
	}
	if err := MarkRestored(path, "a backup"); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path, Options{Slots: 2})
	if all, err := db.List(t.Context()); err != nil || len(all) != 1 || all[0].ID != "dbbbbbbbbbbb" {
		t.Errorf("restored: %+v, %v", all, err)
	}
	insert(t, db, "dccccccccccc", "")
}
