package api_test

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// otherRegistry is where an example names a registry; the copies name another one.
var otherRegistry = regexp.MustCompile(`"[^"/ ]+/my-project/`)

// TestCopies holds the documents of opensandbox/ to be OpenSandbox's: SHA256SUMS has
// the sums of what was published. Tests validate against the copies.
func TestCopies(t *testing.T) {
	text, err := os.ReadFile("opensandbox/SHA256SUMS")
	if err != nil {
		t.Fatal(err)
	}
	sums := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if sum, name, ok := strings.Cut(strings.TrimSpace(line), "  "); ok && sum[0] != '#' {
			sums[name] = sum
		}
	}
	copies, err := filepath.Glob("opensandbox/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if len(copies) != len(sums) {
		t.Errorf("%d copies, and sums of %d", len(copies), len(sums))
	}
	for _, path := range copies {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b = otherRegistry.ReplaceAll(b, []byte(`"REGISTRY/my-project/`))
		if got, want := fmt.Sprintf("%x", sha256.Sum256(b)), sums[filepath.Base(path)]; got != want {
			t.Errorf("%s is not the document that was published: its sum is %s, and SHA256SUMS has %q", path, got, want)
		}
	}
}
