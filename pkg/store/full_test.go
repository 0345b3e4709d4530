package store

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestFullDisk fills the state directory, a small tmpfs: writes say so and
// change nothing, reads go on, and when there is room again so do writes.
func TestFullDisk(t *testing.T) {
	hosttest.Root(t)
	dir := hosttest.SmallDisk(t, "size=768k")
	path := filepath.Join(dir, "sandboxd.db")
	db := openTest(t, path, Options{}) // 8 MiB do not fit: only a warning
	ctx := t.Context()
	first := insert(t, db, "dfirst", "lab")

	free := hosttest.FillDisk(t, dir)
	big := strings.Repeat("x", 8<<10)
	written, refused := []string{first.ID}, 0
	for i := 0; refused < 3 && i < 200; i++ {
		r := record.Record{ID: fmt.Sprintf("d%011d", i), LastOutput: big}
		switch err := db.Insert(ctx, &r); {
		case err == nil:
			written = append(written, r.ID)
		case errs.Is(err, errs.Unavailable) && strings.Contains(err.Error(), "no space is left"):
			refused++
		default:
			t.Fatalf("got %v", err)
		}
	}
	if refused != 3 {
		t.Fatalf("%d records fit a full disk", len(written))
	}
	if got, ok, err := db.Get(ctx, "lab"); err != nil || !ok || got.ID != first.ID {
		t.Fatalf("read on a full disk: %v, %v, %v", got, ok, err)
	}
	free()
	after := insert(t, db, "dafter", "")
	written = append(written, after.ID)
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path, Options{Reserve: -1})
	defer db.Close() //nolint:errcheck // nothing written
	list, err := db.List(ctx)
	if err != nil || len(list) != len(written) {
		t.Fatalf("%d records, %v; want %d", len(list), err, len(written))
	}
	for _, id := range written {
		if _, ok, _ := db.Get(ctx, id); !ok {
			t.Errorf("%s is lost", id)
		}
	}
}

// TestReadOnlyDisk: the disk takes no writes after an error. Each change is refused with the reason and
// changes nothing, reads go on, the daemon cannot be started, and after a boot all is there.
func TestReadOnlyDisk(t *testing.T) {
	hosttest.Root(t)
	disk := hosttest.NewDisk(t, 64<<20)
	path := filepath.Join(disk.Dir, "sandboxd.db")
	db := openTest(t, path, Options{})
	ctx := t.Context()
	first := insert(t, db, "dfirst", "lab")
	disk.Break()
	for range 3 {
		r := record.Record{ID: "dsecond"}
		err := db.Insert(ctx, &r)
		if e, ok := errors.AsType[*errs.Error](err); !ok || e.Code != errs.Unavailable ||
			!strings.Contains(e.Text, "takes no writes (read-only file system): nothing was changed") {
			t.Errorf("insert: %v", err)
		}
	}
	first.State = record.Deleting
	if err := db.Put(ctx, first); !errs.Is(err, errs.Unavailable) {
		t.Errorf("put: %v", err)
	}
	look := func() {
		t.Helper()
		all, err := db.List(ctx)
		if got, ok, gerr := db.Get(ctx, "lab"); errors.Join(err, gerr) != nil || !ok || len(all) != 1 || got.State == record.Deleting {
			t.Errorf("%d records, %+v, %v, %v, %v", len(all), got, ok, err, gerr)
		}
	}
	look()
	if err := db.Close(); err != nil {
		t.Error(err)
	}
	if db, err := Open(path, Options{}); err == nil || !strings.Contains(err.Error(), "read-only file system") {
		t.Errorf("a start: %v, %v", db, err)
	}
	disk.Repair()
	db = openTest(t, path, Options{})
	look()
	insert(t, db, "dsecond", "")
	if err := db.Close(); err != nil {
		t.Error(err)
	}
}
