package pressure

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestRefuse: what would fill a full disk is refused before it begins: the stores here are none. A full
// pool refuses no image, and a full disk of the state directory no snapshot.
func TestRefuse(t *testing.T) {
	y := newYard(t)
	ctx := t.Context()
	images, snapshots, volumes := Images{Ladder: &y.Ladder}, Snapshots{Ladder: &y.Ladder}, Volumes{Ladder: &y.Ladder}
	adds := map[string]func() error{
		"build":  func() error { _, err := images.Build(ctx, "base", false, nil); return err },
		"import": func() error { _, err := images.Import(ctx, image.Archive{}, nil, nil); return err },
		"pull":   func() error { _, err := images.Pull(ctx, image.Pull{}, nil); return err },
		"commit": func() error { _, err := images.Commit(ctx, record.Image{}, image.Reference{}, false, nil); return err },
	}
	y.free[State] = 0
	for what, f := range adds {
		if err := f(); !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(), "no room for another image: the state has 0 MiB") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := y.Room("another snapshot", Pool); err != nil {
		t.Error(err)
	}
	y.free[State], y.free[Pool] = y.free[Pool], 0
	if _, err := snapshots.Create(ctx, "lab", record.SnapshotRequest{}); !errs.Is(err, errs.Exhausted) ||
		!strings.Contains(err.Error(), "no room for another snapshot: the pool has 0 MiB") {
		t.Errorf("snapshot: %v", err)
	}
	if _, err := volumes.Create(ctx, "data", 0); !errs.Is(err, errs.Exhausted) ||
		!strings.Contains(err.Error(), "no room for another volume: the pool has 0 MiB") {
		t.Errorf("volume: %v", err)
	}
	if err := images.room(); err != nil {
		t.Error(err)
	}
}
