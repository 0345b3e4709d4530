package chunks

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"filippo.io/age"

	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// content are bytes that compress to about a half.
func content(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.IntN(16)) * 11
	}
	return b
}

func directory(t testing.TB) target.Target {
	t.Helper()
	d, err := target.Parse(t.TempDir(), target.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func newStore(t testing.TB) *Store {
	t.Helper()
	return &Store{
		Target: directory(t), Whose: target.Whose{Label: "a-box", BackupIdentity: store.BackupIdentity{ID: "aaaaaaaaaaaaaaaa"}},
		Journal: filepath.Join(t.TempDir(), "journal"), Log: slog.New(slog.DiscardHandler), full: 1 << 20,
	}
}

func plain(r io.Reader) (io.Reader, error) { return r, nil }

// sealed makes a store encrypt, and returns what opens its packs.
func sealed(t *testing.T, s *Store) Opener {
	t.Helper()
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	s.Sealer = Sealer{func(w io.Writer) (io.WriteCloser, error) { return age.Encrypt(w, id.Recipient()) }, id.Recipient().String()}
	return func(r io.Reader) (io.Reader, error) { return age.Decrypt(r, id) }
}

// save is a backup of data.
func save(t testing.TB, s *Store, data ...[]byte) (c Catalog, ids [][]ID, stats Stats) {
	t.Helper()
	n, err := s.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close() //nolint:errcheck // its journal is synced
	for _, b := range data {
		var one []ID
		n.BeginTree()
		if err := n.Split(t.Context(), bytes.NewReader(b), func(id ID, _ int) error {
			one = append(one, id)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, one)
	}
	if c, err = n.Finish(t.Context(), t.TempDir()); err != nil {
		t.Fatal(err)
	}
	return c, ids, n.Stats()
}

func read(ctx context.Context, s *Store, c Catalog, ids []ID, open Opener) ([]byte, error) {
	r, err := NewReader(ctx, s.Target, c, open)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r.Stream(ctx, ids))
}

// TestStore: what is saved is read; of what changes only that is sent again, encrypted or not, and
// also by the next process.
func TestStore(t *testing.T) {
	for _, how := range []string{"clear", "encrypted"} {
		t.Run(how, func(t *testing.T) {
			s, open := newStore(t), Opener(plain)
			if how == "encrypted" {
				open = sealed(t, s)
			}
			data := content(1, 6<<20)
			c, ids, first := save(t, s, data, nil, data[:100])
			if got, err := read(t.Context(), s, c, ids[0], open); err != nil || !bytes.Equal(got, data) {
				t.Fatalf("%d bytes come back, %v", len(got), err)
			}
			if got, err := read(t.Context(), s, c, ids[2], open); err != nil || !bytes.Equal(got, data[:100]) {
				t.Fatalf("%d bytes come back, %v", len(got), err)
			}
			if first.Sent < 2<<20 || first.Sent > 4<<20 || first.Packs < 3 {
				t.Errorf("of compressible data: %+v", first)
			}
			same, _, stats := save(t, s, data, nil, data[:100])
			if stats.NewChunks != 0 || stats.Sent != 0 || !slices.Equal(same.Packs, c.Packs) {
				t.Errorf("the same data again: %+v", stats)
			}
			later := slices.Concat(data[:3<<20], []byte("inserted"), data[3<<20:])
			c, ids, stats = save(t, s, later)
			if stats.NewBytes > 3<<20 || stats.Sent > 2<<20 {
				t.Errorf("eight bytes more: %+v", stats)
			}
			if got, err := read(t.Context(), s, c, ids[0], open); err != nil || !bytes.Equal(got, later) {
				t.Errorf("%d bytes come back, %v", len(got), err)
			}
		})
	}
}

// TestMean: how large chunks are, whatever the key.
func TestMean(t *testing.T) {
	data := content(7, 6<<20)
	n := 0
	const keys = 16 // a key cuts this into 32, give or take 4
	for range keys {
		s, err := newStore(t).Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Split(t.Context(), bytes.NewReader(data), func(ID, int) error { n++; return nil }); err != nil {
			t.Fatal(err)
		}
		s.Close() //nolint:errcheck // nothing is kept
	}
	if mean := keys * len(data) / n; mean < 150<<10 || mean > 250<<10 {
		t.Errorf("a chunk has %d bytes on average", mean)
	}
}

// TestOtherRecipients: nothing that others can read, or that a new recipient cannot, is used again.
func TestOtherRecipients(t *testing.T) {
	s := newStore(t)
	data := content(2, 1<<20)
	save(t, s, data)
	for range 2 {
		open := sealed(t, s)
		c, ids, stats := save(t, s, data)
		if stats.NewBytes < 1<<20 {
			t.Errorf("%+v", stats)
		}
		if got, err := read(t.Context(), s, c, ids[0], open); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes come back, %v", len(got), err)
		}
	}
}

// TestKeyed: two hosts name and cut the same data differently.
func TestKeyed(t *testing.T) {
	data := content(3, 8<<20)
	var cuts [2]map[int]bool
	var names [2]map[ID]bool
	for i := range cuts {
		n, err := newStore(t).Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		at := 0
		cuts[i], names[i] = map[int]bool{}, map[ID]bool{}
		if err := n.Split(t.Context(), bytes.NewReader(data), func(id ID, bytes int) error {
			at += bytes
			cuts[i][at], names[i][id] = true, true
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		n.Close() //nolint:errcheck // nothing was sent
	}
	same := 0
	for at := range cuts[0] {
		if cuts[1][at] {
			same++
		}
	}
	for id := range names[0] {
		if names[1][id] {
			t.Error("both have a name in common")
		}
	}
	if same > 3 || len(cuts[0]) < 20 {
		t.Errorf("%d of %d cuts are the same", same, len(cuts[0]))
	}
}

// packFiles are the packs in the directory of a target.
func packFiles(t *testing.T, s *Store) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(s.Target.String(), "sandboxd-"+s.Whose.Owner()+"-pack-*"))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestWornPacks: a pack that is hardly used any more is left behind, and goes with the backups that
// need it.
func TestWornPacks(t *testing.T) {
	s := newStore(t)
	first, rest := content(4, 6<<20), content(5, 2<<20)
	save(t, s, first, rest)
	few := first[:512<<10]
	save(t, s, few, rest)
	c, ids, stats := save(t, s, few, rest)
	if stats.Worn == 0 || stats.NewBytes == 0 { // how much, the key decides
		t.Errorf("%+v", stats)
	}
	before := len(packFiles(t, s))
	keep := map[string]bool{}
	for _, p := range c.Packs {
		keep[p.Name] = true
	}
	n, _, err := Prune(t.Context(), s.Target, s.Whose, func() (func(string) bool, error) {
		return func(name string) bool { return keep[name] }, nil
	})
	if err != nil || n == 0 || len(packFiles(t, s)) != before-n || len(packFiles(t, s)) != len(c.Packs) {
		t.Errorf("%d of %d packs are removed, %v", n, before, err)
	}
	if got, err := read(t.Context(), s, c, ids[0], plain); err != nil || !bytes.Equal(got, few) {
		t.Errorf("%d bytes come back, %v", len(got), err)
	}
	if _, _, stats := save(t, s, few, rest); stats.NewChunks != 0 || stats.Worn != 0 {
		t.Errorf("then: %+v", stats)
	}
}

// TestKnownTree: a tree that never changes is not read again, unless something of it is lost.
func TestKnownTree(t *testing.T) {
	s := newStore(t)
	data := content(6, 2<<20)
	take := func() (read bool) {
		n, err := s.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close() //nolint:errcheck // its journal is synced
		var ids []ID
		n.BeginTree()
		known, err := n.Known("layer x", &ids)
		if err == nil && !known {
			read = true
			err = n.Split(t.Context(), bytes.NewReader(data), func(id ID, _ int) error {
				ids = append(ids, id)
				return nil
			})
			if err == nil {
				err = n.EndTree(t.Context(), "layer x", ids)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		c, err := n.Finish(t.Context(), t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		got, err := readAll(t, s, c, ids)
		if err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%d bytes come back, %v", len(got), err)
		}
		return read
	}
	if !take() || take() || take() {
		t.Error("it is read at the first time, and not later")
	}
	for _, f := range packFiles(t, s) {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	if !take() || take() {
		t.Error("it is read again when its packs are lost")
	}
	save(t, s) // without it
	if !take() {
		t.Error("it is forgotten when a backup does without it")
	}
}

func readAll(t *testing.T, s *Store, c Catalog, ids []ID) ([]byte, error) {
	t.Helper()
	return read(t.Context(), s, c, ids, plain)
}

// TestFewChunksInASmallHeap: a session knows no more chunks than fit into the heap that the daemon may have. The next
// one is refused, not the daemon ended.
func TestFewChunksInASmallHeap(t *testing.T) {
	was := debug.SetMemoryLimit(math.MaxInt64)
	defer debug.SetMemoryLimit(was)
	if got := mostChunks(); got != maxChunks {
		t.Errorf("%d chunks without a limit", got)
	}
	n, err := newStore(t).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close() //nolint:errcheck // of a session that is not finished
	debug.SetMemoryLimit(256 << 20)
	if got := mostChunks(); got != 3355443 {
		t.Errorf("%d chunks on a host of 1 GiB", got)
	}
	debug.SetMemoryLimit(160) // two chunks
	for i, want := range []string{"", "", "more than 2 pieces"} {
		if _, err := n.Put(t.Context(), []byte{byte(i)}); want == "" && err != nil ||
			want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("chunk %d: %v", i, err)
		}
	}
	if _, err := n.Put(t.Context(), []byte{0}); err != nil {
		t.Errorf("a chunk that is known: %v", err)
	}
}
