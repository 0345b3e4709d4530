package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

func TestOwnDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	for range 2 { // made, then found empty
		if err := ownDirectory("state_dir", dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "sandboxd.key"), []byte("key"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := ownDirectory("state_dir", dir, 0o700); err != nil {
		t.Fatalf("a key that was brought before the first start: %v", err)
	}
	// It does not make a directory with other files sandboxd's.
	if err := os.WriteFile(filepath.Join(dir, "letters"), []byte("dear"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	err := ownDirectory("state_dir", dir, 0o700)
	if err == nil || !strings.Contains(err.Error(), "letters") {
		t.Fatalf("somebody else's directory: %v", err)
	}
	if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != 0o755 {
		t.Fatalf("its mode was changed to %v (%v)", fi.Mode(), err)
	}
	if err := os.WriteFile(filepath.Join(dir, marker), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := ownDirectory("state_dir", dir, 0o700); err != nil {
		t.Fatalf("our own: %v", err)
	}
}

func TestRemoveRunDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	if err := removeRunDir(dir); err != nil {
		t.Fatalf("absent: %v", err)
	}
	for _, d := range []string{"bundles/x", "ns", "letters"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := removeRunDir(dir); err == nil {
		t.Fatal("a directory with something unknown in it was removed")
	}
	if _, err := os.Stat(filepath.Join(dir, "letters")); err != nil {
		t.Fatalf("what is not ours is gone: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, "letters")); err != nil {
		t.Fatal(err)
	}
	if err := removeRunDir(dir); err != nil {
		t.Fatal(err)
	}
}

// TestLeaveRunDir removes the run directory after a failed start only if nobody else
// uses it.
func TestLeaveRunDir(t *testing.T) {
	for entry, leaves := range map[string]bool{"": true, "volumes": true, "sandboxd.sock": false, "letters": false} {
		dir := filepath.Join(t.TempDir(), "run")
		for _, d := range []string{"bundles/x", "ns", entry} {
			if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(dir, marker), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := leaveRunDir(dir); err != nil {
			t.Errorf("with %q: %v", entry, err)
		}
		if _, err := os.Stat(filepath.Join(dir, marker)); os.IsNotExist(err) != leaves {
			t.Errorf("with %q: %v, want it gone: %v", entry, err, leaves)
		}
	}
	if err := leaveRunDir(filepath.Join(t.TempDir(), "absent")); err != nil {
		t.Error(err)
	}
}

// A pool that an operator mounted before the first start is no stranger.
func TestMountedPoolIsOurs(t *testing.T) {
	hosttest.Root(t)
	dir := t.TempDir()
	pool := filepath.Join(dir, "pool")
	if err := os.Mkdir(pool, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := ownDirectory("state_dir", dir, 0o700); err == nil {
		t.Error("a directory with somebody's pool is taken")
	}
	if err := unix.Mount("tmpfs", pool, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(pool, 0); err != nil {
			t.Error(err)
		}
	}()
	if err := ownDirectory("state_dir", dir, 0o700); err != nil {
		t.Error(err)
	}
}
