package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
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

// TestWithoutPrograms: of the versions that nothing else needs, those stay that alone have what memory
// needs; the newest of two that have the same.
func TestWithoutPrograms(t *testing.T) {
	root := versions.Root(t.TempDir())
	programs := map[string][2]string{ // runsc and agent
		"1.5.0": {"b3", "a5"}, "1.4.0": {"b3", "a4"}, "1.3.0": {"b2", "a3"}, "1.2.0": {"b2", "a2"}, "1.1.0": {"b1", "a1"},
		"1.0.0": {"", ""},
	}
	for version := range programs {
		if err := os.MkdirAll(root.Dir(version), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	of := func(dir string) (build, agent string, err error) {
		p, ok := programs[filepath.Base(filepath.Dir(filepath.Dir(dir)))]
		if !ok || !strings.HasSuffix(dir, "/libexec/sandboxd") {
			t.Errorf("asked for %s", dir)
		}
		return p[0], p[1], nil
	}
	candidates := []string{"1.4.0", "1.3.0", "1.2.0", "1.1.0", "1.0.0"}
	for want, needs := range map[string][]record.MemoryNeeds{
		"1.4.0 1.3.0 1.2.0 1.1.0 1.0.0": {{Build: "b3", Agent: "a5"}, {Build: "b9"}},
		"1.4.0 1.2.0 1.1.0 1.0.0":       {{Build: "b2"}, {Build: "b2", Agent: "a3"}},
		"1.4.0 1.1.0 1.0.0":             {{Build: "b2"}, {Agent: "a2"}},
		"1.3.0 1.2.0 1.0.0":             {{Build: "b3", Agent: "a4"}, {Build: "b1"}},
	} {
		rest, err := withoutPrograms(root, candidates, needs, of)
		if got := strings.Join(rest, " "); err != nil || got != want {
			t.Errorf("%+v: %q may go, %v; want %q", needs, got, err, want)
		}
	}
}
