// Package compat_test has the official OpenSandbox clients, unmodified, judge
// the real daemon over TCP: Python and JavaScript SDK, the osb command line, the
// MCP server, and schemathesis with the OpenAPI documents. docs/compatibility.md
// is what they say.
package compat_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/client"
)

const requirements = "python/requirements.txt"

// TestPythonSDK tells on both runtimes of one user's afternoon.
func TestPythonSDK(t *testing.T) {
	hosttest.Root(t)
	python := venv(t, requirements)
	d := daemontest.New(t)
	daemontest.Image(t, d, "python")
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) { story(t, d, []string{python, "python/story.py", runtime}) })
	}
}

// TestOlder tells of users who have older releases of the clients.
func TestOlder(t *testing.T) {
	hosttest.Root(t)
	python := venv(t, "python/requirements-older.txt")
	javascript := node(t, "javascript/older/older.mjs")
	d := daemontest.New(t)
	daemontest.Image(t, d, "base")
	daemontest.Image(t, d, "code-interpreter")
	for _, runtime := range runtimes {
		t.Run("Python SDK "+runtime, func(t *testing.T) { story(t, d, []string{python, "python/older.py", runtime}) })
		t.Run("code interpreter "+runtime, func(t *testing.T) { story(t, d, []string{python, "python/older_code.py", runtime}) })
		t.Run("JavaScript SDK "+runtime, func(t *testing.T) { story(t, d, []string{"node", javascript, runtime}) })
	}
}

// TestPythonRefused has the SDK print why a host takes no sandbox.
func TestPythonRefused(t *testing.T) {
	hosttest.Root(t)
	python := venv(t, requirements)
	d := daemontest.New(t)
	daemontest.Image(t, d, "base")
	c, err := client.New("unix://"+d.Socket, "")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.System().Drain(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(filepath.Join(d.StateDir, "draining")) // other tests use the directory
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, python, "python/refused.py")
	cmd.Env = append(os.Environ(), "OPEN_SANDBOX_DOMAIN="+d.TCP, "OPEN_SANDBOX_API_KEY="+daemontest.Key, "PYTHONWARNINGS=ignore")
	out, err := cmd.CombinedOutput()
	for _, want := range []string{"503 True", "draining since", "sandboxctl system drain --off"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%v: no %q in %s", err, want, out)
		}
	}
}
