package contents

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/snapshottest"
	"github.com/sandboxd/sandboxd/pkg/store"
)

func TestMain(m *testing.M) { snapshottest.Main(m) }

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// look lists all names below directories, with owners, modes, times and content.
func look(t *testing.T, dirs ...string) string {
	t.Helper()
	out := ""
	for _, dir := range dirs {
		cmd := exec.Command("sh", "-ec", `find . -printf '%P %y %m %U:%G %T@ %n %l\n' | sort; find . -type f -print0 | sort -z | xargs -0r sha256sum`)
		cmd.Dir = dir
		b, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", dir, err, b)
		}
		out += string(b)
	}
	return out
}

const (
	vol, gone = "vol-abcdefghijkl", "vol-abcdefghijkm"
	snap      = "snap-abcdefghijkl"
)

// TestRestore: volumes, snapshots and layers of a pool come back. Of a damaged pack the error tells,
// what needs it is left out, and the next try brings it.
func TestRestore(t *testing.T) {
	for _, kind := range []string{pool.BtrfsLoop, pool.Plain} {
		t.Run(kind, func(t *testing.T) {
			e := snapshottest.New(t, kind, nil)
			ctx, in := t.Context(), filepath.Join(e.Config.StateDir, "pool")
			id := e.Disk(t, 0)
			upper := filepath.Join(in, id, "u")
			must(t, os.WriteFile(filepath.Join(upper, "file"), []byte("of the snapshot"), 0o640),
				unix.Mknod(filepath.Join(upper, "gone"), unix.S_IFCHR, 0),
				os.Chown(filepath.Join(upper, "file"), 33, 44), e.Snapshots.TakeSnapshot(ctx, snap, id),
				e.Volumes.MakeVolume(ctx, vol, 0, snapshot.Seed{}))
			files := filepath.Join(in, vol, "d")
			random := make([]byte, 3000)
			_, err := rand.Read(random)
			must(t, err, os.WriteFile(filepath.Join(files, "random"), random, 0o600),
				os.Link(filepath.Join(files, "random"), filepath.Join(files, "random too")))
			must(t, os.WriteFile(filepath.Join(files, "data"), make([]byte, 5000), 0o600),
				os.Link(filepath.Join(files, "data"), filepath.Join(files, "hard")),
				os.Chmod(files, 0o1777), os.Chown(files, 7, 8))
			to, err := target.Parse(t.TempDir(), target.Options{})
			must(t, err)
			store := &chunks.Store{
				Target: to, Whose: target.Whose{Label: "a-box", BackupIdentity: store.NewBackupIdentity("")},
				Journal: filepath.Join(t.TempDir(), "journal"), Log: slog.New(slog.DiscardHandler),
			}
			h := Host{
				Files: e.Store, Layers: []string{e.Layer}, Spool: t.TempDir(), Log: store.Log,
				Snapshots: []record.Snapshot{
					{ID: snap, State: record.SnapshotReady},
					{ID: "snap-abcdefghijkn", State: record.SnapshotCreating},
					{ID: "snap-abcdefghijko", State: record.SnapshotReady, Temporary: true},
				},
				Volumes: []record.Volume{
					{ID: vol, Name: "v", State: record.VolumeReady, Made: true},
					{ID: gone, Name: "gone", State: record.VolumeReady, Made: true},
					{ID: "vol-abcdefghijkp", State: record.VolumeReady, Made: true, Owner: id},
					{ID: "vol-abcdefghijkq", State: record.VolumeReady},
				},
			}
			s, err := store.Begin(ctx)
			must(t, err)
			d, err := Save(ctx, h, s)
			must(t, err, s.Close())
			if len(d.Trees) != 3 || len(d.Left) != 1 || !strings.Contains(d.Left[0].Tree, gone) {
				t.Fatalf("it has %+v, without %+v", d.Trees, d.Left)
			}
			if left, err := os.ReadDir(filepath.Join(in, pool.BackupDir)); len(left) > 0 {
				t.Errorf("%v is left, %v", left, err)
			}
			must(t, Check(ctx, to, d, nil, func(int) int { return 0 }))

			layer, err := e.Layers.Path(e.Layer)
			must(t, err)
			frozen, err := e.Snapshots.Upper(snap)
			must(t, err)
			want := look(t, layer, frozen, files)
			must(t, e.Volumes.DeleteVolume(ctx, vol), e.Snapshots.DeleteSnapshot(ctx, snap), e.Layers.Remove(ctx, e.Layer))
			pack := filepath.Join(to.String(), d.Catalog.Packs[0].Name)
			whole, err := os.ReadFile(pack)
			must(t, err)
			bad := append([]byte{}, whole...)
			bad[100] ^= 1
			must(t, os.WriteFile(pack, bad, 0o600))
			if err := Restore(ctx, e.Store, to, d, nil, io.Discard); err == nil || !strings.Contains(err.Error(), filepath.Base(pack)) {
				t.Errorf("with a changed pack: %v", err)
			}
			if _, err := e.Layers.Path(e.Layer); err == nil {
				t.Error("the layer was in that pack, and is there")
			}
			if look(t, files) == "" || look(t, frozen) == "" {
				t.Error("the others are not there")
			}
			must(t, os.WriteFile(pack, whole, 0o600))
			var out strings.Builder
			must(t, Restore(ctx, e.Store, to, d, nil, &out))
			if !strings.Contains(out.String(), vol+" v is on the pool, and stays") || !strings.Contains(out.String(), gone) {
				t.Errorf("it said %s", out.String())
			}
			if got := look(t, layer, frozen, files); got != want {
				t.Errorf("it has\n%s\nwant\n%s", got, want)
			}
			must(t, e.Snapshots.DeleteSnapshot(ctx, snap), e.Volumes.DeleteVolume(ctx, vol)) // they are like others

			// One bad byte leaves out one file, with all of its names, and not the volume.
			for _, p := range d.Catalog.Packs { // what does not compress is in one as it is
				pack = filepath.Join(to.String(), p.Name)
				bad, err = os.ReadFile(pack)
				must(t, err)
				if at := bytes.Index(bad, random); at >= 0 {
					bad[at+1000] ^= 1
					must(t, os.WriteFile(pack, bad, 0o600))
					break
				}
			}
			err = Restore(ctx, e.Store, to, d, nil, io.Discard)
			if err == nil || !strings.Contains(err.Error(), vol+" v is restored without 2 files") ||
				!strings.Contains(err.Error(), `"random": `) || !strings.Contains(err.Error(), filepath.Base(pack)) {
				t.Errorf("with a bad byte in a file: %v", err)
			}
			kept := slices.DeleteFunc(strings.SplitAfter(want, "\n"), func(l string) bool { return strings.Contains(l, "random") })
			if got := look(t, layer, frozen, files); got != strings.Join(kept, "") {
				t.Errorf("it has\n%s\nwant\n%s", got, strings.Join(kept, ""))
			}
			if err := Check(ctx, to, d, nil, func(int) int { return 0 }); !errors.Is(err, chunks.ErrBad) {
				t.Errorf("a check of it: %v", err)
			}
			must(t, e.Snapshots.DeleteSnapshot(ctx, snap), e.Volumes.DeleteVolume(ctx, vol))
			if left, err := e.Volumes.ListVolumes(ctx); err != nil || len(left) > 0 {
				t.Errorf("%v, %v", left, err)
			}
		})
	}
}
