package archtest

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// climbs finds the paths that go up, by how a file's name ends: what begins with
// "../" in a program, also as the ".." of a Join, and any in a script, where they
// stand behind a directory: $(dirname "$0")/..
var climbs = map[string]*regexp.Regexp{
	".go":      quoted,
	".py":      quoted,
	".mjs":     quoted,
	".ts":      quoted,
	".sh":      unquoted,
	"run":      unquoted, // .ci/run
	"Makefile": unquoted,
}

var (
	quoted   = regexp.MustCompile("[\"'`]\\.\\.(?:(?:/|[\"']\\s*,\\s*[\"'])\\.\\.)*(?:/\\w*)?")
	unquoted = regexp.MustCompile(`\.\.(?:/\.\.)*(?:/\w*)?`)
)

// TestInside holds that no program and no script of the checkout names a file out of
// it: what is beside the checkout is one person's, and who clones it has nothing there.
func TestInside(t *testing.T) {
	root, seen := "../..", 0
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		if d.IsDir() && (rel == "build" || rel == ".git" || d.Name() == "mended" || strings.HasPrefix(d.Name(), ".io-")) {
			return filepath.SkipDir
		}
		finds := climbs[filepath.Ext(p)]
		if finds == nil {
			finds = climbs[d.Name()]
		}
		if finds == nil || !d.Type().IsRegular() {
			return nil
		}
		seen++
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		for _, up := range finds.FindAllString(string(text), -1) {
			if strings.Count(up, "..") > strings.Count(rel, "/") && !hostile(up) {
				t.Errorf("%s names %s…, which is out of the checkout: what it needs belongs into it", rel, up)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 20 {
		t.Fatalf("found only %d files: archtest looks in the wrong place", seen)
	}
}

// hostile reports whether a path is one of those that tests have the product refuse or
// bear: they lead to the root of a file system.
func hostile(up string) bool {
	_, to, _ := strings.Cut(up[strings.LastIndex(up, ".."):], "/")
	return to == "etc" || to == "srv"
}
