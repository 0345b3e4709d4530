//go:build all

package e2e_test

import (
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// rebuild gives a version a runsc and an agent of its own: bytes behind a program change nothing of it,
// and an agent with other code is one whose parts do not fit into the memory of an older one.
func (s *service) rebuild(version string) {
	s.t.Helper()
	libexec := filepath.Join(s.root.Dir(version), "libexec/sandboxd")
	runsc := filepath.Join(libexec, "runsc")
	b, err := os.ReadFile(runsc)
	if err := errors.Join(err, os.Remove(runsc)); err != nil { // it is a link to that of make build
		s.t.Fatal(err)
	}
	agent := filepath.Join(libexec, "agent/sandbox-agent")
	if err := errors.Join(os.WriteFile(runsc, append(b, '\n'), 0o755), os.Remove(agent)); err != nil {
		s.t.Fatal(err)
	}
	build := exec.Command("go", "build", "-trimpath", "-gcflags=-l", "-o", agent, "./cmd/sandbox-agent")
	build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		s.t.Fatalf("build the agent of %s: %v\n%s", version, err, out)
	}
}

// TestMemoryOfOtherBuild: after an upgrade that brings another runsc and another agent, memory that was
// kept before goes on, with the programs of the version that kept it; also after another restart. When
// that version is gone, it is refused, and nothing of it is lost.
func TestMemoryOfOtherBuild(t *testing.T) {
	s, ctx := newService(t, "0.9.0"), t.Context()
	s.install("0.9.1", store.Schema)
	if err := s.root.Point(versions.Previous, "0.9.1"); err != nil { // the sweep leaves it alone
		t.Fatal(err)
	}
	s.rebuild("0.9.1")
	counters := s.counters()
	c := counters[1]
	if err := s.api.Delete(ctx, counters[0].sandbox); err != nil {
		t.Fatal(err)
	}
	if _, err := s.api.Snapshots().CreateWithMemory(ctx, c.sandbox, "warm", true); err != nil {
		t.Fatal(err)
	}
	hibernate := func() {
		t.Helper()
		if err := client.Hibernate(ctx, s.api, c.sandbox); err != nil {
			t.Fatal(err)
		}
		s.awaitState(t, c.sandbox, wire.Paused, patience)
	}
	resume := func() {
		t.Helper()
		if err := s.api.Resume(ctx, c.sandbox); err != nil {
			t.Fatal(err)
		}
		s.answers(t, c.sandbox)
		s.goesOn(c)
		old := filepath.Join(s.root.Dir("0.9.0"), "libexec/sandboxd/runsc")
		if exes, err := filepath.Glob("/proc/[0-9]*/exe"); err != nil || !anyLeadsTo(exes, old) {
			t.Errorf("no process runs %s, %v", old, err)
		}
	}
	fork := func() (string, error) {
		r := spec("runsc")
		r.Image, r.SnapshotID = nil, "warm"
		r.Extensions[wire.ExtMemory] = "true"
		delete(r.Extensions, wire.ExtIdle)
		sb, err := s.api.Create(ctx, r, true)
		return sb.ID, err
	}

	hibernate()
	if err := errors.Join(s.root.Point(versions.Previous, "0.9.0"), s.root.Point(versions.Current, "0.9.1")); err != nil {
		t.Fatal(err)
	}
	s.restart()
	s.runs("0.9.1")
	resume()
	id, err := fork()
	if err != nil {
		t.Fatal(err)
	}
	s.answers(t, id)
	s.restart()
	s.answers(t, c.sandbox)
	hibernate()
	s.restart()
	resume()

	hibernate()
	if err := errors.Join(s.api.Delete(ctx, id), os.Rename(s.root.Dir("0.9.0"), s.path("aside"))); err != nil {
		t.Fatal(err)
	}
	refused := func(what string, err error) {
		t.Helper()
		if !errs.Is(err, errs.Unavailable) || !strings.Contains(err.Error(), "another build") {
			t.Errorf("%s without the version that kept it: %v", what, err)
		}
	}
	refused("resume", s.api.Resume(ctx, c.sandbox))
	_, err = fork()
	refused("a fork", err)
	s.restart()
	s.awaitState(t, c.sandbox, wire.Paused, patience)
	if err := os.Rename(s.path("aside"), s.root.Dir("0.9.0")); err != nil {
		t.Fatal(err)
	}
	// Each sweep removes versions that nothing needs: not one that memory needs, or whose sentry runs.
	s.link(s.root.Dir("0.9.1"), s.root.Dir("0.8.0"))
	if err := s.root.Point(versions.Previous, ""); err != nil {
		t.Fatal(err)
	}
	swept := func(want ...string) {
		t.Helper()
		if status, body := askBy(t, http.MethodPost, adminSocket(s.Daemon), "/sweep"); status != http.StatusNoContent {
			t.Fatalf("POST /sweep: %d %s", status, body)
		}
		all, err := s.root.List()
		var left []string
		for _, v := range all {
			left = append(left, v.Name)
		}
		if err != nil || !slices.Equal(left, want) {
			t.Errorf("versions %q are left, %v; want %q", left, err, want)
		}
	}
	swept("0.9.1", "0.9.0") // it hibernates
	resume()
	s.whole(c)
	if err := s.api.Snapshots().Remove(ctx, "warm"); err != nil {
		t.Fatal(err)
	}
	swept("0.9.1", "0.9.0") // it runs
	if err := s.api.Delete(ctx, c.sandbox); err != nil {
		t.Fatal(err)
	}
	s.gone(t, c.sandbox)
	swept("0.9.1")
	if log, err := os.ReadFile(s.path("log")); err != nil || strings.Count(string(log), "version removed") != 2 {
		t.Errorf("the log does not say that two versions were removed, %v", err)
	}
}

func anyLeadsTo(links []string, path string) bool {
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && to == path {
			return true
		}
	}
	return false
}
