package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// turn is one that comes when a test wants.
type turn struct {
	came chan struct{}
	done int
}

func (t *turn) Came() <-chan struct{} { return t.came }
func (t *turn) Done()                 { t.done++ }

// queued runs f with a Manager whose sandboxes wait for the turn.
func queued(t *testing.T, f func(t *testing.T, h *host, m *Manager, q *turn)) {
	t.Helper()
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		q := &turn{came: make(chan struct{})}
		m.life.cfg.Admit = func(context.Context, string) Turn { return q }
		f(t, h, m, q)
		synctest.Wait()
		if q.done != 1 {
			t.Errorf("the turn was given back %d times", q.done)
		}
	})
}

// TestWaiting lets a sandbox wait for longer than a creation may take, and be
// renewed, labelled and swept meanwhile like any other.
func TestWaiting(t *testing.T) {
	queued(t, func(t *testing.T, h *host, m *Manager, q *turn) {
		log := &lines{Handler: slog.DiscardHandler}
		m.life.cfg.Log = slog.New(log)
		s := spec()
		s.Timeout = time.Hour
		r, err := m.Create(t.Context(), s)
		if err != nil || r.State != record.Creating {
			t.Fatalf("%s, %v", r.State, err)
		}
		time.Sleep(m.life.cfg.StartLimit + 2*createSlack)
		if h.String() != r.ID+": creating " {
			t.Fatalf("it holds before its turn:\n%s", h)
		}
		for _, only := range [][]string{nil, {r.ID}} {
			if err := m.Recover(t.Context(), only...); err != nil {
				t.Fatal(err)
			}
		}
		later := now().Add(3 * time.Hour)
		if _, err := m.Renew(t.Context(), r.ID, later); err != nil {
			t.Fatal(err)
		}
		blue := "blue"
		if _, err := m.Relabel(t.Context(), r.ID, "", map[string]*string{"colour": &blue}); err != nil {
			t.Fatal(err)
		}
		wantCode(t, m.Pause(t.Context(), r.ID), errs.WrongState)
		close(q.came)
		r, err = m.Await(t.Context(), r.ID)
		if err != nil || r.State != record.Running || r.Spec.Labels["colour"] != "blue" || !r.Expires.Equal(later) {
			t.Fatalf("%+v, %v", r, err)
		}
		synctest.Wait()
		if got := m.Steps(r.ID); got[0].Name != stepQueue || got[0].Took < createSlack || len(got) != 12 {
			t.Errorf("steps %v", got)
		}
		if all := strings.Join(log.all, "\n"); !strings.Contains(all, "op=create") || !strings.Contains(all, " queued=2m30s ") {
			t.Errorf("the log does not say for how long it waited:\n%s", all)
		}
	})
}

func TestDeletedWhileWaiting(t *testing.T) {
	queued(t, func(t *testing.T, _ *host, m *Manager, q *turn) {
		r, err := m.Create(t.Context(), spec())
		if err != nil {
			t.Fatal(err)
		}
		waited := make(chan error, 1)
		go func() { _, err := m.Await(t.Context(), r.ID); waited <- err }()
		synctest.Wait()
		start := time.Now()
		if err := m.Delete(t.Context(), r.ID); err != nil || time.Since(start) > 0 {
			t.Fatalf("after %v: %v", time.Since(start), err)
		}
		wantCode(t, <-waited, errs.NotFound)
	})
}

func TestExpiredWhileWaiting(t *testing.T) {
	queued(t, func(t *testing.T, _ *host, m *Manager, q *turn) {
		s := spec()
		s.Timeout = time.Minute
		r, err := m.Create(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute + time.Second)
		if err := m.Expire(t.Context(), r.ID); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		_, err = m.Get(t.Context(), r.ID)
		wantCode(t, err, errs.NotFound)
	})
}

// TestTurnAndDeletion has both happen at the same moment, in whatever order.
func TestTurnAndDeletion(t *testing.T) {
	for i := range 50 {
		queued(t, func(t *testing.T, _ *host, m *Manager, q *turn) {
			r, err := m.Create(t.Context(), spec())
			if err != nil {
				t.Fatal(i, err)
			}
			go close(q.came)
			if err := m.Delete(t.Context(), r.ID); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			_, err = m.Get(t.Context(), r.ID)
			wantCode(t, err, errs.NotFound)
		})
	}
}

// TestClosedWhileWaiting has a daemon end at once although sandboxes wait; the
// next one says what became of them.
func TestClosedWhileWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		m.life.cfg.Admit = func(context.Context, string) Turn { return &turn{came: make(chan struct{})} }
		var ids []string
		for i := range 5 {
			s := spec()
			s.Name = fmt.Sprint("n", i)
			r, err := m.Create(t.Context(), s)
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, r.ID)
		}
		start := time.Now()
		if err := m.Close(t.Context()); err != nil || time.Since(start) > 0 {
			t.Fatalf("after %v: %v", time.Since(start), err)
		}
		m, d := h.boot(t)
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, id := range ids {
			if r, err := m.Get(t.Context(), id); err != nil || r.State != record.Ended || r.Reason != record.CreateFailed {
				t.Errorf("%+v, %v", r, err)
			}
		}
		if w := h.wrong(d); len(w) > 0 {
			t.Error(w)
		}
		stop(t, m)
	})
}
