package store

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// release, if set, makes TestUpgrade write the file of this release first:
//
//	go test ./pkg/store -run TestUpgrade -release release-2
//
// It is run once for each release, before the tag; what is there is never
// written again.
var release = flag.String("release", "", "write testdata/`NAME` with this code")

// kept is what a release knew, as JSON of that time. What it did not know yet is
// not in it.
type kept struct {
	Pool      string                 `json:"pool"`
	Restored  string                 `json:"restored,omitempty"`
	Records   []*record.Record       `json:"records"`
	Images    []record.Image         `json:"images"`
	Snapshots []record.Snapshot      `json:"snapshots,omitempty"`
	Requests  map[string]record.Made `json:"requests,omitempty"` // by key
	Keys      []record.Key           `json:"keys,omitempty"`
	Volumes   []record.Volume        `json:"volumes,omitempty"`
	Policies  []record.Policy        `json:"policies,omitempty"`
	Pools     []record.Pool          `json:"pools,omitempty"`
	Secrets   []record.Secret        `json:"secrets,omitempty"`
}

// TestUpgrade opens what each release wrote and finds all that was in it.
func TestUpgrade(t *testing.T) {
	if *release != "" {
		writeRelease(t, filepath.Join("testdata", *release))
	}
	dirs, err := filepath.Glob("testdata/release-*")
	if err != nil || len(dirs) == 0 {
		t.Fatalf("no release: %v", err)
	}
	for _, dir := range dirs {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			path, want := readRelease(t, dir)
			upgrades(t, path, want)
		})
	}
}

// TestUpgradeSnapshot migrates a snapshot, which what the release before volumes,
// keys and requests left in testdata has none of.
func TestUpgradeSnapshot(t *testing.T) {
	path, want := withSnapshot(t)
	upgrades(t, path, want)
	// What the migration kept is for the release before: as it was.
	kept := path + ".v2"
	if f, err := Examine(kept); err != nil || f.Schema != 2 {
		t.Fatalf("kept: %+v, %v", f, err)
	}
	upgrades(t, kept, want)
}

// TestUpgradeRestored restores a backup of a release before: until somebody
// accepts it the store says so, whatever was migrated since.
func TestUpgradeRestored(t *testing.T) {
	path, want := withSnapshot(t)
	if err := MarkRestored(path, "a backup"); err != nil {
		t.Fatal(err)
	}
	want.Restored = "a backup"
	want.Records[0].State = record.Running // it was being created, and may run
	upgrades(t, path, want)
}

// withSnapshot is the file of release-1, of schema 2, with a snapshot in it: the
// text is of that time.
func withSnapshot(t *testing.T) (path string, want kept) {
	t.Helper()
	path, want = readRelease(t, "testdata/release-1")
	if f, err := Examine(path); err != nil || f.Schema != 2 || want.Snapshots != nil {
		t.Fatalf("%+v, %v, with %+v: want schema 2 without snapshots", f, err, want.Snapshots)
	}
	const id, text = "snap-uaaaaaaaaaaa", `{"id":"snap-uaaaaaaaaaaa","name":"before","source":"ubbbbbbbbbbb","state":"ready",` +
		`"image":{"name":"base","tag":"latest","digest":"sha256:ab","layers":["sha256:cd"],"bytes":1048576,"created":"2026-11-21T12:00:00Z","config":{"user":"nobody"}},` +
		`"bytes":4096,"created":"2026-11-21T12:00:00Z","changed":"2026-11-21T12:01:00Z"}`
	edit(t, path, func(tx *bbolt.Tx) error { return tx.Bucket(bucketSnapshots).Put([]byte(id), []byte(text)) })
	want.Snapshots = []record.Snapshot{{
		ID: id, Name: "before", Source: "ubbbbbbbbbbb", State: record.SnapshotReady, Bytes: 4096, Created: past,
		Changed: past.Add(time.Minute),
		Image: record.Image{
			Name: "base", Tag: "latest", Digest: "sha256:ab", Layers: []string{"sha256:cd"}, Bytes: 1 << 20, Created: past,
			Config: record.ImageConfig{User: "nobody"},
		},
	}}
	return path, want
}

// readRelease copies the store of a release, and says what must be in it.
func readRelease(t *testing.T, dir string) (path string, want kept) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "contents.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile(filepath.Join(dir, "sandboxd.db"))
	if err != nil {
		t.Fatal(err)
	}
	path = newPath(t)
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	return path, want
}

// upgrades opens the store of a release and goes on with it.
func upgrades(t *testing.T, path string, want kept) {
	t.Helper()
	for range 2 { // once with the migrations, once without
		db := openTest(t, path, Options{})
		if got := contentsOf(t, db); !reflect.DeepEqual(got, want) {
			t.Errorf("it holds\n%s\nwant\n%s", indented(t, got), indented(t, want))
		}
		if _, ok, err := db.Get(t.Context(), "lab"); err != nil || !ok {
			t.Errorf("by name: %v, %v", ok, err)
		}
		closeTest(t, db)
	}
	// Slots in use stay so: a new sandbox gets none of them.
	db := openTest(t, path, Options{})
	for i := range 4 {
		r := record.Record{ID: fmt.Sprintf("unew%08d", i)}
		if err := db.Insert(t.Context(), &r); err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(want.Records, func(o *record.Record) bool { return o.Slot == r.Slot }) {
			t.Errorf("slot %d was given twice", r.Slot)
		}
	}
}

func indented(t *testing.T, k kept) []byte {
	t.Helper()
	text, err := json.MarshalIndent(k, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return append(text, '\n')
}

// contentsOf is all that a store knows, as its callers are told.
func contentsOf(t *testing.T, db *DB) (k kept) {
	t.Helper()
	ctx := t.Context()
	if bad := unreadable(t, db); len(bad) > 0 {
		t.Fatalf("cannot be read: %v", bad)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var err error
	k.Pool, k.Restored = db.PoolID(), db.Restored()
	k.Records, err = db.List(ctx)
	must(err)
	slices.SortFunc(k.Records, func(a, b *record.Record) int { return strings.Compare(a.ID, b.ID) })
	k.Images, _, err = db.ListImages(ctx)
	must(err)
	k.Snapshots, _, err = db.SnapshotRecords(ctx)
	must(err)
	slices.SortFunc(k.Snapshots, func(a, b record.Snapshot) int { return strings.Compare(a.ID, b.ID) })
	k.Keys, err = db.Keys(ctx)
	must(err)
	k.Volumes, _, err = db.Volumes(ctx)
	must(err)
	slices.SortFunc(k.Volumes, func(a, b record.Volume) int { return strings.Compare(a.Name, b.Name) })
	k.Pools, err = db.Pools(ctx)
	must(err)
	k.Policies, _, err = db.Policies(ctx)
	must(err)
	k.Secrets, _, err = db.Secrets(ctx)
	must(err)
	for _, key := range requests(t, db) {
		made, _, err := db.Made(ctx, key)
		must(err)
		if k.Requests == nil {
			k.Requests = map[string]record.Made{}
		}
		k.Requests[key] = made
	}
	return k
}
