//go:build all

package year

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// A version is a daemon of this tree.
type version struct {
	name    string // as sandboxd --version says it
	program string
}

// build makes two versions of this tree, whose daemons have the clock.
func build(t *testing.T, c *clock) (all [2]version) {
	t.Helper()
	top, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	table, dir := c.overlay(t, t.TempDir(), top), t.TempDir()
	for i := range all {
		v := version{name: fmt.Sprintf("0.1.%d", i+1)}
		v.program = filepath.Join(dir, v.name)
		cmd := exec.Command("go", "build", "-trimpath", "-overlay", table, "-o", v.program,
			"-ldflags", "-s -w -X github.com/sandboxd/sandboxd/internal/release.described=v"+v.name+"-0-g0000000", "./cmd/sandboxd")
		cmd.Dir, cmd.Env = top, append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build a daemon with a clock of its own: %v\n%s", err, out)
		}
		said, err := exec.Command(v.program, "--version").CombinedOutput()
		if err != nil || !strings.Contains(string(said), " "+v.name+"\n") {
			t.Fatalf("sandboxd --version: %q, %v", said, err)
		}
		all[i] = v
	}
	return all
}

// install puts versions side by side, as packages do; the first is current.
func install(t *testing.T, all [2]version) versions.Root {
	t.Helper()
	root := versions.Root(filepath.Join(t.TempDir(), "root"))
	for _, v := range all {
		dir := root.Dir(v.name)
		for to, from := range map[string][]string{
			"libexec/sandboxd": {daemontest.Bin("runsc"), daemontest.Bin("sandboxd-runc"), daemontest.Bin("agent")},
			"share/sandboxd":   {"../../rootfs"},
			"bin":              nil,
		} {
			to = filepath.Join(dir, to)
			if err := os.MkdirAll(to, 0o755); err != nil {
				t.Fatal(err)
			}
			for _, f := range from {
				if out, err := exec.Command("cp", "-a", f, to).CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			}
		}
		schema := filepath.Join(dir, "share/sandboxd/schema")
		err := os.WriteFile(schema, []byte(strconv.Itoa(store.Schema)), 0o644)
		err = errors.Join(err, os.Link(v.program, root.Program(v.name, "sandboxd")))
		if err != nil {
			t.Fatal(err)
		}
	}
	// The sweep removes what no link names.
	if err := errors.Join(root.Point(versions.Current, all[0].name), root.Point(versions.Previous, all[1].name)); err != nil {
		t.Fatal(err)
	}
	return root
}
