package archtest

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// climbs finds the paths that go up, by the extension of the file. In a program these
// are strings that begin with "../" or are a ".." for Join; in a script, any "..",
// because there it follows a directory: $(dirname "$0")/..
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

// TestInside holds that no program and no script of the checkout names a file outside of
// it: such a file exists only on one person's machine and not in a clone.
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

// hostile reports whether a path leads to the root of a file system. Tests give such
// paths to the product, which must refuse or withstand them.
func hostile(up string) bool {
	_, to, _ := strings.Cut(up[strings.LastIndex(up, ".."):], "/")
	return to == "etc" || to == "srv"
}
