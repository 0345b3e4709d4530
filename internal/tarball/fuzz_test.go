package tarball

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/tarball/tartest"
)

// FuzzPlace unpacks anything. What lies beside the destination stays as it is, and no draft is left.
func FuzzPlace(f *testing.F) {
	f.Add(tarOf(f, dirOf("x"), linkTo("x/l", ".."), fileOf("x/l/mine", "E"), hardTo("x/h", "../mine")))
	f.Add(tarOf(f, dirOf("x"), fileOf("x/a", "A"), linkTo("x/b", "a"), hardTo("x/c", "x/a"), fileOf("x/b", "B")))
	f.Add(tarOf(f, fileOf("x", "X"), fileOf("mine", "E")))
	f.Add(sparseTar(1 << 20))
	f.Add(tarOf(f, dirOf("x"), linkTo("x/l", "../mine"), linkTo("x/a", "b/.."), linkTo("x/b", "l")))
	again := tarOf(f, fileOf("mine", "E"))
	f.Fuzz(func(t *testing.T, tar []byte) {
		to := build(t, "mine=M", "theirs/f=F")
		t.Cleanup(func() { // for TempDir, which may not be root
			_ = filepath.WalkDir(to+"/dst", func(at string, d fs.DirEntry, _ error) error {
				if d != nil && d.IsDir() {
					return os.Chmod(at, 0o700)
				}
				return nil
			})
		})
		Place(bytes.NewReader(tartest.Sum(tar)), to+"/dst", "x", Options{Untrusted: true}) //nolint:errcheck // most are none
		// A later copy to a name that the first one made does not lead out either.
		for _, at := range []string{"", "/l", "/a", "/b"} {
			Place(bytes.NewReader(again), to+"/dst"+at, "mine", Options{Untrusted: true}) //nolint:errcheck // the same
		}
		var beside []string
		for _, at := range []string{"mine", "theirs/f"} {
			b, err := os.ReadFile(filepath.Join(to, at))
			if err != nil {
				t.Fatal(err)
			}
			beside = append(beside, string(b))
		}
		all, err := os.ReadDir(to)
		if err != nil || strings.Join(beside, "") != "MF" {
			t.Fatal(beside, err)
		}
		for _, e := range all {
			if name := e.Name(); name != "dst" && name != "mine" && name != "theirs" {
				t.Errorf("%q appeared beside the destination", name)
			}
		}
	})
}
