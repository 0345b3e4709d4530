// Package compat_test tells the story of test/compat/python with the official
// OpenSandbox SDK, unmodified, against the real daemon over TCP.
package compat_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/client"
)

const requirements = "python/requirements.txt"

// TestPythonSDK runs the story on both runtimes. What it prints are its
// chapters; where it ends early, the last one is what failed.
func TestPythonSDK(t *testing.T) {
	hosttest.Root(t)
	python := venv(t)
	d := daemontest.New(t)
	ensureImage(t, d, "python")
	for _, runtime := range []string{"runc", "runsc"} {
		t.Run(runtime, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, python, "python/story.py", runtime)
			cmd.Env = append(os.Environ(), "OPEN_SANDBOX_DOMAIN="+d.TCP, "OPEN_SANDBOX_API_KEY="+daemontest.Key, "PYTHONWARNINGS=ignore")
			var errout bytes.Buffer
			cmd.Stderr = &errout
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			last := ""
			for lines := bufio.NewScanner(out); lines.Scan(); {
				last = lines.Text()
				t.Log(last)
			}
			if err := cmd.Wait(); err != nil {
				t.Fatalf("the story ended after %q: %v\n%s", last, err, errout.Bytes())
			}
			if last != runtime+": the end" {
				t.Errorf("the story ended with %q", last)
			}
		})
	}
}

// venv returns the Python of an environment with the SDK in it, made once for
// each version of the requirements.
func venv(t *testing.T) string {
	t.Helper()
	want, err := os.ReadFile(requirements)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(want)
	dir, err := filepath.Abs(filepath.Join("..", "..", "build", "compat", "venv-"+hex.EncodeToString(sum[:6])))
	if err != nil {
		t.Fatal(err)
	}
	python := filepath.Join(dir, "bin", "python3")
	done := filepath.Join(dir, "complete") // an environment that was made in part is made again
	if _, err := os.Stat(done); err == nil {
		return python
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	step := func(hint string, argv ...string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		if out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s\n%s", strings.Join(argv, " "), err, out, hint)
		}
	}
	step("This test needs python3 with venv; on Debian: apt-get install python3-venv", "python3", "-m", "venv", dir)
	step("This test installs the official SDK from PyPI and could not; is there a way to pypi.org, or a mirror in pip.conf?",
		python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements)
	if err := os.WriteFile(done, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return python
}

// ensureImage builds an image unless the state directory has it from an earlier run.
func ensureImage(t *testing.T, d *daemontest.Daemon, name string) {
	t.Helper()
	c, err := client.New("unix://"+d.Socket, "")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	all, err := c.Images(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(all, func(i client.ImageInfo) bool { return i.Name == name }) {
		return
	}
	last := ""
	if _, err := c.BuildImage(t.Context(), name, func(line string) { last = line }); err != nil {
		t.Fatalf("build the image %s: %v (its last line: %s)", name, err, last)
	}
}
