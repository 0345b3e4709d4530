package sandbox

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func TestPauseAndExpiry(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx := t.Context()
		s := spec()
		s.Timeout = time.Hour
		r := mustCreate(t, m, s)
		wantCode(t, m.Resume(ctx, r.ID), errs.WrongState)
		if err := m.Pause(ctx, r.ID); err != nil {
			t.Fatal(err)
		}
		wantCode(t, m.Pause(ctx, r.ID), errs.WrongState)
		_, err := m.Renew(ctx, r.ID, now())
		wantCode(t, err, errs.Invalid)
		if r, err = m.Renew(ctx, r.ID, now().Add(2*time.Hour)); err != nil || !m.Deadline(r).Equal(now().Add(2*time.Hour)) {
			t.Fatalf("%v, %v", r.Expires, err)
		}
		time.Sleep(time.Hour + time.Second)
		if err := m.Expire(ctx, r.ID); err != nil { // it was renewed
			t.Fatal(err)
		}
		if _, err := m.Get(ctx, r.ID); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if err := m.Expire(ctx, r.ID); err != nil { // runs while paused
			t.Fatal(err)
		}
		_, err = m.Get(ctx, r.ID)
		wantCode(t, err, errs.NotFound)
		if err := m.Expire(ctx, r.ID); err != nil {
			t.Fatal(err)
		}
		eternal := mustCreate(t, m, spec())
		_, err = m.Renew(ctx, eternal.ID, now().Add(time.Hour))
		wantCode(t, err, errs.WrongState)
	})
}

func TestFreezerRefuses(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, spec())
		h.fault = fault{call: "frozen.make " + r.ID + " #1", mode: errAfter}
		if err := m.Pause(t.Context(), r.ID); !errors.Is(err, errInjected) {
			t.Fatalf("got %v", err)
		}
		if r, _ := m.Get(t.Context(), r.ID); r.State != record.Running || h.has("frozen/"+r.ID) {
			t.Fatalf("state %s:\n%s", r.State, h)
		}
	})
}

func TestRelabel(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		s := spec()
		s.Labels = map[string]string{"team": "a", "env": "x"}
		r := mustCreate(t, m, s)
		b := "b"
		got, err := m.Relabel(t.Context(), r.ID, "", map[string]*string{"team": &b, "env": nil, "none": nil})
		if err != nil || !maps.Equal(got.Spec.Labels, map[string]string{"team": "b"}) {
			t.Fatalf("%v, %v", got.Spec.Labels, err)
		}
		if !maps.Equal(r.Spec.Labels, map[string]string{"team": "a", "env": "x"}) {
			t.Fatalf("an older record changed: %v", r.Spec.Labels)
		}
		news := m.Subscribe(t.Context())
		if got, err = m.Relabel(t.Context(), r.ID, "other", nil); err != nil || got.Spec.Name != "other" || got.Spec.Labels["team"] != "b" {
			t.Fatalf("%q, %v", got.Spec.Name, err)
		}
		if e := <-news; e.Type != events.Renamed || e.Name != "other" {
			t.Fatalf("%+v", e)
		}
		if got, err = m.Get(t.Context(), "other"); err != nil || got.ID != r.ID {
			t.Fatalf("%+v, %v", got, err)
		}
		for _, name := range []string{"-x", "a b", r.ID} {
			_, err := m.Relabel(t.Context(), r.ID, name, nil)
			wantCode(t, err, errs.Invalid)
		}
	})
}

func TestClose(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		open := h.gate("agent.Ready " + first)
		r, err := m.Create(t.Context(), spec())
		if err != nil {
			t.Fatal(err)
		}
		closed := make(chan error)
		go func() { closed <- m.Close(t.Context()) }()
		synctest.Wait()
		_, err = m.Create(t.Context(), spec())
		wantCode(t, err, errs.Unavailable)
		open()
		if err := <-closed; err != nil {
			t.Fatal(err)
		}
		if got, _ := h.record(r.ID); got.State != record.Running {
			t.Fatalf("what was in flight is %s", got.State)
		}
	})
}

// TestQuiet: a daemon that is to end waits for what goes on, and refuses nothing meanwhile.
func TestQuiet(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		Quiet(t.Context(), m) // nothing goes on
		open := h.gate("agent.Ready " + first)
		r, err := m.Create(t.Context(), spec())
		if err != nil {
			t.Fatal(err)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		Quiet(ended, m)
		quiet := make(chan struct{})
		go func() { Quiet(t.Context(), m); close(quiet) }()
		synctest.Wait()
		select {
		case <-quiet:
			t.Fatal("a creation goes on")
		default:
		}
		if !m.tracker.begin() {
			t.Fatal("no other operation may begin")
		}
		m.tracker.end()
		open()
		<-quiet
		if got, _ := h.record(r.ID); got.State != record.Running {
			t.Fatalf("what was in flight is %s", got.State)
		}
	})
}

// TestRecoverWhileBusy runs the sweep against a daemon at work. It must never
// take a young sandbox for a stray.
func TestRecoverWhileBusy(t *testing.T) {
	h := newHost()
	m, d := h.boot(t)
	m.newID = func() string { return record.NewID(m.life.cfg.Instance) }
	ctx := t.Context()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 20 {
				r, err := m.Create(ctx, spec())
				if err != nil {
					t.Error(err)
					return
				}
				if rand.IntN(2) == 0 {
					if _, err := m.Await(ctx, r.ID); err != nil {
						t.Error(err)
					}
				}
				if i%4 > 0 {
					if err := m.Delete(ctx, r.ID); err != nil {
						t.Error(err)
					}
				} else if r, err := m.Await(ctx, r.ID); err != nil || r.State != record.Running {
					t.Errorf("%s is %s: %s, %v", r.ID, r.State, r.Message, err)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for n := 0; ; n++ {
		select {
		case <-done:
			stop(t, m)
			if w := h.wrong(d); len(w) > 0 {
				t.Fatalf("host and store do not agree:\n%s", strings.Join(w, "\n"))
			}
			if len(h.strays) > 0 {
				t.Fatalf("disks in lost+found: %v", h.strays)
			}
			t.Logf("%d sweeps over %d sandboxes", n, len(h.records))
			return
		default:
			if err := m.Recover(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// BenchmarkLife is what the Manager adds to a create and a delete whose steps
// cost nothing.
func BenchmarkLife(b *testing.B) {
	h := newHost()
	m, _ := h.boot(b)
	m.newID = func() string { return record.NewID(m.life.cfg.Instance) }
	for b.Loop() {
		r, err := m.Create(b.Context(), spec())
		if err == nil {
			_, err = m.Await(b.Context(), r.ID)
		}
		if err == nil {
			err = m.Delete(b.Context(), r.ID)
		}
		if err != nil {
			b.Fatal(err)
		}
		h.mu.Lock()
		h.calls = nil
		h.mu.Unlock()
	}
	stop(b, m)
}

// TestEndSaysWhy: when streams end, the record says why they did.
func TestEndSaysWhy(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, spec())
		done := m.Life(r.ID).Done()
		write, tear := h.gate("store.Put stopping "+r.ID), h.gate("network.unmake "+r.ID)
		h.exit(r.ID, Obituary{ExitCode: 3})
		synctest.Wait()
		select {
		case <-done:
			t.Error("its life ends before the record says why")
		default:
		}
		write()
		<-done
		if r, err := m.Get(t.Context(), r.ID); err != nil || r.State != record.Stopping || r.Reason != record.Exited {
			t.Errorf("%+v, %v", r, err)
		}
		tear()
	})
}

func TestStopAndStart(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx := t.Context()
		a := mustCreate(t, m, record.Spec{
			Runtime: "runc", Name: "lab", Entrypoint: []string{"polite"},
			Limits: record.Limits{CPUMillis: 100},
		})
		begin := time.Now()
		if err := m.Stop(ctx, "lab", time.Minute); err != nil {
			t.Fatal(err)
		}
		r, err := m.Get(ctx, a.ID)
		if err != nil || r.State != record.Ended || r.Reason != record.Stopped || !r.OK() || r.LastOutput != "bye" || *r.ExitCode != 143 ||
			time.Since(begin) > 0 {
			t.Fatalf("%+v, %v after %v", r, err, time.Since(begin))
		}
		if d := m.Deadline(r); !d.IsZero() {
			t.Errorf("what was stopped is kept until %v", d)
		}
		wantCode(t, m.Stop(ctx, "lab", 0), errs.WrongState)
		if r, err = m.Start(ctx, "lab"); err != nil || r.State != record.Starting {
			t.Fatalf("%s, %v", r.State, err)
		}
		if r, err = m.Await(ctx, "lab"); err != nil || r.State != record.Running || r.Reason != "" || r.ExitCode != nil ||
			r.LastOutput != "" || r.Slot != a.Slot {
			t.Fatalf("%+v, %v", r, err)
		}
		_, err = m.Start(ctx, "lab")
		wantCode(t, err, errs.WrongState)

		// One that does not listen is killed after its time, a paused one at once.
		b := mustCreate(t, m, record.Spec{Runtime: "runc", Entrypoint: []string{"deaf"}})
		begin = time.Now()
		if err := m.Stop(ctx, b.ID, 7*time.Second); err != nil || time.Since(begin) != 7*time.Second {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		if err := m.Pause(ctx, a.ID); err != nil {
			t.Fatal(err)
		}
		begin = time.Now()
		if err := m.Stop(ctx, a.ID, time.Minute); err != nil || time.Since(begin) > 0 {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		// A delete does not wait for a grace.
		c := mustCreate(t, m, record.Spec{Runtime: "runc", Entrypoint: []string{"deaf"}})
		go m.Stop(ctx, c.ID, time.Hour) //nolint:errcheck // it may be told that it was deleted
		synctest.Wait()
		begin = time.Now()
		if err := m.Delete(ctx, c.ID); err != nil || time.Since(begin) > 0 {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		// Nor for an agent that does not answer.
		d := mustCreate(t, m, record.Spec{Runtime: "runc", Entrypoint: []string{"polite"}})
		h.gate("agent.Terminate " + d.ID)
		go m.Stop(ctx, d.ID, time.Hour) //nolint:errcheck // as above
		synctest.Wait()
		begin = time.Now()
		if err := m.Delete(ctx, d.ID); err != nil || time.Since(begin) > 0 {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
	})
}

func TestStartRefusedAndFailed(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx := t.Context()
		h.fault = fault{call: "disk.make " + first + " #1", mode: errBefore}
		if _, err := m.Create(ctx, spec()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		_, err := m.Start(ctx, first)
		wantCode(t, err, errs.WrongState) // it never was
		_, err = m.Start(ctx, "nobody")
		wantCode(t, err, errs.NotFound)

		b := mustCreate(t, m, spec())
		h.exit(b.ID, Obituary{ExitCode: 3, LastOutput: "x"})
		synctest.Wait()
		h.fault = fault{call: "rootfs.make " + b.ID + " #2", mode: errAfter}
		h.calls = []string{"rootfs.make " + b.ID}
		if _, err := m.Start(ctx, b.ID); err != nil {
			t.Fatal(err)
		}
		r, err := m.Await(ctx, b.ID)
		if err != nil || r.State != record.Ended || r.Reason != record.StartFailed ||
			!strings.Contains(r.Message, "could not be started: step rootfs") || !h.has("disk/"+b.ID) {
			t.Fatalf("%+v, %v", r, err)
		}
		// Not the end of it.
		open := h.gate("agent.Ready " + b.ID)
		if _, err := m.Start(ctx, b.ID); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		wantCode(t, m.Stop(ctx, b.ID, 0), errs.WrongState) // at once
		open()
		if r, err = m.Await(ctx, b.ID); err != nil || r.State != record.Running {
			t.Errorf("%+v, %v", r, err)
		}
	})
}
