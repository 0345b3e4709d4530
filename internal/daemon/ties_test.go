package daemon

import (
	"log/slog"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/egress/flowlog"
	"github.com/sandboxd/sandboxd/pkg/egress/leases"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// TestLayerUsers: a snapshot that failed stands on nothing.
func TestLayerUsers(t *testing.T) {
	db, err := store.Open(filepath.Join(t.TempDir(), "db"), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for id, state := range map[string]record.SnapshotState{
		"snap-daaaaaaaaaaa": record.SnapshotReady, "snap-dbbbbbbbbbbb": record.SnapshotFailed,
	} {
		if err := db.PutSnapshot(t.Context(), record.Snapshot{
			ID: id, State: state,
			Image: record.Image{Layers: []string{"l"}},
		}); err != nil {
			t.Fatal(err)
		}
	}
	d := &Daemon{store: db, files: &snapshot.Store{Pool: &snapshot.Pool{}}}
	if users := d.layerUsers("l"); !slices.Equal(users, []string{"snap-daaaaaaaaaaa"}) {
		t.Errorf("used by %v", users)
	}
}

// TestSweepEgress: flow logs and DNS leases are removed with the records of their sandboxes,
// also those that a daemon which was killed did not get to.
func TestSweepEgress(t *testing.T) {
	dir := t.TempDir()
	db, err := store.Open(filepath.Join(dir, "db"), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	recorder, err := flowlog.NewRecorder(filepath.Join(dir, "flows"), "sb-", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	d := &Daemon{store: db, files: &snapshot.Store{Pool: &snapshot.Pool{}}, egress: &egress.Engine{FlowLog: recorder}}
	if d.egress.Leases, err = leases.OpenBook(filepath.Join(dir, "leases"), d.log); err != nil {
		t.Fatal(err)
	}
	if err := db.Insert(t.Context(), &record.Record{ID: "taaaaaaaaaaa", State: record.Ended}); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"taaaaaaaaaaa", "tbbbbbbbbbbb", "tccccccccccc"} {
		d.egress.Leases.Open(id).Begin()
		recorder.Open(id).Count(flowlog.Destination{Name: "pypi.org", Port: 443, Proto: 6}, true, time.Now())
		if err := recorder.Save(true); err != nil {
			t.Fatal(err)
		}
	}
	recorder.Open("tddddddddddd")
	if err := (background{d}).sweepEgress(t.Context()); err != nil {
		t.Fatal(err)
	}
	if ids, err := recorder.List(); err != nil || !slices.Equal(ids, []string{"taaaaaaaaaaa"}) {
		t.Errorf("left are %v, %v", ids, err)
	}
	if ids, err := d.egress.Leases.List(); err != nil || !slices.Equal(ids, []string{"taaaaaaaaaaa"}) {
		t.Errorf("left are the leases of %v, %v", ids, err)
	}
	if r := recorder.Report("taaaaaaaaaaa"); r.Total.Allowed != 1 {
		t.Errorf("the log of a sandbox that has ended: %+v", r)
	}
}

// TestAddImages: what snapshots stand on does not come back, and what no image
// has is counted.
func TestAddImages(t *testing.T) {
	image := func(layers ...string) record.Image {
		return record.Image{Name: layers[0], Digest: layers[0], Layers: layers}
	}
	var df wire.DiskUsage
	addImages(&df, []record.Image{image("a", "shared"), image("b", "shared"), image("c")},
		map[string]int64{
			"a": 1, "b": 10, "c": 100, "shared": 1000, "of a snapshot": 10_000, "of nobody": 100_000,
			"of one that failed": 1_000_000,
		},
		[]*record.Record{{Spec: record.Spec{Image: image("a", "shared")}}},
		[]record.Snapshot{
			{State: record.SnapshotReady, Image: image("of a snapshot")},
			{State: record.SnapshotFailed, Image: image("of one that failed")},
			{State: record.SnapshotCreating, Image: image("c")},
		})
	if df.LayerBytes != 1_111_111 || df.ReclaimableBytes != 1_100_010 {
		t.Errorf("layers %d, reclaimable %d", df.LayerBytes, df.ReclaimableBytes)
	}
	want := []wire.ImageDisk{
		{Name: "a", Bytes: 1001, SharedBytes: 1000, Sandboxes: 1},
		{Name: "b", Bytes: 1010, SharedBytes: 1000},
		{Name: "c", Bytes: 100},
	}
	if !slices.Equal(df.Images, want) {
		t.Errorf("images %+v, want %+v", df.Images, want)
	}
}
