//go:build all

package e2e_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/internal/upgrade"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/store"
	"github.com/sandboxd/sandboxd/test/bench/downtime"
)

// TestChangeVersionKilled kills whoever changes the version at each step, to a version with the same
// schema and to one with a newer one. The nextVersion start of the service runs one of both versions, and
// all sandboxes. internal/upgrade cuts the power at each step.
func TestChangeVersionKilled(t *testing.T) {
	s := newService(t, "0.9.0")
	s.settled(func() {
		s.install(nextVersion, store.Schema)
		s.install("0.10.0", store.Schema+1)
		s.keep(nextVersion, "0.10.0")
	})
	counters := s.counters()
	for _, to := range []string{nextVersion, "0.10.0"} {
		for _, point := range upgrade.FailpointNames() {
			if !strings.HasPrefix(point, "upgrade:") || to == "0.10.0" && point == "upgrade:disarm" {
				continue // after that there is no way back from the newer schema
			}
			out, err := s.change(failpoint.Env+"="+point+"=kill", "rollback", to)
			if err == nil {
				t.Fatalf("to %s, killed at %s: it went on\n%s", to, point, out)
			}
			s.restart()
			if point != "upgrade:disarm" {
				s.runs("0.9.0")
			} else {
				s.runs(to)
				if out, err := s.change("", "rollback"); err != nil {
					t.Fatalf("back: %v\n%s", err, out)
				}
			}
			for _, c := range counters {
				s.answers(t, c.sandbox)
				s.goesOn(c)
			}
		}
	}
	for _, c := range counters {
		s.whole(c)
	}
}

// TestChangeVersionBusy changes the version back and forth while sandboxes are created, deleted, paused
// or hibernated, and snapshotted. What the API has promised holds after it, and nothing of what it refused is left.
func TestChangeVersionBusy(t *testing.T) {
	s := newService(t, "0.9.0")
	s.settled(func() {
		s.install(nextVersion, store.Schema)
		s.install("0.10.0", store.Schema+1)
		s.keep(nextVersion, "0.10.0")
	})
	ctx, cancel := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	var mu sync.Mutex
	there, gone, snapshots, rested := map[string]bool{}, map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, runtime := range runtimes {
		busy.Go(func() {
			for ctx.Err() == nil {
				sb, err := s.api.Create(ctx, spec(runtime), true)
				if err != nil || sb.Status.State != wire.Running {
					continue // the daemon was restarted meanwhile
				}
				mu.Lock()
				there[sb.ID] = true
				mu.Unlock()
				if snap, err := s.api.Snapshots().Create(ctx, sb.ID, "", true); err == nil {
					mu.Lock()
					snapshots[snap.ID] = true
					mu.Unlock()
				}
				if runtime == "runsc" {
					err = client.Hibernate(t.Context(), s.api, sb.ID)
				} else {
					err = s.api.Pause(t.Context(), sb.ID)
				}
				mu.Lock()
				rested[runtime] = rested[runtime] || err == nil
				enough := len(there) > 2
				mu.Unlock()
				if err = errors.Join(err, s.api.Resume(t.Context(), sb.ID)); err == nil && enough {
					if err = s.api.Delete(ctx, sb.ID); err == nil || errs.Is(err, errs.NotFound) {
						mu.Lock()
						delete(there, sb.ID)
						gone[sb.ID] = true
						mu.Unlock()
					}
				}
			}
		})
	}
	for range 3 {
		for _, to := range []string{nextVersion, "0.9.0"} {
			if out, err := s.change("", "rollback", to); err != nil {
				t.Errorf("to %s: %v\n%s", to, err, out)
			}
		}
		// It is good, and is undone all the same: what was asked meanwhile waited, or was refused.
		if out, err := s.change(failpoint.Env+"=upgrade:done=error", "rollback", "0.10.0"); !strings.Contains(out, "0.9.0 runs again") {
			t.Errorf("to 0.10.0 and back: %v\n%s", err, out)
		}
	}
	cancel()
	busy.Wait()
	s.runs("0.9.0")
	for id := range there {
		sb, err := s.api.Get(t.Context(), id)
		if err != nil {
			t.Errorf("sandbox %s, which was created: %v", id, err)
			continue
		}
		if sb.Status.State == wire.Paused {
			if err := s.api.Resume(t.Context(), id); err != nil {
				t.Errorf("resume %s: %v", id, err)
			}
		}
		s.awaitState(t, id, wire.Running, patience)
		s.answers(t, id)
	}
	for id := range gone {
		s.gone(t, id)
	}
	known, err := s.api.Snapshots().List(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	for _, snap := range known {
		delete(snapshots, snap.ID)
	}
	if len(snapshots) > 0 {
		t.Errorf("snapshots that the API accepted are lost: %v", snapshots)
	}
	t.Logf("%d sandboxes are there, %d were deleted", len(there), len(gone))
	if len(gone) == 0 || !rested["runc"] || !rested["runsc"] {
		t.Errorf("not all was done meanwhile: paused or hibernated on %v", rested)
	}
	if j, err := s.root.Journal(); err != nil || j.Step != versions.Undone {
		t.Errorf("the journal: %+v, %v", j, err)
	}
}

// TestChangeVersionHundred is the benchmark upgrade_100: the version is changed under a hundred
// sandboxes that write lines which clients follow. Nothing is lost, and clients are without an API
// for a second at most: docs/benchmarks.md has the figures.
func TestChangeVersionHundred(t *testing.T) {
	s := newService(t, "0.9.0", "[limits]", "max_sandboxes = 300")
	s.settled(func() {
		s.install(nextVersion, store.Schema)
		s.keep(nextVersion)
	})
	var ids []string
	for range 50 {
		for _, runtime := range runtimes {
			r := spec(runtime)
			r.ResourceLimits["memory"] = "64Mi"
			r.Extensions[wire.ExtOneShot] = "true"
			ids = append(ids, s.create(t, r).ID)
		}
	}
	crowd, err := downtime.Write(t.Context(), s.api, ids, len(ids)/2)
	if err != nil {
		t.Fatal(err)
	}
	var gaps []time.Duration
	for range 3 {
		for _, to := range []string{nextVersion, "0.9.0"} {
			w, err := downtime.Ask(t.Context(), s.Socket)
			if err != nil {
				t.Fatal(err)
			}
			begun := time.Now()
			if out, err := s.change("", "rollback", to); err != nil {
				t.Fatalf("to %s: %v\n%s", to, err, out)
			}
			gap, _, _ := w.Longest()
			t.Logf("to %s: %s without an API, %s in all", to, gap.Round(time.Millisecond), time.Since(begun).Round(time.Millisecond))
			gaps = append(gaps, gap)
			s.runs(to)
		}
	}
	slices.Sort(gaps)
	t.Logf("without an API: median %s, longest %s", gaps[len(gaps)/2].Round(time.Millisecond), gaps[len(gaps)-1].Round(time.Millisecond))
	if median := gaps[len(gaps)/2]; median > time.Second {
		t.Errorf("the API was away for %s, want 1s at most", median)
	}
	if lost, err := crowd.End(t.Context()); err != nil || lost != (downtime.Loss{}) {
		t.Errorf("lost %+v, %v", lost, err)
	}
}

// TestChangeVersionRestored: a host whose restored state is not accepted changes its version, though no
// version of it creates a sandbox, and says that the runtimes were not tried.
func TestChangeVersionRestored(t *testing.T) {
	s := newService(t, "0.9.0")
	s.settled(func() {
		s.install(nextVersion, store.Schema)
		s.keep(nextVersion)
	})
	file, err := os.Create(s.path("backup"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.api.System().Backup(t.Context(), file), file.Close()); err != nil {
		t.Fatal(err)
	}
	stray := s.create(t, spec("runc")).ID
	restore := func(args ...string) {
		t.Helper()
		if err := s.stop(); err != nil {
			t.Fatal(err)
		}
		program := filepath.Join(string(s.root), "current/bin/sandboxd")
		if out, err := exec.Command(program, append([]string{"restore", "--config", s.Config}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("restore: %v\n%s", err, out)
		}
	}
	restore(s.path("backup"))
	s.restart()
	if info, err := s.api.System().Info(t.Context()); err != nil || !slices.Contains(info.Strays, stray) {
		t.Fatalf("%+v, %v", info, err)
	}
	out, err := s.change("", "rollback", nextVersion)
	if err != nil || !strings.Contains(out, "because the host has 1 sandbox that the state does not know") {
		t.Errorf("%v\n%s", err, out)
	}
	s.runs(nextVersion)
	restore("--accept")
	s.restart()
	if out, err = s.change("", "rollback"); err != nil || !strings.Contains(out, "a new sandbox on runsc came up") {
		t.Errorf("accepted: %v\n%s", err, out)
	}
	s.runs("0.9.0")
}
