package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
)

// TestClean: `make clean` removes the state of tests, and nothing else. No lane has these instances.
func TestClean(t *testing.T) {
	states, home := t.TempDir(), t.TempDir()
	for _, file := range []string{
		"sandboxd-7" + daemontest.Marker, "sandboxd-7/pool.img", "sandboxd-6/sandboxd.db", "sandboxd/x" + daemontest.Marker,
	} {
		path := filepath.Join(states, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(home, "sandboxd-test"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("../../scripts/clean.sh")
	cmd.Env = append(os.Environ(), "STATES="+states, "XDG_CACHE_HOME="+home)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "sandboxd-test (") {
		t.Fatalf("%v\n%s", err, out)
	}
	left, err := filepath.Glob(states + "/*")
	if want := []string{states + "/sandboxd", states + "/sandboxd-6"}; err != nil || strings.Join(left, " ") != strings.Join(want, " ") {
		t.Errorf("left are %q, want %q; it said\n%s", left, want, out)
	}
}
