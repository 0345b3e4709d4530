package sandbox

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func idler(a record.IdleAction) record.Spec {
	s := spec()
	s.Idle = record.Idle{After: time.Minute, Action: a}
	if a == record.IdleHibernate {
		s.Runtime = "runsc"
	}
	return s
}

func yes() bool { return true }

// rest has the idle policy of a sandbox applied, and returns its record.
func rest(t *testing.T, m *Manager, r record.Record) record.Record {
	t.Helper()
	if err := (Keeper{m}).Rest(t.Context(), r, yes); err != nil {
		t.Fatal(err)
	}
	r, _ = m.Get(t.Context(), r.ID)
	return r
}

// calls counts the calls of a name so far.
func (h *host) count(call string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.calls {
		if c == call {
			n++
		}
	}
	return n
}

// TestIdlePause: what the policy pauses is asleep, its next use wakes it once, and each is an event.
func TestIdlePause(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx, k := t.Context(), Keeper{m}
		r := mustCreate(t, m, idler(record.IdlePause))
		news := m.Subscribe(ctx)
		if got := rest(t, m, r); got.State != record.Paused || !got.Asleep() || !strings.Contains(got.Message, "idle for 1m;") {
			t.Fatalf("%+v", got)
		}
		if e, p := <-news, <-news; e.Type != "pausing" || p.Type != "paused" || p.Reason != "idle" {
			t.Errorf("events %+v and %+v", e, p)
		}
		time.Sleep(90 * time.Second)
		open := h.gate("frozen.unmake " + r.ID)
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() {
				if got, err := k.Wake(ctx, r.ID); err != nil || got.State != record.Running || got.Reason != "" || got.Message != "" {
					t.Errorf("%+v, %v", got, err)
				}
			})
		}
		synctest.Wait()
		soon, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if _, err := k.Wake(soon, r.ID); err == nil {
			t.Error("it does not wait for who wakes it")
		}
		open()
		all.Wait()
		if n := h.count("frozen.unmake " + r.ID); n != 1 {
			t.Errorf("it was thawed %d times", n)
		}
		var last events.Event
		for len(news) > 0 {
			last = <-news
		}
		if last.Type != events.Woken || last.Reason != "idle" || last.Message != "it slept for 1m31s" {
			t.Errorf("%+v", last)
		}
	})
}

// TestIdleAndClients: what a client pauses is the client's, even if it was asleep, and nothing wakes
// it. A client resumes what is asleep, too.
func TestIdleAndClients(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx, k := t.Context(), Keeper{m}
		r := mustCreate(t, m, idler(record.IdlePause))
		awake := func(what string) {
			t.Helper()
			if got, _ := m.Get(ctx, r.ID); got.State != record.Running || got.Reason != "" {
				t.Fatalf("%s: %+v", what, got)
			}
		}
		rest(t, m, r)
		if err := m.Resume(ctx, r.ID); err != nil {
			t.Fatal(err)
		}
		awake("resumed by a client")
		for _, asleep := range []bool{false, true} {
			if asleep {
				rest(t, m, r)
			}
			if err := m.Pause(ctx, r.ID); err != nil {
				t.Fatal(err)
			}
			if got, err := k.Wake(ctx, r.ID); err != nil || got.State != record.Paused || got.Asleep() || got.Message != "" {
				t.Fatalf("paused by a client, asleep before: %v: %+v, %v", asleep, got, err)
			}
			wantCode(t, m.Pause(ctx, r.ID), errs.WrongState)
			rest(t, m, r) // it does not run
			if err := m.Resume(ctx, r.ID); err != nil {
				t.Fatal(err)
			}
			awake("resumed")
		}
		// It ends in its sleep, and may be deleted in it; neither has the reason idle.
		rest(t, m, r)
		if err := m.Stop(ctx, r.ID, time.Second); err != nil {
			t.Fatal(err)
		}
		if got, err := k.Wake(ctx, r.ID); err != nil || got.State != record.Ended || got.Reason != record.Stopped {
			t.Errorf("%+v, %v", got, err)
		}
		r = mustCreate(t, m, idler(record.IdlePause))
		rest(t, m, r)
		news := m.Subscribe(ctx)
		if err := m.Delete(ctx, r.ID); err != nil {
			t.Fatal(err)
		}
		if e := <-news; e.Type != "deleting" || e.Reason != "" || e.Message != "" {
			t.Errorf("%+v", e)
		}
		_, err := k.Wake(ctx, r.ID)
		wantCode(t, err, errs.NotFound)
	})
}

// TestIdleEnds: stop is as a client's stop, which no restart policy undoes, and kill is as expiry.
func TestIdleEnds(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx := t.Context()
		s := idler(record.IdleStop)
		s.Restart.Policy = record.RestartAlways
		r := rest(t, m, mustCreate(t, m, s))
		if r.State != record.Ended || r.Reason != record.Stopped || r.Restarting() || !strings.HasPrefix(r.Message, "it was idle for 1m;") {
			t.Errorf("%+v", r)
		}
		if got, err := (Keeper{m}).Wake(ctx, r.ID); err != nil || got.State != record.Ended {
			t.Errorf("%+v, %v", got, err)
		}
		r = mustCreate(t, m, idler(record.IdleKill))
		m.life.cfg.NoSweep = "the pool is another's"
		if got := rest(t, m, r); got.State != record.Running {
			t.Errorf("nothing may be swept, and it is %s", got.State)
		}
		m.life.cfg.NoSweep = ""
		news := m.Subscribe(ctx)
		rest(t, m, r)
		synctest.Wait()
		if e, d := <-news, <-news; d.Type != events.Deleted || d.Reason != "idle" || e.Message != "it was idle for 1m" {
			t.Errorf("events %+v and %+v", e, d)
		}
		_, err := m.Get(ctx, r.ID)
		wantCode(t, err, errs.NotFound)
		rest(t, m, r) // it is gone
	})
}

// TestIdleGivesWay: a policy is applied to the life that was idle, if still nobody uses it, and while
// no other operation holds it.
func TestIdleGivesWay(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx, k := t.Context(), Keeper{m}
		for i, a := range record.IdleActions {
			r := mustCreate(t, m, idler(a))
			other := r
			other.Started = r.Started.Add(-time.Second)
			rest(t, m, other)
			if err := k.Rest(ctx, r, func() bool { return false }); err != nil {
				t.Fatal(err)
			}
			open := h.gate("snapshot.make snap-" + []string{first, second, "dccccccccccc", "dddddddddddd"}[i])
			snap, err := m.Snapshots().Create(ctx, r.ID, record.SnapshotRequest{})
			if err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			rest(t, m, r)
			open()
			if _, err := m.Snapshots().Await(ctx, snap.ID); err != nil {
				t.Fatal(err)
			}
			if err := m.Snapshots().Delete(ctx, snap.ID); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if r, _ = m.Get(ctx, r.ID); r.State != record.Running {
				t.Errorf("%s: it is %s", a, r.State)
			}
		}
		// The freezer refuses: it runs, and is not asleep.
		r := mustCreate(t, m, idler(record.IdlePause))
		h.fault = fault{call: "frozen.make " + r.ID + " #1", mode: errAfter}
		if err := k.Rest(ctx, r, yes); err == nil {
			t.Error("the freezer refused, and the pause succeeded")
		}
		if r, _ = m.Get(ctx, r.ID); r.State != record.Running || r.Reason != "" {
			t.Errorf("%+v", r)
		}
		// It refuses both ways: a use tries again.
		h.fault = fault{call: "frozen.make " + r.ID + " #2", mode: errAfter}
		h.failAll = "frozen.unmake"
		if err := k.Rest(ctx, r, yes); err == nil {
			t.Error("the freezer refused, and the pause succeeded")
		}
		if r, _ = m.Get(ctx, r.ID); r.State != record.Pausing || !r.Asleep() {
			t.Errorf("%+v", r)
		}
		h.failAll = ""
		if got, err := k.Wake(ctx, r.ID); err != nil || got.State != record.Running || got.Reason != "" {
			t.Errorf("%+v, %v", got, err)
		}
	})
}

// idleStory has idle policies applied, and uses wake what they paused.
func idleStory(ctx context.Context, m *Manager, _ *host) (failed int) {
	k := Keeper{m}
	note, create := telling(ctx, m, &failed, func(*record.Spec) {})
	rest := func(id string) {
		r, err := m.Get(ctx, id)
		if err == nil {
			err = k.Rest(ctx, r, yes)
		}
		note(err)
		synctest.Wait() // what a deletion leaves to the background
	}
	a := create(idler(record.IdlePause))
	rest(a)
	_, err := k.Wake(ctx, a)
	note(err)
	rest(a) // and stays asleep
	s := idler(record.IdlePause)
	s.Name = "mine"
	b := create(s)
	rest(b)
	note(m.Pause(ctx, b)) // now it is a client's pause
	_, err = k.Wake(ctx, b)
	note(err)
	note(m.Resume(ctx, b))
	rest(create(idler(record.IdleStop)))
	rest(create(idler(record.IdleKill)))
	return failed
}

// TestCalm: what is paused before its time is asleep, whatever its policy does, and its next use wakes it.
func TestCalm(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx, k := t.Context(), Keeper{m}
		for _, a := range []record.IdleAction{record.IdlePause, record.IdleStop, record.IdleHibernate} {
			r := mustCreate(t, m, idler(a))
			if err := k.Calm(ctx, r, "the disk is full", func() bool { return false }); err != nil {
				t.Fatal(err)
			}
			if got, _ := m.Get(ctx, r.ID); got.State != record.Running {
				t.Errorf("%s: one in use is %s", a, got.State)
			}
			if err := k.Calm(ctx, r, "the disk is full", yes); err != nil {
				t.Fatal(err)
			}
			if got, _ := m.Get(ctx, r.ID); got.State != record.Paused || !got.Asleep() ||
				got.Message != "the disk is full; the next use of it wakes it" {
				t.Errorf("%s: %+v", a, got)
			}
			if got, err := k.Wake(ctx, r.ID); err != nil || got.State != record.Running {
				t.Errorf("%s: %+v, %v", a, got, err)
			}
		}
	})
}
