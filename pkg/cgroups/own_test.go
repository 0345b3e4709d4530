package cgroups

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// TestOwnMemoryLimit: a process finds the limit of a parent of its cgroup.
func TestOwnMemoryLimit(t *testing.T) {
	if os.Getenv("OWN_LIMIT") != "" {
		n, err := OwnMemoryLimit()
		fmt.Printf("limit %d %v\n", n, err)
		return
	}
	hosttest.Root(t)
	lay, err := detect()
	if err != nil {
		t.Fatal(err)
	}
	h := lay.of["memory"]
	parent := filepath.Join(h.mount, fmt.Sprintf("sandboxd-test-own-%d", os.Getpid()))
	child := filepath.Join(parent, "child")
	t.Cleanup(func() {
		if err := errors.Join(os.Remove(child), os.Remove(parent)); err != nil {
			t.Error(err)
		}
	})
	if err := os.MkdirAll(child, 0o755); err != nil {
		t.Fatal(err)
	}
	asks := func() string {
		t.Helper()
		cmd := exec.Command("sh", "-c", `echo $$ >"$1"/cgroup.procs && exec "$2" -test.run='^TestOwnMemoryLimit$'`, "sh", child, os.Args[0])
		cmd.Env = append(os.Environ(), "OWN_LIMIT=1")
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		line, _, _ := strings.Cut(string(out), "\n")
		return line
	}
	if h.v2 {
		if err := enable(parent, []string{"memory"}); err != nil {
			t.Fatal(err)
		}
	}
	if got := asks(); got != "limit 0 <nil>" {
		t.Errorf("without a limit: %s", got)
	}
	file := "memory.limit_in_bytes"
	if h.v2 {
		file = "memory.max"
	}
	if err := os.WriteFile(filepath.Join(parent, file), []byte("536870912"), 0); err != nil {
		t.Fatal(err)
	}
	if got := asks(); got != "limit 536870912 <nil>" {
		t.Errorf("with one: %s", got)
	}
}
