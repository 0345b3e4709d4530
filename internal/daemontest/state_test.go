package daemontest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestClaimState: tests take a directory that is new, empty or their own, and refuse one that is somebody's.
func TestClaimState(t *testing.T) {
	with := func(names ...string) string {
		dir := filepath.Join(t.TempDir(), "state")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	for what, dir := range map[string]string{
		"new": filepath.Join(t.TempDir(), "state"), "empty": with(), "marked": with("../state"+Marker, "sandboxd.db"),
		"of older tests": with("recipe-of-base"),
	} {
		if err := claimState(dir); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := os.Stat(dir + Marker); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	theirs := with("sandboxd.db")
	if err := claimState(theirs); err == nil || !strings.Contains(err.Error(), theirs+" was not made by a test") {
		t.Errorf("a directory of somebody: %v", err)
	}
	if _, err := os.Stat(theirs + Marker); err == nil {
		t.Error("a directory of somebody was marked")
	}
}
