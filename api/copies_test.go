package api

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestCopies holds the documents of opensandbox/ to be OpenSandbox's, where those lie
// beside the checkout, as in CI. Tests validate against the copies.
func TestCopies(t *testing.T) {
	specs := filepath.Join("..", "..", "shared", "specs")
	if _, err := os.Stat(specs); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("CI compares with them: %v", err)
		}
		t.Skipf("left out: %v", err)
	}
	for copied, of := range map[string]string{
		"lifecycle.yaml":  "sandbox-lifecycle.yml",
		"diagnostic.yaml": "diagnostic-api.yml",
		"egress.yaml":     "egress-api.yaml",
		"execd.yaml":      "newer-20260615/execd-api.yaml",
	} {
		got, want := read(t, filepath.Join("opensandbox", copied)), read(t, filepath.Join(specs, of))
		if len(got) != len(want) {
			t.Errorf("%s has %d lines, %s %d", copied, len(got), of, len(want))
			continue
		}
		for i := range got {
			if got[i] != want[i] && !otherRegistry(got[i], want[i]) {
				t.Errorf("%s:%d: %q, and in %s %q", copied, i+1, got[i], of, want[i])
			}
		}
	}
}

// otherRegistry reports whether all that two examples differ in is the registry that
// they name.
func otherRegistry(a, b string) bool {
	a, was, ok := strings.Cut(a, "registry.example.com/")
	return ok && strings.HasPrefix(b, a) && strings.HasSuffix(b, "/"+was)
}

func read(t *testing.T, path string) []string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(string(b), "\n")
}
