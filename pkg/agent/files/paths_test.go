package files

import (
	"path/filepath"
	"strings"
	"testing"
)

// FuzzPath: a path without dots is clean, and where there are no links it names what it did.
func FuzzPath(f *testing.F) {
	f.Add("a/./b//../c")
	f.Add("../../etc/passwd")
	f.Add("proc/self/../..")
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, path string) {
		if strings.ContainsRune(path, 0) || len(path) > 200 || strings.HasPrefix(filepath.Clean("/"+path), "/proc") {
			return
		}
		for _, p := range []string{"/" + path, dir + "/none/" + path} {
			got, err := withoutDots(p)
			if err != nil {
				continue // something on the way is no directory
			}
			if !filepath.IsAbs(got) || filepath.Clean(got) != got || strings.Contains("/"+got+"/", "/../") {
				t.Fatalf("%q becomes %q", p, got)
			}
			if strings.HasPrefix(filepath.Clean(p), dir) && got != filepath.Clean(p) {
				t.Fatalf("%q becomes %q, want %q", p, got, filepath.Clean(p))
			}
		}
	})
}
