//go:build all

package e2e_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// trial starts a version as one on trial, and is who upgrades: it holds the lock.
func (s *service) trial(to, nonce string) (*versions.Journal, *versions.Lock) {
	s.t.Helper()
	lock, err := s.root.Lock()
	if err != nil {
		s.t.Fatal(err)
	}
	from, err := s.root.Named(versions.Current)
	j := &versions.Journal{
		Step: versions.Trial, From: from, To: to, FromSchema: store.Schema, ToSchema: store.Schema + 1, Nonce: nonce,
		Started: time.Now(),
	}
	if err := errors.Join(err, s.root.Note(j), s.root.Point(versions.Undo, from), s.root.Point(versions.Current, to)); err != nil {
		s.t.Fatal(err)
	}
	s.restart()
	return j, lock
}

// TestTrial: while a version with a newer schema is on trial, requests that change the state wait, and
// commands, files and reads do not. They go on when the trial is over. If whoever upgrades dies, the
// daemon ends, and the next start undoes the upgrade, of which no client has lost anything.
func TestTrial(t *testing.T) {
	s := newService(t, "0.9.0")
	s.install("0.10.0", store.Schema+1)
	s.keep("0.10.0")
	var ids []string
	for _, runtime := range runtimes {
		ids = append(ids, s.create(t, spec(runtime)).ID)
	}
	serves := func() {
		t.Helper()
		for _, id := range ids {
			s.answers(t, id)
		}
		if all, err := s.api.List(t.Context(), client.Filter{}); err != nil || len(all) != len(ids) {
			t.Errorf("%d sandboxes, %v", len(all), err)
		}
	}

	_, lock := s.trial("0.10.0", "first")
	serves()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond) // it can only pass wrongly
	defer cancel()
	if _, err := s.api.Create(ctx, spec("runc"), true); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a create did not wait: %v", err)
	}
	serves() // and it made nothing
	tried, err := client.Trying(s.api, "first").Create(t.Context(), spec("runc"), true)
	if err == nil {
		err = client.Trying(s.api, "first").Delete(t.Context(), tried.ID)
	}
	if err != nil {
		t.Error("who tries the version:", err)
	}
	waits := make(chan error, 1)
	go func() { waits <- s.api.Pause(t.Context(), ids[0]) }()
	pid := s.pid() // nobody finishes the upgrade
	lock.Unlock()
	if err := <-waits; !errs.Is(err, errs.Unavailable) {
		t.Errorf("what waited for a trial that failed: %v", err)
	}
	late, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := exec.CommandContext(late, "tail", "-s", "0.02", "--pid", strconv.Itoa(pid), "-f", "/dev/null").Run(); err != nil {
		t.Error("the daemon goes on although nobody will finish the upgrade:", err)
	}
	if log, err := os.ReadFile(s.path("log")); err != nil || !strings.Contains(string(log), "was not finished") {
		t.Errorf("the daemon does not say why it ended: %v", err)
	}
	s.restart()
	s.runs("0.9.0")
	serves()

	j, lock := s.trial("0.10.0", "second")
	serves()
	go func() { waits <- s.api.Pause(t.Context(), ids[0]) }()
	j.Step = versions.Done
	if err := errors.Join(s.root.Note(j), s.root.Point(versions.Undo, "")); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-waits:
		t.Errorf("it did not wait: %v", err)
	case <-time.After(300 * time.Millisecond): // it can only pass wrongly
	}
	lock.Unlock()
	if err := <-waits; err != nil {
		t.Error(err)
	}
	if err := s.api.Resume(t.Context(), ids[0]); err != nil {
		t.Error(err)
	}
	s.runs("0.10.0")
	serves()
}
