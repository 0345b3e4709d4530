package chunks

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/backup/target"
)

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// TestLostPacks: a read names the pack that is missing or changed, and the next backup sends what was
// in it again.
func TestLostPacks(t *testing.T) {
	for name, harm := range map[string]func(t *testing.T, s *Store, file string){
		"missing": func(t *testing.T, _ *Store, file string) { must(t, os.Remove(file)) },
		"shorter": func(t *testing.T, _ *Store, file string) { must(t, os.Truncate(file, 1000)) },
		"changed": func(t *testing.T, s *Store, file string) {
			b, err := os.ReadFile(file)
			must(t, err)
			b[len(b)/2] ^= 1
			must(t, os.WriteFile(file, b, 0o600))
			// It has the size that it should have: only a look at it finds it.
			if n, err := Verify(t.Context(), s.Target, filepath.Base(file)); !errors.Is(err, ErrBad) || !errors.Is(err, target.ErrLied) {
				t.Errorf("%d bytes, %v", n, err)
			}
			must(t, s.Forget(filepath.Base(file)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			data := content(7, 5<<20)
			c, ids, _ := save(t, s, data)
			file := filepath.Join(s.Target.String(), c.Packs[0].Name)
			harm(t, s, file)
			if b, err := readAll(t, s, c, ids[0]); !errors.Is(err, ErrBad) || !strings.Contains(err.Error(), filepath.Base(file)) {
				t.Errorf("%d bytes come back, %v", len(b), err)
			}
			c, ids, stats := save(t, s, data)
			if stats.Lost+stats.Damaged != 1 || stats.NewBytes < 100<<10 || stats.NewBytes > 4<<20 {
				t.Errorf("%+v", stats)
			}
			if b, err := readAll(t, s, c, ids[0]); err != nil || !bytes.Equal(b, data) {
				t.Errorf("%d bytes come back, %v", len(b), err)
			}
			if _, _, stats := save(t, s, data); stats.NewBytes > 0 || stats.Damaged > 0 {
				t.Errorf("then: %+v", stats)
			}
		})
	}
}

// TestBadContent: a pack with the right name whose content is wrong is refused, too: somebody else has
// made it.
func TestBadContent(t *testing.T) {
	s := newStore(t)
	c, ids, _ := save(t, s, content(8, 1<<20))
	b, err := os.ReadFile(filepath.Join(s.Target.String(), c.Packs[0].Name))
	must(t, err)
	b[packHead+(len(b)-packHead)/2] ^= 1 // a pack may be small
	sum := sha256.Sum256(b)
	name := target.PackName(s.Whose.Owner(), hex.EncodeToString(sum[:]), false)
	must(t, os.WriteFile(filepath.Join(s.Target.String(), name), b, 0o600))
	c.Packs[0].Name = name
	if b, err := readAll(t, s, c, ids[0]); err == nil || !strings.Contains(err.Error(), name) {
		t.Errorf("%d bytes come back, %v", len(b), err)
	}
}

// TestJournal: of a journal that is cut or changed anywhere, what is before that counts, and what is
// lost is sent again.
func TestJournal(t *testing.T) {
	s := newStore(t)
	data := content(9, 2<<20)
	save(t, s, data)
	whole, err := os.ReadFile(s.Journal)
	must(t, err)
	for i := 0; i < len(whole); i += len(whole)/7 + 1 {
		changed := bytes.Clone(whole)
		changed[i] ^= 0x40
		for what, b := range map[string][]byte{"cut": whole[:i], "changed": changed} {
			must(t, os.WriteFile(s.Journal, b, 0o600))
			c, ids, _ := save(t, s, data)
			if got, err := readAll(t, s, c, ids[0]); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%s at %d: %d bytes come back, %v", what, i, len(got), err)
			}
			if _, _, stats := save(t, s, data); stats.NewBytes > 0 {
				t.Errorf("%s at %d: then %+v", what, i, stats)
			}
		}
	}
	must(t, os.WriteFile(s.Journal, whole, 0o600))
	if _, _, stats := save(t, s, data); stats.NewBytes > 0 {
		t.Errorf("the whole one: %+v", stats)
	}
}

// TestPrune removes packs that nothing needs, and nothing of others.
func TestPrune(t *testing.T) {
	s := newStore(t)
	other := *s
	other.Whose.ID, other.Journal = strings.Repeat("b", 16), filepath.Join(t.TempDir(), "journal")
	theirs, ids, _ := save(t, &other, content(10, 1<<20))
	save(t, s, content(11, 1<<20))
	none := func() (func(string) bool, error) { return func(string) bool { return false }, nil }
	n, size, err := Prune(t.Context(), s.Target, s.Whose, none)
	if err != nil || n == 0 || size == 0 || len(packFiles(t, s)) != 0 {
		t.Errorf("%d packs of %d bytes are removed, %v", n, size, err)
	}
	if _, err := readAll(t, &other, theirs, ids[0]); err != nil {
		t.Error(err)
	}
}

// FuzzPack: the table of a pack names chunks within it, and what is read is what was written.
func FuzzPack(f *testing.F) {
	p, err := newPacker(Sealer{})
	must(f, err, p.add(ID{1}, []byte("abc"), 3), p.add(ID{2}, []byte("de"), 900))
	whole, _, err := p.finish()
	must(f, err)
	f.Add(whole)
	f.Add(whole[:len(whole)-1])
	f.Add([]byte(packMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := readTable(b)
		if err != nil {
			return
		}
		var again []byte
		for _, p := range all {
			if int(p.Offset) < packHead || int(p.Offset)+int(p.Stored) > len(b)-packTrailer-len(all)*entryBytes || p.Raw > MaxChunk {
				t.Errorf("%+v is not in %d bytes", p, len(b))
			}
			again = p.append(again)
		}
		if !bytes.HasSuffix(b[:len(b)-packTrailer], again) {
			t.Error("the table is another one")
		}
	})
}

// FuzzIndex: an index has as many packs as it says, and no more chunks than bytes for them.
func FuzzIndex(f *testing.F) {
	one := append([]byte{1, 0, 0, 0}, place{ID{1}, 100, 3, 3}.append(nil)...)
	f.Add(one, 1)
	f.Add(one[:10], 1)
	f.Add([]byte{0xff, 0xff, 0xff, 0}, 1)
	f.Fuzz(func(t *testing.T, b []byte, packs int) {
		all, err := readIndex(bytes.NewReader(b), packs)
		if err != nil {
			return
		}
		if packs >= 0 && len(b) < 4*packs || len(all) > len(b)/entryBytes {
			t.Errorf("%d bytes have %d chunks in %d packs", len(b), len(all), packs)
		}
		for id, w := range all {
			if int(w.pack) >= packs || w.raw == 0 || w.raw > MaxChunk || w.stored > w.raw {
				t.Errorf("%x is %+v", id, w)
			}
		}
	})
}

// FuzzCatalog: what Check accepts names files of packs only, and places in them.
func FuzzCatalog(f *testing.F) {
	name := target.PackName("a-box", strings.Repeat("0a", 32), true)
	f.Add([]byte(`{"packs":[{"name":"` + name + `","bytes":9}],` +
		`"index":[{"id":"00000000000000000000000000000001","stored":1,"raw":2}],"tables":1}`))
	f.Add([]byte(`{"packs":[{"name":"../x","bytes":9}]}`))
	f.Add([]byte(`{"index":[{"pack":1}],"tables":-1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var c Catalog
		if json.Unmarshal(b, &c) != nil || c.Check() != nil {
			return
		}
		for _, p := range c.Packs {
			if strings.ContainsAny(p.Name, "/\x00") || !strings.HasPrefix(p.Name, "sandboxd-") || p.Bytes <= 0 {
				t.Errorf("%+v", p)
			}
		}
		for _, p := range c.Index {
			if p.Pack < 0 || p.Pack >= len(c.Packs) || p.Raw > MaxChunk {
				t.Errorf("%+v of %d packs", p, len(c.Packs))
			}
		}
		text, err := json.Marshal(c)
		var again Catalog
		if err = errors.Join(err, json.Unmarshal(text, &again)); err != nil || again.Key != c.Key || len(again.Packs) != len(c.Packs) {
			t.Errorf("written again: %v", err)
		}
	})
}
