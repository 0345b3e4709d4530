package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

func TestSchemaIsTheLastStep(t *testing.T) {
	if Schema != len(migrations) {
		t.Errorf("Schema is %d, and there are %d migrations", Schema, len(migrations))
	}
}

// note is a migration of these tests: it leaves a mark, and can be made to fail.
func note(name string, fail *error) migration {
	return func(tx *bbolt.Tx) error {
		if err := tx.Bucket(bucketMeta).Put([]byte(name), []byte("done")); err != nil || fail == nil {
			return err
		}
		return *fail
	}
}

func (db *DB) noted(t *testing.T, name string) bool {
	t.Helper()
	var done bool
	if err := db.bolt.View(func(tx *bbolt.Tx) error {
		done = tx.Bucket(bucketMeta).Get([]byte(name)) != nil
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return done
}

func closeTest(t *testing.T, db *DB) {
	t.Helper()
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestMigrate goes from the present schema to one two further, in which the
// second step fails at first: the file is of the schema between then, and the
// store as each start found it is kept.
func TestMigrate(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{})
	insert(t, db, "daaaaaaaaaaa", "lab")
	closeTest(t, db)

	broken := errors.New("broken")
	steps := append(append([]migration(nil), migrations...), note("two", nil), note("three", &broken))
	if _, err := openWith(path, Options{}, steps); !errors.Is(err, broken) ||
		!strings.Contains(err.Error(), fmt.Sprintf("schema %d", Schema+1)) {
		t.Fatalf("a step that fails: %v", err)
	}
	kept := fmt.Sprintf("%s.v%d", path, Schema)
	if f, err := Examine(kept); err != nil || f.Schema != Schema || f.Sandboxes != 1 {
		t.Errorf("kept: %+v, %v", f, err)
	}
	broken = nil
	for range 2 { // the second time there is nothing to do
		db, err := openWith(path, Options{}, steps)
		if err != nil {
			t.Fatal(err)
		}
		if v, err := db.schema(); err != nil || v != Schema+2 || !db.noted(t, "two") || !db.noted(t, "three") {
			t.Errorf("schema %d, %v", v, err)
		}
		if r, ok, err := db.Get(t.Context(), "lab"); err != nil || !ok || r.ID != "daaaaaaaaaaa" {
			t.Errorf("%+v, %v, %v", r, ok, err)
		}
		closeTest(t, db)
	}
	// The release of before: not on the new file, but on what was kept.
	if _, err := Open(path, Options{}); err == nil || !strings.Contains(err.Error(), "newer sandboxd") {
		t.Errorf("the release of before on the file after: %v", err)
	}
	db = openTest(t, kept, Options{})
	if _, ok, err := db.Get(t.Context(), "lab"); err != nil || !ok || db.noted(t, "two") {
		t.Errorf("on what was kept: %v, %v", ok, err)
	}
}

// TestMigrateNewFile keeps no copy of nothing.
func TestMigrateNewFile(t *testing.T) {
	path := newPath(t)
	db, err := openWith(path, Options{}, append(append([]migration(nil), migrations...), note("two", nil)))
	if err != nil {
		t.Fatal(err)
	}
	closeTest(t, db)
	if files, err := os.ReadDir(filepath.Dir(path)); err != nil || len(files) != 1 {
		t.Errorf("%v, %v", files, err)
	}
}

// TestMigrateWithoutRoom changes nothing where the copy does not fit.
func TestMigrateWithoutRoom(t *testing.T) {
	hosttest.Root(t)
	dir := hosttest.SmallDisk(t, "size=1m")
	path := dir + "/sandboxd.db"
	db := openTest(t, path, Options{Reserve: -1})
	for i := range 10 {
		insert(t, db, fmt.Sprintf("d%011d", i), "")
	}
	closeTest(t, db)
	steps := append(append([]migration(nil), migrations...), note("two", nil))
	_, err := openWith(path, Options{Reserve: -1}, steps)
	if err == nil || !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "copy the state of schema") {
		t.Fatalf("without room: %v", err)
	}
	if f, err := Examine(path); err != nil || f.Schema != Schema || f.Sandboxes != 10 {
		t.Errorf("%+v, %v", f, err)
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("left %v, %v", files, err)
	}
}
