package layer

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/tarball/tartest"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
)

// FuzzExtract: a layer changes nothing outside its directory, and is unpacked or refused as
// the client's mistake.
func FuzzExtract(f *testing.F) {
	f.Add(tarOf(f, tar.Header{Typeflag: tar.TypeReg, Name: "a/b"}, tar.Header{Typeflag: tar.TypeSymlink, Name: "c", Linkname: ".."},
		tar.Header{Typeflag: tar.TypeLink, Name: "d", Linkname: "a/b"}).Bytes())
	f.Add(tarOf(f, tar.Header{Typeflag: tar.TypeSymlink, Name: "a", Linkname: ".."}, tar.Header{Typeflag: tar.TypeReg, Name: "a/victim"},
		tar.Header{Typeflag: tar.TypeReg, Name: "d/.wh..wh..opq"}, tar.Header{Typeflag: tar.TypeReg, Name: "d/.wh.x"}).Bytes())
	f.Add(tarOf(f, tar.Header{Typeflag: tar.TypeDir, Name: "d"}, tar.Header{Typeflag: tar.TypeFifo, Name: "d/f"},
		tar.Header{Typeflag: tar.TypeReg, Name: "x", PAXRecords: map[string]string{"SCHILY.xattr.user.a": "1"}}).Bytes())
	f.Add(tarOf(f, tar.Header{Typeflag: tar.TypeReg, Name: "/a/../b/c"}, tar.Header{Typeflag: tar.TypeReg, Name: "b"},
		tar.Header{Typeflag: tar.TypeDir, Name: "b"}, tar.Header{Typeflag: tar.TypeLink, Name: "d", Linkname: "/../victim"}).Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		into, victim := outside(t)
		if err := unpackHere(into, bytes.NewReader(tartest.Sum(b))); err != nil && !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %v", errs.CodeOf(err), err)
		}
		if got, err := os.ReadFile(victim); err != nil || string(got) != "untouched" {
			t.Errorf("the file outside: %q, %v", got, err)
		}
		entries, err := os.ReadDir(filepath.Dir(into))
		if err != nil || len(entries) != 2 {
			t.Errorf("beside the layer: %v, %v", entries, err)
		}
		if err := tree.Remove(into); err != nil { // deeper than a path may be long
			t.Error(err)
		}
	})
}

// FuzzReports: a child that was taken over may report anything. The daemon marks
// directories of the layer only, and believes no number of bytes beyond the bound.
func FuzzReports(f *testing.F) {
	f.Add([]byte("{\"opaque\":\"ZA==\"}\n{\"done\":true,\"bytes\":5}\n"))            // d
	f.Add([]byte("{\"opaque\":\"Li4=\"}\n{\"opaque\":\"bA==\"}\n{\"done\":true}\n")) // .. and l
	f.Add([]byte("{\"opaque\":\"L2V0Yw==\"}\n{\"done\":true,\"bytes\":-1}\n"))       // /etc
	f.Fuzz(func(t *testing.T, b []byte) {
		into, victim := outside(t)
		if err := unix.Mkdir(filepath.Join(into, "d"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Symlink("..", filepath.Join(into, "l")); err != nil {
			t.Fatal(err)
		}
		n, err := followReports(into, bytes.NewReader(b))
		if err == nil && (n < 0 || n > layerLimits.Bytes) {
			t.Fatalf("%q: %d bytes", b, n)
		}
		for _, path := range []string{filepath.Dir(into), victim} {
			if _, err := unix.Lgetxattr(path, opaqueAttr, nil); err == nil {
				t.Fatalf("%q marks %s", b, path)
			}
		}
	})
}
