package bundle

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
)

// FuzzFile: of all files, the one that was signed alone is a bundle.
func FuzzFile(f *testing.F) {
	by := newSigner(f)
	text := []byte("text")
	good := forge(by, release, one(f, "text", nil), squeeze(f, text))
	f.Add(uint16(0), good[:0], false)
	f.Add(uint16(14), []byte("# sandboxd bundle, format 2"), false)
	f.Add(uint16(200), []byte("9"), false)
	f.Add(uint16(len(good)-10), []byte("="), false)
	f.Add(uint16(60), []byte{}, true)
	path := filepath.Join(f.TempDir(), "test.bundle")
	f.Fuzz(func(t *testing.T, at uint16, patch []byte, cut bool) {
		b := bytes.Clone(good[:min(int(at), len(good))])
		b = append(b, patch...)
		if !cut && len(b) < len(good) {
			b = append(b, good[len(b):]...)
		}
		switch err := read(t, path, b, by.public); {
		case bytes.Equal(b, good):
			if err != nil {
				t.Fatalf("the bundle is refused: %v", err)
			}
		case !known(err):
			t.Fatalf("%q at %d, cut %v: %v", patch, at, cut, err)
		}
	})
}

// FuzzSigned: what a trusted key signed is refused, or every member that is extracted is what a few
// plain lines read in the manifest and in the stream, and nothing else is.
func FuzzSigned(f *testing.F) {
	by := newSigner(f)
	whole := squeeze(f, []byte("text"))
	f.Add(one(f, "text", nil), whole)
	f.Add(one(f, "", nil), squeeze(f, make([]byte, 1<<20)))
	f.Add(one(f, "text", func(_ *Manifest, m *Member) { m.Name = "../a" }), whole)
	f.Add(two(f, "text", "next", 8), squeeze(f, []byte("text\x01\x02\x02ne\x00\x00\x00")))
	f.Add([]byte(`{"format":1,"version":"1.2.3","os":"linux","architecture":"amd64","members":[],"members":null}`), []byte{})
	path := filepath.Join(f.TempDir(), "test.bundle")
	f.Fuzz(func(t *testing.T, manifest, stream []byte) {
		// A hash that a changed input cannot have would hide what lies behind it.
		manifest = mended(manifest, stream)
		if len(manifest) > maxManifest || len(manifest) < 2 {
			return
		}
		// An input before this one may have failed.
		if err := errors.Join(os.RemoveAll(path+".out"), os.WriteFile(path, forge(by, release, manifest, stream), 0o644)); err != nil {
			t.Fatal(err)
		}
		b, err := Open(context.Background(), path, []Key{by.public})
		if err == nil {
			defer b.Close()
			err = b.Extract(context.Background(), path+".out", all)
		}
		if err != nil {
			if !known(err) {
				t.Fatalf("%s: %v", manifest, err)
			}
			if left := tree(t, filepath.Dir(path)); len(left) != 1 {
				t.Fatalf("%v, and left %q", err, left)
			}
			return
		}
		oracle(t, path+".out", manifest, stream)
		if err := os.RemoveAll(path + ".out"); err != nil {
			t.Fatal(err)
		}
	})
}

// mended sets the hashes of a manifest to those of the stream, if both can be read.
func mended(manifest, stream []byte) []byte {
	var m Manifest
	if json.Unmarshal(manifest, &m) != nil {
		return manifest
	}
	content, err := inflate(stream)
	if err != nil {
		return manifest
	}
	whole := map[string][]byte{}
	for i := range m.Members {
		f := &m.Members[i]
		n := min(max(f.inStream(), 0), int64(len(content)))
		made := content[:n]
		if f.Like != "" {
			made = apply(whole[f.Like], made)
		}
		sum := sha256.Sum256(made)
		f.SHA256, content = hex.EncodeToString(sum[:]), content[n:]
		whole[f.Name] = made
	}
	b, err := json.Marshal(m)
	if err != nil {
		return manifest
	}
	return b
}

func inflate(stream []byte) ([]byte, error) {
	z, err := zstd.NewReader(nil, zstd.WithDecoderMaxMemory(8<<20), zstd.WithDecoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	defer z.Close()
	return z.DecodeAll(stream, nil)
}

// oracle reads a bundle that was accepted without the package.
func oracle(t *testing.T, out string, manifest, stream []byte) {
	t.Helper()
	var m struct {
		Members []struct {
			Name, Mode, Like string
			Size, Stored     int
		}
	}
	if err := json.Unmarshal(manifest, &m); err != nil {
		t.Fatal(err)
	}
	content, err := inflate(stream)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	whole := map[string][]byte{}
	for _, f := range m.Members {
		n := f.Size
		if f.Like != "" {
			n = f.Stored
		}
		if n > len(content) {
			t.Fatalf("%s was accepted, and has %d of %d bytes: %s", f.Name, len(content), n, manifest)
		}
		want := content[:n]
		if f.Like != "" {
			want = apply(whole[f.Like], want)
		}
		got, err := os.ReadFile(out + "/" + f.Name)
		if err != nil || f.Size != len(want) || !bytes.Equal(got, want) {
			t.Fatalf("%s: %q, %v, of %s", f.Name, got, err, manifest)
		}
		content = content[n:]
		whole[f.Name] = want
		if slices.Contains(strings.Split(f.Name, "/"), "..") {
			t.Fatalf("%q climbs", f.Name)
		}
		names = append(names, f.Name)
	}
	if found := tree(t, out); len(content) > 0 || len(found) != len(names) {
		t.Fatalf("found %q, want %q; %d bytes are left", found, names, len(content))
	}
}

// apply does the steps of a patch on all bytes at once, as far as they can be done.
func apply(other, patch []byte) (made []byte) {
	for len(patch) > 0 {
		var step [3]uint64
		for i := range step {
			n, size := binary.Uvarint(patch)
			if size <= 0 {
				return made
			}
			step[i], patch = n, patch[size:]
		}
		other = other[min(step[0], uint64(len(other))):]
		n := min(step[1], uint64(len(other)))
		made, other = append(made, other[:n]...), other[n:]
		n = min(step[2], uint64(len(patch)))
		made, patch = append(made, patch[:n]...), patch[n:]
	}
	return made
}
