package bundle

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// noise is n blocks that no compression makes smaller, the same for each seed.
func noise(seed uint64, n int) []byte {
	b := make([]byte, n*block)
	r := rand.NewChaCha8([32]byte{byte(seed)})
	if _, err := r.Read(b); err != nil {
		panic(err)
	}
	return b
}

// two returns the manifest of a member "a" and one "b" that is a patch of it.
func two(t testing.TB, a, b string, stored int64) []byte {
	t.Helper()
	return one(t, a, func(m *Manifest, _ *Member) {
		sum := sha256.Sum256([]byte(b))
		m.Members = append(m.Members, Member{
			Name: "b", Kind: Image, Size: int64(len(b)), SHA256: hex.EncodeToString(sum[:]), Mode: "0644", Like: "a", Stored: stored,
		})
	})
}

// TestPatch: of images that have much in common, what they share is stored once, also when it lies
// further apart than the window; and what comes out is what went in.
func TestPatch(t *testing.T) {
	by := newSigner(t)
	zeros := make([]byte, 40*block)
	base := slices.Concat(noise(1, 1000), zeros, noise(2, 500), []byte("end"))
	images := map[string][]byte{
		"a": base,
		"b": slices.Concat(noise(3, 100), base[:900*block], noise(4, 50), base[910*block:], zeros, []byte("tail")), // inserts, replaces
		"c": base[200*block : 1200*block],                                                                          // leaves out
		"d": slices.Concat(noise(2, 500), noise(1, 1000), zeros),                                                   // in another order
		"e": noise(5, 1000),                                                                                        // has nothing in common
		"f": base,                                                                                                  // the same
		"g": {},
		"h": slices.Concat(noise(5, 900), noise(6, 100)), // like e, and not like a
		"i": slices.Concat(noise(1, 1000)[:300*block+17], noise(7, 40)),
	}
	dir := t.TempDir()
	p := planOf(t, by.secret)
	total := 0
	for name, b := range images {
		total += len(b)
		p.Sources = append(p.Sources, Source{
			Member: Member{Name: "images/" + name, Kind: Image}, Path: put(t, filepath.Join(dir, name), string(b), 0o644),
		})
	}
	path := filepath.Join(t.TempDir(), "test.bundle")
	if err := Create(t.Context(), path, p); err != nil {
		t.Fatal(err)
	}
	if left := tree(t, filepath.Dir(path)); len(left) != 1 {
		t.Errorf("left %q", left)
	}
	b := mustOpen(t, path, by.public)
	like := map[string]string{}
	for _, m := range b.Members {
		if name, ok := strings.CutPrefix(m.Name, "images/"); ok && images[name] != nil {
			like[name] = strings.TrimPrefix(m.Like, "images/")
			if m.Like != "" && m.Stored > m.Size*3/4 {
				t.Errorf("%s has %d bytes and is stored in %d", m.Name, m.Size, m.Stored)
			}
		}
	}
	for name, want := range map[string]string{"a": "", "b": "a", "c": "a", "d": "a", "e": "", "f": "a", "g": "", "h": "e", "i": "a"} {
		if like[name] != want {
			t.Errorf("%s is stored as a patch of %q, want %q", name, like[name], want)
		}
	}
	out := filepath.Join(t.TempDir(), "out")
	if err := b.Extract(t.Context(), out, all); err != nil {
		t.Fatal(err)
	}
	for name, want := range images {
		if got, err := os.ReadFile(filepath.Join(out, "images", name)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d of %d bytes, %v", name, len(got), len(want), err)
		}
	}
	// One image alone is extracted, too.
	some := filepath.Join(t.TempDir(), "some")
	if err := b.Extract(t.Context(), some, func(m Member) bool { return m.Name == "images/h" }); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(some, "images/h")); err != nil || !bytes.Equal(got, images["h"]) {
		t.Errorf("alone: %d bytes, %v", len(got), err)
	}
}

// TestHostilePatches: a patch that is not what the manifest says is refused, also if it is signed.
func TestHostilePatches(t *testing.T) {
	by := newSigner(t)
	path := filepath.Join(t.TempDir(), "test.bundle")
	const good = "\x01\x02\x02ne" // of "text": skip t, copy ex, insert ne
	try := func(manifest []byte, patch string) error {
		return read(t, path, forge(by, release, manifest, squeeze(t, []byte("text"+patch))), by.public)
	}
	if err := try(two(t, "text", "exne", int64(len(good))), good); err != nil {
		t.Fatal(err)
	}
	for patch, word := range map[string]string{
		"":                           "has 0 bytes and should have 4",
		"\x01\x02\x02n":              "cannot be decompressed",
		"\x01\x02\x02ne\x00\x00\x00": "cannot be decompressed",
		"\x01\x02":                   "cannot be decompressed",
		"\x05\x00\x00":               "cannot be decompressed",
		"\x01\x04\x00":               "cannot be decompressed",
		"\x01\x02\x02ne\x00\x01\x00": "makes more than 4 bytes",
		"\x01\x02\x02ne\x01":         "cannot be decompressed",
		"\x01\x02\x02nE":             "has the SHA-256",
		"\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x00\x00":     "cannot be decompressed",
		"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x00": "cannot be decompressed",
		"\x00\xff\xff\xff\xff\x7f\x00":                     "has the SHA-256",
	} {
		err := try(two(t, "text", "exne", int64(len(patch))), patch)
		if !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), word) {
			t.Errorf("%q: %v; want %q", patch, err, word)
		}
	}
	refused(t, try(two(t, "text", "exne", 100), good), errs.Invalid, "cannot be decompressed")
	refused(t, try(two(t, "text", "exne", 4), good), errs.Invalid, "cannot be decompressed")
	for word, change := range map[string]func(m *Manifest){
		`"b" is a patch of "c"`:                func(m *Manifest) { m.Members[1].Like = "c" },
		`is a patch of "b"`:                    func(m *Manifest) { m.Members[1].Like = "b" },
		"stored in 3 bytes as a patch of \"\"": func(m *Manifest) { m.Members[0].Stored = 3 },
		"stored in -1 bytes":                   func(m *Manifest) { m.Members[1].Stored = -1 },
		"65 members are patches": func(m *Manifest) {
			for i := range 64 {
				again := m.Members[1]
				again.Name += strings.Repeat("b", i+1)
				m.Members = append(m.Members, again)
			}
		},
		`c is a patch of "b"`: func(m *Manifest) {
			again := m.Members[1]
			again.Name, again.Like = "c", "b"
			m.Members = append(m.Members, again)
		},
	} {
		changed := one(t, "text", func(m *Manifest, _ *Member) {
			*m = *must(t, two(t, "text", "exne", int64(len(good))))
			change(m)
		})
		refused(t, try(changed, good), errs.Invalid, strings.Replace(word, `"b" is`, "b is", 1))
	}
}

func must(t *testing.T, manifest []byte) *Manifest {
	t.Helper()
	m, err := parse(manifest)
	if err != nil {
		t.Fatal(err)
	}
	return m
}
