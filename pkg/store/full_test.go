package store

import (
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
