//go:build all

package packages

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// TestLint packs the real programs and has lintian and rpmlint judge the packages. It packs them
// twice, which must give the same bytes.
//
// rpmlint runs in a copy of this host: as root it unpacks a package whose names begin with a slash
// over the files of the host.
func TestLint(t *testing.T) {
	hosttest.Root(t)
	version := strings.Fields(run(t, top+"/build/bin/sandboxd", "--version"))[2]
	images, out := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(images, "tiny.tar"), []byte("archive"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{out, out + "/again"} {
		run(t, top+"/build/tools/packages", "-source", top, "-bin", top+"/build/bin", "-native", top+"/build/bin", "-man",
			top+"/build/man", "-images", images, "-out", dir, "-version", version, "-epoch", "1795780000")
	}
	packed, err := filepath.Glob(out + "/*.*")
	if err != nil || len(packed) != 4 {
		t.Fatalf("%q, %v", packed, err)
	}
	for _, path := range packed {
		run(t, "cmp", path, filepath.Join(out, "again", filepath.Base(path)))
	}
	if size := sizeOf(t, one(t, out+"/sandboxd_*.deb")); size > 64<<20 {
		t.Errorf("the .deb has %d MiB", size>>20)
	}
	config, err := os.ReadFile("rpmlint.toml")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(out+"/rpmlint.toml", config, 0o600); err != nil {
		t.Fatal(err)
	}
	// lintian counts errors that are overridden, too, so its status is of no use. It begins the line
	// of an error with "E:"; rpmlint has it in the middle, and ends with 64 if there is one.
	got, err := world(t, out, `rm -rf /etc/sandboxd
lintian --allow-root --fail-on none --show-overrides p/*.deb
rpmlint --config p/rpmlint.toml p/*.rpm`)
	if err != nil || regexp.MustCompile(`(?m)^E: | E: `).MatchString(got) || !strings.Contains(got, " 0 errors") {
		t.Errorf("%v:\n%s", err, got)
	}
	t.Log(got)
}

func sizeOf(t *testing.T, path string) int64 {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Size()
}
