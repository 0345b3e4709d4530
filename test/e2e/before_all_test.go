//go:build all

package e2e_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/testcache"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// releaseBefore is the commit whose agents this release must serve. A release moves it to its own.
const releaseBefore = "4e6239b3b406828ca75bc7c718b2d02dc22d2ec6"

// agentBefore returns the agent's program of releaseBefore, from the test cache or built of the history.
func agentBefore(t *testing.T) string {
	t.Helper()
	dir, err := testcache.Dir("agents")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "sandbox-agent-"+releaseBefore)
	lock, err := testcache.Lock(path)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if f, err := testcache.Open(path); err == nil {
		f.Close()
		return path
	}
	source := t.TempDir()
	tar := filepath.Join(source, "source.tar")
	if out, err := exec.Command("git", "-C", "../..", "archive", "--output", tar, releaseBefore).CombinedOutput(); err != nil {
		t.Fatalf("the history has no commit %s, whose agent this test runs: %v: %s; get it with git fetch --unshallow, or git fetch "+
			"origin %[1]s", releaseBefore, err, out)
	}
	if out, err := exec.Command("tar", "-C", source, "-xf", tar).CombinedOutput(); err != nil {
		t.Fatalf("unpack %s: %v: %s", tar, err, out)
	}
	build := exec.Command("go", "build", "-trimpath", "-o", "agent-before", "./cmd/sandbox-agent")
	build.Dir, build.Env = source, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the agent of %s: %v: %s", releaseBefore, err, out)
	}
	err = testcache.Keep(path, func(w io.Writer) error {
		f, err := os.Open(filepath.Join(source, "agent-before"))
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(w, f)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// oldGuest is a sandbox whose agent is of the release before, and what goes on in it.
type oldGuest struct {
	*service
	sandbox, session, context string
	typing                    *io.PipeWriter
	typed                     chan error // how the terminal ended
	shown                     bytes.Buffer
}

// begin uses all that an agent serves, and leaves something behind in each of it.
func (s *service) begin(t *testing.T, runtime string) *oldGuest {
	t.Helper()
	r := spec(runtime)
	r.Image.URI = "python"
	g, ctx := &oldGuest{service: s, sandbox: s.create(t, r).ID, typed: make(chan error, 1)}, t.Context()
	session, err := s.api.Sessions(g.sandbox).Create(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	g.session = session.SessionID
	made, err := s.api.Interpreters(g.sandbox).Create(ctx, "python", "")
	if err != nil {
		t.Fatal(err)
	}
	g.context = made.ID
	g.line(t, "kept=41", "")
	g.code(t, "kept = 41", "")
	g.put(t, "/srv/kept", "41\n")
	terminal, err := s.api.Terminals(g.sandbox).Create(ctx, client.Command{Argv: []string{
		"bash", "-c", "read a; echo got $a; read b; echo got $b",
	}}, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	in, typing := io.Pipe()
	g.typing = typing
	go func() {
		exit, err := terminal.Attach(ctx, client.View{In: in, Out: &g.shown, Patience: patience})
		if err == nil && exit.Code != 0 {
			err = fmt.Errorf("it exited with %d", exit.Code)
		}
		g.typed <- err
	}()
	io.WriteString(typing, "one\n") //nolint:errcheck // what it shows is looked at
	return g
}

// goesOn fails unless all that begin has begun is as it was.
func (g *oldGuest) goesOn(t *testing.T) {
	t.Helper()
	g.answers(t, g.sandbox)
	g.line(t, "echo $((kept + 1))", "42\n")
	g.code(t, "print(kept + 1)", "42\n")
	if out, err := g.exec(t.Context(), g.sandbox, "cat", "/srv/kept"); err != nil || out != "41\n" {
		t.Errorf("the file has %q, %v", out, err)
	}
	f, err := g.api.Files(g.sandbox).Download(t.Context(), "/srv/kept")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if b, err := io.ReadAll(f); err != nil || string(b) != "41\n" {
		t.Errorf("the file has %q, %v", b, err)
	}
}

// end ends the terminal, which went on since begin.
func (g *oldGuest) end(t *testing.T) {
	t.Helper()
	io.WriteString(g.typing, "two\n") //nolint:errcheck // what it shows is looked at
	if err := <-g.typed; err != nil || !strings.Contains(g.shown.String(), "got one") || !strings.Contains(g.shown.String(), "got two") {
		t.Errorf("the terminal: %v, it shows %q", err, g.shown.String())
	}
}

func (g *oldGuest) line(t *testing.T, line, want string) {
	t.Helper()
	p, err := g.api.Sessions(g.sandbox).Run(t.Context(), g.session, client.Line{Shell: line})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if exit, err := p.Wait(&out, &out); err != nil || exit.Code != 0 || out.String() != want {
		t.Errorf("the session: %q, %+v, %v; want %q", out.String(), exit, err, want)
	}
}

func (g *oldGuest) code(t *testing.T, text, want string) {
	t.Helper()
	e, err := g.api.Interpreters(g.sandbox).Run(t.Context(), client.Code{Text: text, Context: g.context})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := e.Wait(&out, &out, func(map[string]string) error { return nil }); err != nil || out.String() != want {
		t.Errorf("the context: %q, %v; want %q", out.String(), err, want)
	}
}

func (g *oldGuest) put(t *testing.T, path, text string) {
	t.Helper()
	open := func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(text)), nil }
	err := g.api.Files(g.sandbox).Put(t.Context(), []client.Upload{{Path: path, Mode: 644, Size: int64(len(text)), Open: open}})
	if err != nil {
		t.Fatal(err)
	}
}

// TestAgentsOfTheReleaseBefore: sandboxes whose agent is of the release before are served, before and
// after an upgrade to a version with the present agent, and so is their memory.
func TestAgentsOfTheReleaseBefore(t *testing.T) {
	s, ctx := newService(t, "0.9.0"), t.Context()
	daemontest.Image(t, s.Daemon, "python")
	s.install("0.9.1", store.Schema)
	if err := s.root.Point(versions.Previous, "0.9.1"); err != nil { // the sweep leaves it alone
		t.Fatal(err)
	}
	agent := filepath.Join(s.root.Dir("0.9.0"), "libexec/sandboxd/agent/sandbox-agent")
	if err := os.Remove(agent); err != nil { // a link to that of make build
		t.Fatal(err)
	}
	before := agentBefore(t)
	if out, err := exec.Command("install", "-m", "755", before, agent).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	counters := s.counters()
	var guests []*oldGuest
	for _, runtime := range runtimes {
		guests = append(guests, s.begin(t, runtime))
	}
	sum, err := os.ReadFile(before + ".sha256")
	if err != nil {
		t.Fatal(err)
	}
	goOn := func() {
		t.Helper()
		for _, g := range guests {
			g.goesOn(t)
			if out, err := s.exec(ctx, g.sandbox, "sha256sum", "/opt/opensandbox/sandbox-agent"); err != nil ||
				!strings.HasPrefix(out, strings.TrimSpace(string(sum))) {
				t.Errorf("its agent is not that of %s: %s, %v", releaseBefore, out, err)
			}
		}
	}
	goOn()
	s.restart()
	goOn()
	if err := errors.Join(s.root.Point(versions.Previous, "0.9.0"), s.root.Point(versions.Current, "0.9.1")); err != nil {
		t.Fatal(err)
	}
	s.restart()
	s.runs("0.9.1")
	goOn()
	for _, g := range guests {
		g.end(t)
	}

	gvisor := guests[1].sandbox
	if err := errors.Join(client.Hibernate(ctx, s.api, gvisor), s.api.Resume(ctx, gvisor)); err != nil {
		t.Fatal(err)
	}
	goOn()
	if err := errors.Join(s.api.Pause(ctx, guests[0].sandbox), s.api.Resume(ctx, guests[0].sandbox)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.api.Snapshots().CreateWithMemory(ctx, gvisor, "old", true); err != nil {
		t.Fatal(err)
	}
	copied, err := s.api.Create(ctx, wire.CreateRequest{
		SnapshotID: "old", Extensions: map[string]string{wire.ExtRuntime: "runsc", wire.ExtMemory: "true"},
		ResourceLimits: map[string]string{"memory": "256Mi", "cpu": "1"},
	}, true)
	if err != nil {
		t.Fatal(err)
	}
	guests[1].sandbox = copied.ID
	goOn()
	for _, c := range counters {
		s.whole(c)
	}
}
