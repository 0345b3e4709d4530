package compat_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// TestPythonCodeInterpreter tells python/code.py with the official code
// interpreter SDK: in an image of which nothing is asked but python3 and bash,
// and in the one that has it all.
func TestPythonCodeInterpreter(t *testing.T) {
	hosttest.Root(t)
	python := venv(t, "python/requirements.txt")
	d := daemontest.New(t)
	for _, image := range []string{"python", "code-interpreter"} {
		daemontest.Image(t, d, image)
		for _, runtime := range []string{"runc", "runsc"} {
			t.Run(image+"/"+runtime, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
				defer cancel()
				cmd := exec.CommandContext(ctx, python, "python/code.py", runtime, image)
				cmd.Env = append(os.Environ(), "OPEN_SANDBOX_DOMAIN="+d.TCP, "OPEN_SANDBOX_API_KEY="+daemontest.Key,
					"PYTHONWARNINGS=ignore")
				var errout bytes.Buffer
				cmd.Stderr = &errout
				out, err := cmd.Output()
				lines := strings.Split(strings.TrimSpace(string(out)), "\n")
				last := lines[len(lines)-1]
				if err != nil || last != runtime+": the end" {
					t.Fatalf("the story ended after %q: %v\n%s", last, err, errout.Bytes())
				}
				t.Logf("%d chapters\n%s", len(lines), out)
			})
		}
	}
}
