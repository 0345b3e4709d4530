//go:build all

// Package offline holds what `make vendor-archive` promises: a host without a network builds the same
// bytes from it.
package offline

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

const top = "../.."

// programs are those that make build makes, gVisor's among them.
var programs = []string{"sandboxd", "sandboxctl", "sandboxd-runc", "runsc", "agent/sandbox-agent"}

// run runs a command with other values of some variables of the environment.
func run(t *testing.T, env []string, argv ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// sourceOf copies the checkout, with what is not committed: a build of runsc works in its directory,
// and others may build there now.
func sourceOf(t *testing.T, dir string) {
	t.Helper()
	here, err := filepath.Abs(top)
	if err != nil {
		t.Fatal(err)
	}
	run(t, nil, "git", "clone", "-q", "--shared", here, dir)
	run(t, nil, "sh", "-euc", `git -C "$1" diff --binary HEAD | git -C "$2" apply --allow-empty`, "-", here, dir)
}

// TestOffline builds everything in a network namespace without a network, with empty caches and the
// archive, and compares it with what a build with the host's modules makes.
func TestOffline(t *testing.T) {
	hosttest.Root(t) // unshare
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	sourceOf(t, at("source"))
	archive := func(name string) []byte {
		run(t, nil, at("source/scripts/vendor-archive.sh"), at(name))
		b, err := os.ReadFile(at(name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	if !bytes.Equal(archive("modules.tar.zst"), archive("again.tar.zst")) {
		t.Error("the archive has other bytes the second time")
	}
	run(t, nil, "tar", "-C", dir, "--zstd", "-xf", at("modules.tar.zst"))

	run(t, nil, "make", "-C", at("source"), "build", "BUILD="+at("normal"))
	empty := []string{
		"GOMODCACHE=" + at("modcache"), "GOCACHE=" + at("cache"), "XDG_CACHE_HOME=" + at("home"), // of runsc
		"GOFLAGS=" + strings.TrimSpace(run(t, nil, "go", "env", "GOFLAGS")+" -modcacherw"), // so that it can be removed
	}
	run(t, empty, "unshare", "-n", "make", "-C", at("source"), "build", "BUILD="+at("offline"), "MODULES="+at("modules"))
	for _, name := range programs {
		want, err := os.ReadFile(filepath.Join(at("normal/bin"), name))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(filepath.Join(at("offline/bin"), name)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s has %d bytes, not the %d of a build with a network, or others: %v", name, len(got), len(want), err)
		}
	}
}
