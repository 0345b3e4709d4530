package sandbox

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func restartable(p record.RestartPolicy) record.Spec {
	s := spec()
	s.Restart.Policy = p
	return s
}

// TestRestartByPolicy: it comes up with its count, is not erased while it
// waits, and does so only while its policy wants it.
func TestRestartByPolicy(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx, k := t.Context(), Keeper{m}
		r := mustCreate(t, m, restartable(record.RestartOnFailure))
		if err := k.Restart(ctx, r.ID, func() {}); err != nil { // it runs
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		h.exit(r.ID, Obituary{ExitCode: 3})
		synctest.Wait()
		r, _ = m.Get(ctx, r.ID)
		if !r.NextStart().Equal(r.Changed.Add(time.Second)) || !m.Deadline(r).IsZero() {
			t.Errorf("next start %v, deadline %v", r.NextStart(), m.Deadline(r))
		}
		news := m.Subscribe(ctx)
		for i := 1; i <= 2; i++ {
			if err := k.Restart(ctx, r.ID, func() {}); err != nil {
				t.Fatal(err)
			}
			r, _ = m.Get(ctx, r.ID)
			if r.State != record.Running || r.Restarts != i || r.QuickRestarts != i || r.Reason != "" {
				t.Fatalf("%+v", r)
			}
			h.exit(r.ID, Obituary{ExitCode: 3})
			synctest.Wait()
		}
		restarted := 0
		for len(news) > 0 {
			if e := <-news; e.Type == events.Restart && e.Reason == string(record.Exited) &&
				strings.Contains(e.Message, "exited with code 3") {
				restarted++
			}
		}
		if restarted != 2 {
			t.Errorf("%d events of 2 restarts", restarted)
		}
		// Stopped while it waits, it stays.
		if err := m.Stop(ctx, r.ID, 0); err != nil {
			t.Fatal(err)
		}
		if err := k.Restart(ctx, r.ID, func() {}); err != nil {
			t.Fatal(err)
		}
		if r, _ = m.Get(ctx, r.ID); r.State != record.Ended || r.Reason != record.Stopped || r.Restarts != 2 || *r.ExitCode != 3 {
			t.Errorf("%+v", r)
		}
		// Somebody starts it: all is forgotten.
		if _, err := m.Start(ctx, r.ID); err != nil {
			t.Fatal(err)
		}
		if r, _ = m.Await(ctx, r.ID); r.State != record.Running || r.Restarts != 0 || r.QuickRestarts != 0 {
			t.Errorf("%+v", r)
		}
		if err := m.Delete(ctx, r.ID); err != nil {
			t.Fatal(err)
		}
		if err := k.Restart(ctx, r.ID, func() {}); err != nil {
			t.Error(err)
		}
	})
}

// TestRestartBegins: who keeps room for a restart need not do so until it runs.
func TestRestartBegins(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx, k := t.Context(), Keeper{m}
		r := mustCreate(t, m, restartable(record.RestartAlways))
		begun := 0
		if err := k.Restart(ctx, r.ID, func() { begun++ }); err != nil || begun > 0 {
			t.Errorf("one that runs: %v, begun %d times", err, begun)
		}
		h.exit(r.ID, Obituary{})
		synctest.Wait()
		open := h.gate("agent.Ready " + r.ID)
		go k.Restart(ctx, r.ID, func() { begun++ }) //nolint:errcheck // begun tells
		synctest.Wait()
		if r, _ = m.Get(ctx, r.ID); r.State != record.Starting || begun != 1 {
			t.Errorf("it is %s, begun %d times", r.State, begun)
		}
		open()
	})
}

// TestRestartAfterReboot: a reboot is an end like another.
func TestRestartAfterReboot(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, restartable(record.RestartOnFailure))
		m.life.cfg.BootID = "the next"
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		r, _ = m.Get(t.Context(), r.ID)
		if r.Reason != record.HostReboot || !r.Restarting() {
			t.Errorf("%+v", r)
		}
		if err := (Keeper{m}).Restart(t.Context(), r.ID, func() {}); err != nil {
			t.Fatal(err)
		}
		if r, _ = m.Get(t.Context(), r.ID); r.State != record.Running || r.Restarts != 1 {
			t.Errorf("%+v", r)
		}
		m.life.cfg.NoSweep = "the pool is another's"
		wantCode(t, (Keeper{m}).Restart(t.Context(), r.ID, func() {}), errs.Unavailable)
	})
}

func TestRecycle(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx, k := t.Context(), Keeper{m}
		for _, p := range []record.RestartPolicy{record.RestartNo, record.RestartAlways} {
			r := mustCreate(t, m, restartable(p))
			if r, _ = m.Await(ctx, r.ID); r.Started.IsZero() {
				t.Error("it runs, and never started")
			}
			other := r
			other.Started = r.Started.Add(-time.Second)
			if err := k.Recycle(ctx, other, "of another life"); err != nil {
				t.Fatal(err)
			}
			if r, _ = m.Get(ctx, r.ID); r.State != record.Running {
				t.Fatalf("%+v", r)
			}
			if err := k.Recycle(ctx, r, "it says no"); err != nil {
				t.Fatal(err)
			}
			r, _ = m.Get(ctx, r.ID)
			if p == record.RestartNo && r.State != record.Running {
				t.Errorf("without a policy it became %+v", r)
			}
			if p == record.RestartAlways && (r.State != record.Ended || r.Reason != record.Unhealthy || r.OK() ||
				!strings.Contains(r.Message, "it says no") || !r.Restarting()) {
				t.Errorf("%+v", r)
			}
		}
		if err := k.Recycle(ctx, record.Record{ID: "nobody"}, ""); err != nil {
			t.Error(err)
		}
		wantCode(t, m.Stop(ctx, "nobody", 0), errs.NotFound)
	})
}

// TestRecycleWaitsForNobody: who is at a sandbox may be why it is unhealthy, and
// when they are done it may be well.
func TestRecycleWaitsForNobody(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx, k := t.Context(), Keeper{m}
		r := mustCreate(t, m, restartable(record.RestartAlways))
		open := h.gate("snapshot.make snap-" + first)
		snap, err := m.Snapshots().Create(ctx, r.ID, record.SnapshotRequest{})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if begin := time.Now(); k.Recycle(ctx, r, "it does not answer") != nil || time.Since(begin) > 0 || !k.StandsStill(r.ID) {
			t.Errorf("a snapshot is being taken: %v", k.StandsStill(r.ID))
		}
		open()
		if _, err := m.Snapshots().Await(ctx, snap.ID); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if r, _ = m.Get(ctx, r.ID); r.State != record.Running || k.StandsStill(r.ID) {
			t.Errorf("%+v", r)
		}
	})
}
