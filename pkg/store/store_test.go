package store

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// open opens a store that t closes.
func openTest(t testing.TB, path string, o Options) *DB {
	t.Helper()
	db, err := Open(path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() }) //nolint:errcheck // closed twice by some tests
	return db
}

func newPath(t testing.TB) string { return filepath.Join(t.TempDir(), "sandboxd.db") }

func insert(t testing.TB, db *DB, id, name string) record.Record {
	t.Helper()
	r := record.Record{ID: id, State: record.Creating, Spec: record.Spec{Name: name}}
	if err := db.Insert(t.Context(), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestReopen(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{})
	r := insert(t, db, "daaaaaaaaaaa", "lab")
	code := 3
	r.State, r.Reason, r.ExitCode, r.LastOutput = record.Ended, record.Exited, &code, "bye\n"
	r.Created = time.Now().Round(0).UTC()
	r.Spec.Labels = map[string]string{"team": "a"}
	if err := db.Put(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if db.PoolID() != "" {
		t.Fatalf("a new store belongs to pool %q", db.PoolID())
	}
	if err := db.SetPoolID(t.Context(), "p1"); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v; want 0600", fi.Mode(), err)
	}

	db = openTest(t, path, Options{})
	if db.PoolID() != "p1" {
		t.Fatalf("pool id p1 became %q", db.PoolID())
	}
	for _, key := range []string{"daaaaaaaaaaa", "lab"} {
		got, ok, err := db.Get(t.Context(), key)
		if err != nil || !ok || !reflect.DeepEqual(got, r) {
			t.Fatalf("Get(%s) = %+v, %v, %v; want %+v", key, got, ok, err, r)
		}
	}
	if list, err := db.List(t.Context()); err != nil || len(list) != 1 {
		t.Fatalf("List = %v, %v", list, err)
	}
}

func TestNames(t *testing.T) {
	db := openTest(t, newPath(t), Options{})
	ctx := t.Context()
	a := insert(t, db, "daaaaaaaaaaa", "lab")
	b := record.Record{ID: "dbbbbbbbbbbb", Spec: record.Spec{Name: "lab"}}
	if err := db.Insert(ctx, &b); !errs.Is(err, errs.Exists) {
		t.Fatalf("taken name: %v", err)
	}
	same := record.Record{ID: a.ID}
	if err := db.Insert(ctx, &same); !errs.Is(err, errs.Exists) {
		t.Fatalf("taken id: %v", err)
	}
	// A sandbox that is being deleted gives its name away ...
	a.State = record.Deleting
	if err := db.Put(ctx, a); err != nil {
		t.Fatal(err)
	}
	if _, ok, _ := db.Get(ctx, "lab"); ok {
		t.Fatal("a name leads to a sandbox that is being deleted")
	}
	if err := db.Insert(ctx, &b); err != nil {
		t.Fatal(err)
	}
	// ... and does not take it back when it goes.
	for range 2 {
		if err := db.Delete(ctx, a.ID); err != nil {
			t.Fatal(err)
		}
	}
	if got, ok, _ := db.Get(ctx, "lab"); !ok || got.ID != b.ID {
		t.Fatalf("lab is %v, want %s", got.ID, b.ID)
	}
	if err := db.Put(ctx, a); !errs.Is(err, errs.NotFound) {
		t.Fatalf("put of a deleted record: %v", err)
	}
}

// TestRename: a record that is put under another name has that one, and no other record
// does, also after a restart.
func TestRename(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{})
	ctx := t.Context()
	a, b, c := insert(t, db, "daaaaaaaaaaa", "lab"), insert(t, db, "dbbbbbbbbbbb", ""), insert(t, db, "dccccccccccc", "taken")
	put := func(r record.Record, name string, want errs.Code) {
		t.Helper()
		r.Spec.Name = name
		if err := db.Put(ctx, r); (err != nil || want != "") && !errs.Is(err, want) {
			t.Errorf("%s to %q: %v, want %q", r.ID, name, err, want)
		}
	}
	put(a, "taken", errs.Exists)
	put(b, "lab", errs.Exists)
	for range 2 {
		put(a, "old", "")
		put(b, "lab", "")
	}
	for range 2 {
		for name, id := range map[string]string{"old": a.ID, "lab": b.ID, "taken": c.ID} {
			if r, ok, err := db.Get(ctx, name); r.ID != id || r.Spec.Name != name || !ok || err != nil {
				t.Errorf("%s is %s called %q, %v; want %s", name, r.ID, r.Spec.Name, err, id)
			}
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		db = openTest(t, path, Options{})
	}
	if err := db.Delete(ctx, a.ID); err != nil {
		t.Fatal(err)
	}
	put(c, "old", "")
	if _, ok, err := db.Get(ctx, "taken"); ok || err != nil {
		t.Errorf("the old name leads somewhere, %v", err)
	}
}

func TestSlots(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{Slots: 3})
	ctx := t.Context()
	for i, id := range []string{"a", "b", "c"} {
		if r := insert(t, db, id, ""); r.Slot != i {
			t.Fatalf("%s got slot %d, want %d", id, r.Slot, i)
		}
	}
	d := record.Record{ID: "d"}
	if err := db.Insert(ctx, &d); !errs.Is(err, errs.Exhausted) {
		t.Fatalf("no slot left: %v", err)
	}
	for _, id := range []string{"b", "a"} {
		if err := db.Delete(ctx, id); err != nil {
			t.Fatal(err)
		}
	}
	// The queue survives, and grows at its end.
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path, Options{Slots: 4})
	for i, want := range []int{1, 0, 3} {
		if r := insert(t, db, fmt.Sprint("e", i), ""); r.Slot != want {
			t.Fatalf("got slot %d, want %d: least recently used first", r.Slot, want)
		}
	}
}

func TestImages(t *testing.T) {
	db := openTest(t, newPath(t), Options{})
	ctx := t.Context()
	img := record.Image{Name: "python", Tag: "latest", Digest: "sha256:1", Layers: []string{"sha256:2"}}
	if err := db.PutImage(ctx, img, true); err != nil {
		t.Fatal(err)
	}
	if got, ok, err := db.GetImage(ctx, "python", "latest"); err != nil || !ok || !reflect.DeepEqual(got, img) {
		t.Fatalf("got %+v, %v, %v", got, ok, err)
	}
	if _, ok, err := db.GetImage(ctx, "python", "3"); err != nil || ok {
		t.Fatalf("unknown tag: %v, %v", ok, err)
	}
	if list, _, err := db.ListImages(ctx); err != nil || len(list) != 1 {
		t.Fatalf("list: %v, %v", list, err)
	}
	for range 2 {
		if err := db.DeleteImage(ctx, "python", "latest"); err != nil {
			t.Fatal(err)
		}
	}
	if list, _, _ := db.ListImages(ctx); len(list) != 0 {
		t.Fatalf("deleted image is still listed: %v", list)
	}
}

// TestUnreadableImage: it is told of and kept until it is deleted, or replaced.
func TestUnreadableImage(t *testing.T) {
	for name, text := range map[string]string{"broken": "{", "another's": `{"name":"ruby","tag":"latest"}`, "empty": "{}"} {
		t.Run(name, func(t *testing.T) {
			path, ctx := newPath(t), t.Context()
			closeTest(t, openTest(t, path, Options{}))
			edit(t, path, func(tx *bbolt.Tx) error { return tx.Bucket(bucketImages).Put([]byte("python:latest"), []byte(text)) })
			db := openTest(t, path, Options{})
			if list, bad, err := db.ListImages(ctx); err != nil || len(list) > 0 || !reflect.DeepEqual(bad, []string{"python:latest"}) {
				t.Errorf("%v, %v, %v", list, bad, err)
			}
			if _, _, err := db.GetImage(ctx, "python", "latest"); !errs.Is(err, errs.Internal) {
				t.Errorf("got %v", err)
			}
			if err := db.DeleteImage(ctx, "python", "latest"); err != nil {
				t.Error(err)
			}
			if _, bad, err := db.ListImages(ctx); err != nil || len(bad) > 0 {
				t.Errorf("still %v, %v", bad, err)
			}
		})
	}
}

// TestExamineDecodes every record, of each kind.
func TestExamineDecodes(t *testing.T) {
	for _, bucket := range withRecords {
		path := newPath(t)
		db := openTest(t, path, Options{})
		insert(t, db, "daaaaaaaaaaa", "")
		if err := db.PutImage(t.Context(), record.Image{Name: "a", Tag: "b"}, true); err != nil {
			t.Fatal(err)
		}
		closeTest(t, db)
		if f, err := Examine(path); err != nil || f.Sandboxes != 1 || f.Images != 1 {
			t.Errorf("%+v, %v", f, err)
		}
		edit(t, path, func(tx *bbolt.Tx) error { return tx.Bucket(bucket).Put([]byte("broken"), []byte("{")) })
		if _, err := Examine(path); err == nil || !strings.Contains(err.Error(), "record broken") {
			t.Errorf("in %s: %v", bucket, err)
		}
	}
}

// TestInsertWithoutImage: nothing comes to stand on an image that went since it
// was looked up.
func TestInsertWithoutImage(t *testing.T) {
	db, ctx := openTest(t, newPath(t), Options{}), t.Context()
	img := record.Image{Name: "python", Tag: "latest", Digest: "sha256:1", Layers: []string{"sha256:2"}}
	try := func(id, snapshot string) error {
		return db.Insert(ctx, &record.Record{ID: id, State: record.Creating, Spec: record.Spec{Image: img, Snapshot: snapshot}})
	}
	if err := try("daaaaaaaaaaa", ""); !errs.Is(err, errs.Unavailable) {
		t.Errorf("of no image: %v", err)
	}
	other := img
	other.Digest = "sha256:3"
	if err := db.PutImage(ctx, other, true); err != nil {
		t.Fatal(err)
	}
	if err := try("daaaaaaaaaaa", ""); !errs.Is(err, errs.Unavailable) {
		t.Errorf("of what the image was: %v", err)
	}
	if err := try("dbbbbbbbbbbb", "snap-daaaaaaaaaaa"); err != nil {
		t.Errorf("of a snapshot: %v", err)
	}
	if err := db.PutImage(ctx, img, true); err != nil {
		t.Fatal(err)
	}
	if err := try("daaaaaaaaaaa", ""); err != nil {
		t.Error(err)
	}
}

// TestImageNotReplaced: who may not replace an image gets none in its place, also if
// many try at once.
func TestImageNotReplaced(t *testing.T) {
	path, ctx := newPath(t), t.Context()
	db := openTest(t, path, Options{})
	image := func(digest string) record.Image {
		return record.Image{Name: "python", Tag: "latest", Digest: "sha256:" + digest}
	}
	var wg sync.WaitGroup
	var named atomic.Int32
	for i := range 50 {
		wg.Go(func() {
			err := db.PutImage(ctx, image(strconv.Itoa(i)), false)
			switch {
			case err == nil:
				named.Add(1)
			case !errs.Is(err, errs.Denied) || !errors.Is(err, record.ErrNotReplaced) || !strings.Contains(err.Error(), "python:latest"):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	first, _, err := db.GetImage(ctx, "python", "latest")
	if err != nil || named.Load() != 1 {
		t.Fatalf("%d of 50 named it: %v", named.Load(), err)
	}
	if err := db.PutImage(ctx, first, false); err != nil {
		t.Errorf("the same again: %v", err)
	}
	if err := db.PutImage(ctx, image("x"), true); err != nil {
		t.Errorf("replaced: %v", err)
	}
	if is, _, err := db.GetImage(ctx, "python", "latest"); err != nil || is.Digest != "sha256:x" {
		t.Errorf("it is %s: %v", is.Digest, err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	edit(t, path, func(tx *bbolt.Tx) error { return tx.Bucket(bucketImages).Put([]byte("python:latest"), []byte("{")) })
	db = openTest(t, path, Options{})
	if err := db.PutImage(ctx, image("x"), false); !errs.Is(err, errs.Denied) {
		t.Errorf("over a record that cannot be read: %v", err)
	}
	if err := db.PutImage(ctx, image("x"), true); err != nil {
		t.Errorf("over a record that cannot be read, replaced: %v", err)
	}
}

// edit writes into a closed store behind its back.
func edit(t *testing.T, path string, f func(*bbolt.Tx) error) {
	t.Helper()
	b, err := bbolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close() //nolint:errcheck // Update synced
	if err := b.Update(f); err != nil {
		t.Fatal(err)
	}
}

func TestNewerSchema(t *testing.T) {
	path := newPath(t)
	openTest(t, path, Options{}).Close() //nolint:errcheck // nothing written
	edit(t, path, func(tx *bbolt.Tx) error { return tx.Bucket(bucketMeta).Put(keySchema, []byte("99")) })
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Open(path, Options{})
	if err == nil || !strings.Contains(err.Error(), "schema 99") || !strings.Contains(err.Error(), "newer sandboxd") {
		t.Fatalf("got %v", err)
	}
	if after, _ := os.ReadFile(path); !bytes.Equal(before, after) {
		t.Fatal("a refused file was changed")
	}
}

func TestUnreadableRecord(t *testing.T) {
	for name, text := range map[string]string{
		"cut short":      `{"id":"daaa`,
		"another's":      `{"id":"dzzzzzzzzzzz","spec":{"name":"other"}}`,
		"another's name": `{"spec":{"name":"other"}}`,
	} {
		t.Run(name, func(t *testing.T) { testUnreadable(t, text) })
	}
}

func testUnreadable(t *testing.T, text string) {
	path := newPath(t)
	db := openTest(t, path, Options{Slots: 2})
	insert(t, db, "daaaaaaaaaaa", "lab")
	insert(t, db, "dbbbbbbbbbbb", "")
	db.Close() //nolint:errcheck // nothing more to write
	edit(t, path, func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketBoxes).Put([]byte("daaaaaaaaaaa"), []byte(text))
	})
	var log bytes.Buffer
	db = openTest(t, path, Options{Slots: 2, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if !strings.Contains(log.String(), "daaaaaaaaaaa") {
		t.Errorf("the log does not name it:\n%s", &log)
	}
	ctx := t.Context()
	if bad, err := db.Unreadable(ctx); err != nil || !reflect.DeepEqual(bad, []string{"daaaaaaaaaaa"}) {
		t.Fatalf("Unreadable = %v, %v", bad, err)
	}
	if list, _ := db.List(ctx); len(list) != 1 || list[0].ID != "dbbbbbbbbbbb" {
		t.Fatalf("List = %v", list)
	}
	c := record.Record{ID: "dccccccccccc", Spec: record.Spec{Name: "lab"}}
	if err := db.Insert(ctx, &c); !errs.Is(err, errs.Exists) {
		t.Fatalf("the unreadable record lost its name: %v", err)
	}
	c.Spec.Name = ""
	if err := db.Insert(ctx, &c); !errs.Is(err, errs.Exhausted) {
		t.Fatalf("the unreadable record lost its slot: %v", err)
	}
	if err := db.Delete(ctx, "daaaaaaaaaaa"); err != nil {
		t.Fatal(err)
	}
	c.Spec.Name = "lab"
	if err := db.Insert(ctx, &c); err != nil || c.Slot != 0 {
		t.Fatalf("after its deletion: slot %d, %v", c.Slot, err)
	}
}

func TestDamagedFile(t *testing.T) {
	path := newPath(t)
	openTest(t, path, Options{}).Close() //nolint:errcheck // nothing written
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func([]byte) []byte{
		"both metas zero":   func(b []byte) []byte { clear(b[:2*4096]); return b },
		"text":              func([]byte) []byte { return []byte(strings.Repeat("hello\n", 4096)) },
		"pages overwritten": func(b []byte) []byte { copy(b[2*4096:], bytes.Repeat([]byte{0xff}, 20*4096)); return b },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPath(t)
			if err := os.WriteFile(p, spoil(bytes.Clone(b)), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := Open(p, Options{Wait: 50 * time.Millisecond})
			if err == nil || !strings.Contains(err.Error(), "damaged") {
				t.Fatalf("got %v", err)
			}
		})
	}
}

func TestSecondOpen(t *testing.T) {
	path := newPath(t)
	openTest(t, path, Options{})
	_, err := Open(path, Options{Wait: 20 * time.Millisecond})
	if err == nil || !strings.Contains(err.Error(), "another sandboxd") || !strings.Contains(err.Error(), fmt.Sprint("pid ", os.Getpid())) {
		t.Fatalf("got %v", err)
	}
}

func TestClosed(t *testing.T) {
	db := openTest(t, newPath(t), Options{})
	db.Close() //nolint:errcheck // nothing written
	if err := db.Insert(t.Context(), &record.Record{ID: "a"}); !errs.Is(err, errs.Unavailable) {
		t.Fatalf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	db2 := openTest(t, newPath(t), Options{})
	db2.Close() //nolint:errcheck // nothing written
	if err := db2.Delete(ctx, "a"); err == nil {
		t.Fatal("no error")
	}
}

// TestGroups has many writers at once: each is alone in what it sees, and one
// that is refused takes nobody down.
func TestGroups(t *testing.T) {
	db := openTest(t, newPath(t), Options{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	slots, taken := map[int]string{}, 0
	for i := range 64 {
		wg.Go(func() {
			r := record.Record{ID: fmt.Sprintf("d%011d", i)}
			if i%8 == 0 {
				r.Spec.Name = "lab"
			}
			err := db.Insert(t.Context(), &r)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case errs.Is(err, errs.Exists):
				taken++
			case err != nil:
				t.Error(err)
			case slots[r.Slot] != "":
				t.Errorf("slot %d belongs to %s and %s", r.Slot, slots[r.Slot], r.ID)
			default:
				slots[r.Slot] = r.ID
			}
		})
	}
	wg.Wait()
	if taken != 7 || len(slots) != 57 {
		t.Fatalf("%d refused, %d slots; want 7 and 57", taken, len(slots))
	}
}

// TestFailedGroup fails the whole transaction by the fault of one of its parts.
func TestFailedGroup(t *testing.T) {
	db := openTest(t, newPath(t), Options{})
	broken := errors.New("broken")
	var then []string
	part := func(name string, err error) *change {
		return &change{done: make(chan struct{}), then: func() { then = append(then, name) }, do: func(tx *bbolt.Tx) error {
			if err != nil {
				return err
			}
			return tx.Bucket(bucketImages).Put([]byte(name), []byte("{}"))
		}}
	}
	group := []*change{part("a", nil), part("b", broken), part("c", nil)}
	db.run(group)
	if group[0].err != nil || !errors.Is(group[1].err, broken) || group[2].err != nil {
		t.Fatalf("errors: %v, %v, %v", group[0].err, group[1].err, group[2].err)
	}
	if !reflect.DeepEqual(then, []string{"a", "c"}) {
		t.Fatalf("took effect: %v", then)
	}
}

// TestKill kills a writer at five moments: what it said was
// written is there.
func TestKill(t *testing.T) {
	if path := os.Getenv("STORE_TEST_WRITER"); path != "" {
		writeForEver(t, path)
	}
	path := newPath(t)
	acked := map[string]bool{}
	for round := range 5 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKill$")
		cmd.Env = append(os.Environ(), "STORE_TEST_WRITER="+path, fmt.Sprint("STORE_TEST_ROUND=", round))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 0; lines.Scan(); n++ {
			if id, ok := strings.CutPrefix(lines.Text(), "wrote "); ok {
				acked[id] = true
			}
			if n == 10+7*round {
				cmd.Process.Kill() //nolint:errcheck // it may be gone
			}
		}
		cmd.Wait() //nolint:errcheck // killed
		db := openTest(t, path, Options{})
		for id := range acked {
			if _, ok, _ := db.Get(t.Context(), id); !ok {
				t.Fatalf("round %d: %s was acknowledged and is lost", round, id)
			}
		}
		db.Close() //nolint:errcheck // nothing written
	}
	t.Logf("%d records", len(acked))
}

func writeForEver(t *testing.T, path string) {
	db, err := Open(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; ; i++ {
		r := record.Record{ID: fmt.Sprintf("d%s%010d", os.Getenv("STORE_TEST_ROUND"), i)}
		if err := db.Insert(t.Context(), &r); err != nil {
			t.Fatal(err)
		}
		fmt.Println("wrote", r.ID)
	}
}

func BenchmarkInsertDelete(b *testing.B) {
	for _, reserve := range []int64{-1, 0} {
		b.Run(fmt.Sprintf("reserve=%d", reserve), func(b *testing.B) {
			db := openTest(b, newPath(b), Options{Reserve: reserve})
			for i := 0; b.Loop(); i++ {
				r := record.Record{ID: fmt.Sprint(i)}
				if err := db.Insert(b.Context(), &r); err != nil {
					b.Fatal(err)
				}
				if err := db.Delete(b.Context(), r.ID); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkInsertParallel8(b *testing.B) {
	db := openTest(b, newPath(b), Options{})
	b.SetParallelism(4)
	var mu sync.Mutex
	n := 0
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			mu.Lock()
			n++
			r := record.Record{ID: fmt.Sprint(n)}
			mu.Unlock()
			if err := db.Insert(b.Context(), &r); err != nil {
				b.Fatal(err)
			}
			if err := db.Delete(b.Context(), r.ID); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// The order of a list does not depend on the clock that gave the times, and
// neither a change nor an end leaves a record in it that is no more.
func TestListNewestFirst(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{})
	now := time.Now() // has a monotonic reading, which does not follow the steps below
	for i, step := range []time.Duration{0, time.Hour, -time.Hour, time.Second, 0} {
		r := record.Record{ID: fmt.Sprintf("d%d", i), Created: now.Add(step)}
		if i%2 == 0 {
			r.Created = r.Created.Round(0)
		}
		if err := db.Insert(t.Context(), &r); err != nil {
			t.Fatal(err)
		}
	}
	ids := func(db *DB) (ids []string) {
		all, err := db.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range all {
			ids = append(ids, r.ID+" "+string(r.State))
		}
		return ids
	}
	if got := ids(db); !slices.Equal(got, []string{"d1 ", "d3 ", "d0 ", "d4 ", "d2 "}) {
		t.Errorf("%q", got)
	}
	r, _, err := db.Get(t.Context(), "d3")
	if err != nil {
		t.Fatal(err)
	}
	r.State = record.Running
	if err := errors.Join(db.Put(t.Context(), r), db.Delete(t.Context(), "d0")); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	after := []string{"d1 ", "d3 running", "d4 ", "d2 "}
	if got := ids(db); !slices.Equal(got, after) {
		t.Errorf("%q", got)
	}
	if got := ids(openTest(t, path, Options{})); !slices.Equal(got, after) {
		t.Errorf("opened anew: %q", got)
	}
}

func BenchmarkList200(b *testing.B) {
	db := openTest(b, newPath(b), Options{})
	for i := range 200 {
		r := record.Record{ID: fmt.Sprint(i)}
		if err := db.Insert(b.Context(), &r); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		if l, err := db.List(b.Context()); err != nil || len(l) != 200 {
			b.Fatal(err)
		}
	}
}

// TestImageComes: a sandbox may wait for its image; that must be there in the
// moment in which its record names it.
func TestImageComes(t *testing.T) {
	db := openTest(t, newPath(t), Options{})
	ctx := t.Context()
	r := record.Record{ID: "d2", State: record.Creating, Spec: record.Spec{Image: record.Image{Name: "far", Tag: "1"}}}
	if err := db.Insert(ctx, &r); err != nil {
		t.Fatal(err)
	}
	here := record.Image{Name: "far", Tag: "1", Digest: "sha256:1", Layers: []string{"sha256:2"}}
	r.Spec.Image = here
	if err := db.Put(ctx, r); !errs.Is(err, errs.Unavailable) {
		t.Errorf("an image that is not there: %v", err)
	}
	if err := db.PutImage(ctx, here, true); err != nil {
		t.Fatal(err)
	}
	if err := db.Put(ctx, r); err != nil {
		t.Fatal(err)
	}
	if err := db.DeleteImage(ctx, "far", "1"); err != nil {
		t.Fatal(err)
	}
	r.Spec.Labels = map[string]string{"a": "b"}
	if err := db.Put(ctx, r); err != nil {
		t.Errorf("what stands on it already: %v", err)
	}
}

// TestPutTwo: two records trade their names in one transaction, also if one has none.
func TestPutTwo(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{})
	ctx := t.Context()
	a, b := insert(t, db, "daaaaaaaaaaa", "lab"), insert(t, db, "dbbbbbbbbbbb", "try-1")
	insert(t, db, "dccccccccccc", "taken")
	trade := func(first, second string, want errs.Code) {
		t.Helper()
		a.Spec.Name, b.Spec.Name = first, second
		if err := db.Put(ctx, a, b); (err != nil || want != "") && !errs.Is(err, want) {
			t.Errorf("to %q and %q: %v, want %q", first, second, err, want)
		}
	}
	trade("taken", "lab", errs.Exists)
	trade("try-1", "lab", "")
	trade("", "lab", "")
	for range 2 {
		for name, id := range map[string]string{"lab": b.ID, "try-1": "", "taken": "dccccccccccc"} {
			if r, ok, err := db.Get(ctx, name); r.ID != id || ok != (id != "") || err != nil {
				t.Errorf("%s is %s, %v; want %s", name, r.ID, err, id)
			}
		}
		if r, ok, err := db.Get(ctx, a.ID); !ok || r.Spec.Name != "" || err != nil {
			t.Errorf("%s is called %q, %v", a.ID, r.Spec.Name, err)
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		db = openTest(t, path, Options{})
	}
	b.ID = "dzzzzzzzzzzz"
	trade("x", "y", errs.NotFound)
}
