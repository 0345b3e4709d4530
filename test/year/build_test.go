//go:build all

package year

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
)

// A version is a directory of programs.
type version struct {
	name string // as sandboxd --version says it
	dir  string
}

// build makes two versions of this tree, whose daemons have the clock.
func build(t *testing.T, c *clock) (all [2]version) {
	t.Helper()
	top, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	table := c.overlay(t, t.TempDir(), top)
	for i := range all {
		v := version{fmt.Sprintf("0.1.%d", i+1), filepath.Join(t.TempDir(), "bin")}
		if out, err := exec.Command("cp", "-a", daemontest.Bin(""), v.dir).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		program := filepath.Join(v.dir, "sandboxd")
		if err := os.Remove(program); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("go", "build", "-trimpath", "-overlay", table, "-o", program,
			"-ldflags", "-s -w -X github.com/sandboxd/sandboxd/internal/release.described=v"+v.name+"-0-g0000000", "./cmd/sandboxd")
		cmd.Dir, cmd.Env = top, append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build a daemon with a clock of its own: %v\n%s", err, out)
		}
		said, err := exec.Command(program, "--version").CombinedOutput()
		if err != nil || !strings.Contains(string(said), " "+v.name+"\n") {
			t.Fatalf("sandboxd --version: %q, %v", said, err)
		}
		all[i] = v
	}
	return all
}
