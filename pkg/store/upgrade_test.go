package store

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// release, if set, makes TestUpgrade write the file of this release first:
//
//	go test ./pkg/store -run TestUpgrade -release release-1
//
// It is run once for each release, before the tag; what is there is never
// written again.
var release = flag.String("release", "", "write testdata/`NAME` with this code")

// kept is what a release knew: its records and images, as JSON of that time.
type kept struct {
	Pool    string           `json:"pool"`
	Records []*record.Record `json:"records"`
	Images  []record.Image   `json:"images"`
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
			text, err := os.ReadFile(filepath.Join(dir, "contents.json"))
			if err != nil {
				t.Fatal(err)
			}
			var want kept
			if err := json.Unmarshal(text, &want); err != nil {
				t.Fatal(err)
			}
			file, err := os.ReadFile(filepath.Join(dir, "sandboxd.db"))
			if err != nil {
				t.Fatal(err)
			}
			path := newPath(t)
			if err := os.WriteFile(path, file, 0o600); err != nil {
				t.Fatal(err)
			}
			for range 2 { // once with the migrations, once without
				db := openTest(t, path, Options{})
				if got := contentsOf(t, db); !reflect.DeepEqual(got, want) {
					t.Errorf("it holds\n%+v\nwant\n%+v", got, want)
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
		})
	}
}

func contentsOf(t *testing.T, db *DB) kept {
	t.Helper()
	records, err := db.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(records, func(a, b *record.Record) int { return strings.Compare(a.ID, b.ID) })
	images, _, err := db.ListImages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return kept{db.PoolID(), records, images}
}

// writeRelease writes a store with a sandbox in every state and a value in
// every field.
func writeRelease(t *testing.T, dir string) {
	if err := errors.Join(os.MkdirAll(filepath.Dir(dir), 0o755), os.Mkdir(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "sandboxd.db")
	db := openTest(t, path, Options{Slots: 32, Reserve: -1})
	ctx, at := t.Context(), time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	image := record.Image{
		Name: "base", Tag: "latest", Digest: "sha256:" + strings.Repeat("ab", 32), Layers: []string{"sha256:" + strings.Repeat("cd", 32)}, Bytes: 1 << 20, Created: at,
		Config: record.ImageConfig{Env: []string{"PATH=/bin"}, Workdir: "/root", User: "nobody"},
	}
	code := 3
	full := record.Spec{
		Name: "lab", Image: image, Runtime: "runsc", Entrypoint: []string{"sleep", "1"}, Env: map[string]string{"KEY": "value"}, Labels: map[string]string{"team": "a"},
		Timeout: time.Hour, OneShot: true, Limits: record.Limits{MemoryBytes: 1 << 28, CPUMillis: 500, Pids: 64, DiskBytes: 1 << 30},
		Network: record.Network{Mode: record.NetworkRules, Rules: []record.Rule{
			{Allow: true, Prefix: netip.MustParsePrefix("203.0.113.0/24"), Ports: [2]uint16{443, 443}, Proto: "tcp"},
		}},
		ResourceLimits: map[string]string{"cpu": "500m"}, Platform: map[string]string{"os": "linux"}, Extensions: map[string]string{"x": "y"}, NetworkPolicy: []byte(`{"egress":[]}`),
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(db.SetPoolID(ctx, "00112233445566778899aabbccddeeff"))
	must(db.PutImage(ctx, image))
	for i, s := range []record.State{record.Creating, record.Running, record.Pausing, record.Paused, record.Resuming, record.Stopping, record.Ended, record.Deleting} {
		r := record.Record{
			ID: "u" + strings.Repeat(string(rune('a'+i)), 11), State: s, Token: "TOKEN", BootID: "a-boot-long-ago", Created: at, Changed: at.Add(time.Minute),
			Spec: record.Spec{Image: image, Runtime: "runc", Limits: record.Limits{MemoryBytes: 1 << 28, CPUMillis: 1000, Pids: 256}, Network: record.Network{Mode: record.NetworkNone}},
		}
		if s == record.Running {
			r.Spec = full
		}
		if s == record.Ended {
			r.Reason, r.Message, r.ExitCode, r.LastOutput = record.Exited, "exited with 3", &code, "bye\n"
			r.Changed = time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC) // retain_ended must not end it before a test looks
			r.Expires = r.Changed
		}
		must(db.Insert(ctx, &r))
	}
	must(db.Delete(ctx, "u"+strings.Repeat("a", 11))) // a slot that was given back
	r := record.Record{ID: "u" + strings.Repeat("a", 11), State: record.Creating, BootID: "a-boot-long-ago", Created: at, Changed: at, Spec: record.Spec{Image: image, Runtime: "runc"}}
	must(db.Insert(ctx, &r))
	text, err := json.MarshalIndent(contentsOf(t, db), "", "  ")
	must(err)
	must(db.Close())
	must(os.WriteFile(filepath.Join(dir, "contents.json"), append(text, '\n'), 0o644))
	must(os.Chmod(path, 0o644)) // git keeps no other mode
	must(os.Truncate(path, usedBytes(t, path)))
}

// usedBytes is how much of a store's file is in use: bbolt makes it 8 MiB long.
func usedBytes(t *testing.T, path string) int64 {
	t.Helper()
	b, err := open(path, time.Second, true)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close() //nolint:errcheck // read only
	tx, err := b.Begin(false)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() //nolint:errcheck // read only
	return tx.Size()
}
