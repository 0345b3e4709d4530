package daemon

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
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
