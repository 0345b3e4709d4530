//go:build all

package documents

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/instance"
)

// quickstartLimit suffices for a host that has never compiled Go or built an image.
const quickstartLimit = 30 * time.Minute

// TestQuickstart runs the README's "Two commands" in a clone, and removes everything
// afterwards. If the host had a development daemon before, its images stay and are not
// built anew.
func TestQuickstart(t *testing.T) {
	hosttest.Root(t)
	dev, err := instance.Parse("d")
	if err != nil {
		t.Fatal(err)
	}
	lock, err := os.OpenFile("/run/lock/sandboxd-test-"+dev.String(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dev.RunDir()); err == nil {
		t.Fatalf("%s is there: a development daemon runs, which the test would take away; make dev-down ends it", dev.RunDir())
	}
	_, err = os.Stat(dev.StateDir())
	isNew := errors.Is(err, fs.ErrNotExist)
	t.Logf("the host is new to development daemons: %v", isNew)
	clone, commands := typed(t)
	if want := []string{"git clone … && cd sandboxd", "make quickstart"}; !slices.Equal(clone.text, want) {
		t.Errorf("README.md:%d: the test runs %q, and the document says %q", clone.line, want, clone.text)
	}
	hosttest.Leaks(t, dev)
	sh := newcomer(t)
	if isNew {
		t.Cleanup(func() { // after make dev-down, which leaves this
			if err := os.RemoveAll(dev.StateDir()); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() { sh("make dev-down") })

	said := sh("make quickstart")
	if !strings.Contains(said, "\n"+strings.Join(commands.text, "\n")+"\n") {
		t.Errorf("README.md:%d shows what make quickstart does not say:\n%s", commands.line, said)
	}
	if out := sh(`eval "$(make -s dev-env)" && sandboxctl run base -- echo here`); out != "here\n" {
		t.Errorf("with the environment of make dev-env, a sandbox says %q", out)
	}
}

// typed returns the README's two blocks: the commands and their output. The second command
// of the title is in the text.
func typed(t *testing.T) (clone, commands block) {
	t.Helper()
	var marked []block
	for _, b := range blocksOf(t, "README.md") {
		if b.mark == "run by" && b.reason == t.Name() {
			marked = append(marked, b)
		}
	}
	if len(marked) != 2 {
		t.Fatalf("README.md has %d blocks for this test, want 2", len(marked))
	}
	text, err := os.ReadFile(top + "README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"`eval \"$(make -s dev-env)\"`", "`make dev-down`"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("README.md names no %s", want)
		}
	}
	return marked[0], marked[1]
}

// newcomer returns a shell in a new clone. Each call runs one line, which must not fail,
// and returns its output.
func newcomer(t *testing.T) func(line string) string {
	t.Helper()
	dir, env := clone(t)
	_, port, _ := strings.Cut(hosttest.FreePort(t).String(), ":")
	env = append(env, "SANDBOXD_DEV_PORT="+port) // 8080 may be in use
	return func(line string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), hosttest.Patient(quickstartLimit))
		defer cancel()
		cmd := exec.CommandContext(ctx, "bash", "--noprofile", "--norc", "-c", line)
		cmd.Dir, cmd.Env = dir, env
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // make and its children
		// Not a pipe: the daemon would keep it open.
		said, err := os.Create(filepath.Join(filepath.Dir(dir), "said"))
		if err != nil {
			t.Fatal(err)
		}
		defer said.Close()
		cmd.Stdout, cmd.Stderr = said, said
		failed := cmd.Run()
		out, err := os.ReadFile(said.Name())
		if err != nil {
			t.Fatal(err)
		}
		if failed != nil {
			t.Errorf("$ %s: %v\n%s", line, failed, out)
		}
		return string(out)
	}
}
