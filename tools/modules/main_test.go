package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
)

// zipOf makes a zip of names and contents, as one proxy or another makes it.
func zipOf(t *testing.T, at time.Time, method uint16, files ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for i := 0; i < len(files); i += 2 {
		to, err := w.CreateHeader(&zip.FileHeader{Name: files[i], Method: method, Modified: at})
		must(t, err)
		_, err = io.WriteString(to, files[i+1])
		must(t, err)
	}
	must(t, w.Close())
	return b.Bytes()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// cacheOf writes a cache of pairs of a name and a content.
func cacheOf(t *testing.T, files ...string) string {
	t.Helper()
	dir := t.TempDir()
	for i := 0; i < len(files); i += 2 {
		p := filepath.Join(dir, files[i])
		must(t, os.MkdirAll(filepath.Dir(p), 0o755))
		must(t, os.WriteFile(p, []byte(files[i+1]), 0o600))
	}
	return dir
}

// TestWrite: caches that two proxies have filled give the same archive, which has what the go
// command reads and nothing else.
func TestWrite(t *testing.T) {
	const at = "example.com/!a/@v/v1.0.0"
	one := cacheOf(t,
		at+".info", `{"Version":"v1.0.0","Time":"2026-01-01T00:00:00Z","Origin":{"VCS":"git"}}`,
		at+".mod", "module example.com/A\n",
		at+".zip", string(zipOf(t, time.Unix(1e9, 0), zip.Deflate, "b", "bb", "a", strings.Repeat("a", 1000))),
		at+".ziphash", "h1:x", at+".lock", "", "example.com/!a/@v/list", "v1.0.0\n", "sumdb/x/@v/v1.0.0.mod", "x", "example.com/stray.mod", "x")
	other := cacheOf(t,
		at+".info", `{"Version":"v1.0.0"}`,
		at+".mod", "module example.com/A\n",
		at+".zip", string(zipOf(t, time.Unix(2e9, 0), zip.Store, "a", strings.Repeat("a", 1000), "b", "bb")))
	var archives [][]byte
	for _, cache := range []string{one, other} {
		var b bytes.Buffer
		must(t, write(&b, cache))
		archives = append(archives, b.Bytes())
	}
	if !bytes.Equal(archives[0], archives[1]) {
		t.Error("the archives differ")
	}
	z, err := zstd.NewReader(bytes.NewReader(archives[0]))
	must(t, err)
	defer z.Close()
	var names []string
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		names = append(names, h.Name)
		if !h.ModTime.Equal(noTime) || h.Uid != 0 || h.Mode&0o022 != 0 {
			t.Errorf("%+v", h)
		}
		b, err := io.ReadAll(r)
		must(t, err)
		switch filepath.Ext(h.Name) {
		case ".info":
			if string(b) != `{"Version":"v1.0.0"}` {
				t.Errorf("%s", b)
			}
		case ".zip":
			f, err := zip.NewReader(bytes.NewReader(b), int64(len(b)))
			must(t, err)
			a, err := f.Open("a")
			must(t, err)
			if text, err := io.ReadAll(a); err != nil || len(text) != 1000 || len(f.File) != 2 {
				t.Errorf("the zip has %d files, one of %d bytes, %v", len(f.File), len(text), err)
			}
		}
	}
	if want := []string{
		"modules/", "modules/example.com/", "modules/example.com/!a/", "modules/example.com/!a/@v/",
		"modules/" + at + ".info", "modules/" + at + ".mod", "modules/" + at + ".zip",
	}; !slices.Equal(names, want) {
		t.Errorf("%q", names)
	}
}

// TestBad: a cache that is empty or damaged leaves no archive.
func TestBad(t *testing.T) {
	for name, cache := range map[string]string{
		"empty":     t.TempDir(),
		"a bad zip": cacheOf(t, "a/@v/v1.zip", "no zip"),
		"bad info":  cacheOf(t, "a/@v/v1.info", "no JSON"),
	} {
		dir := t.TempDir()
		if err := writeFile(filepath.Join(dir, "out"), cache); err == nil {
			t.Errorf("%s: no error", name)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%s: %v is left, %v", name, left, err)
		}
	}
}
