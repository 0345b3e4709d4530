package expiry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// manager is a fake sandbox.Manager.
type manager struct {
	mu     sync.Mutex
	boxes  map[string]record.Record
	gone   map[string]time.Time // when it was erased
	refuse int                  // so many calls of Expire fail
	events chan events.Event
}

func newManager() *manager {
	return &manager{
		boxes:  map[string]record.Record{},
		gone:   map[string]time.Time{},
		events: make(chan events.Event, 100),
	}
}

// put changes a sandbox and says so, unless quiet.
func (m *manager) put(id string, expires time.Time, kind string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boxes[id] = record.Record{ID: id, Expires: expires}
	if kind != "" {
		m.events <- events.Event{Type: kind, ID: id}
	}
}

func (m *manager) Get(_ context.Context, id string) (record.Record, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r, ok := m.boxes[id]
	if !ok {
		return r, errs.New(errs.NotFound, "no %s", id)
	}
	return r, nil
}

func (m *manager) List(context.Context) (l []*record.Record, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.boxes {
		l = append(l, &r)
	}
	return l, nil
}

func (m *manager) Deadline(r record.Record) time.Time { return r.Expires }

func (m *manager) Expire(_ context.Context, id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refuse > 0 {
		m.refuse--
		return errors.New("busy")
	}
	if r, ok := m.boxes[id]; ok && !time.Now().Before(r.Expires) {
		delete(m.boxes, id)
		m.gone[id] = time.Now()
	}
	return nil
}

func (m *manager) Subscribe(context.Context) <-chan events.Event { return m.events }

// after is when id was erased.
func (m *manager) after(id string, begin time.Time) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.gone[id].Sub(begin)
}

func (m *manager) left() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.boxes)
}

func (m *manager) erased() (ids []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id := range m.gone {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// fakeAlarm is an alarm in the time of a synctest bubble.
type fakeAlarm struct {
	t *time.Timer
	c chan struct{}
}

func newFakeAlarm() *fakeAlarm {
	a := &fakeAlarm{c: make(chan struct{}, 1)}
	a.t = time.AfterFunc(time.Hour, func() {
		select {
		case a.c <- struct{}{}:
		default:
		}
	})
	a.t.Stop()
	return a
}

func (a *fakeAlarm) set(t time.Time) error {
	a.t.Stop()
	if !t.IsZero() {
		a.t.Reset(time.Until(t))
	}
	return nil
}
func (a *fakeAlarm) C() <-chan struct{} { return a.c }
func (a *fakeAlarm) close()             { a.t.Stop() }

func bubble(t *testing.T, f func(t *testing.T, m *manager, start func())) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		m, done := newManager(), make(chan error, 1)
		f(t, m, func() {
			go func() { done <- run(ctx, m, newFakeAlarm(), slog.New(slog.DiscardHandler)) }()
			synctest.Wait()
		})
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("run: %v", err)
		}
	})
}

func TestInTime(t *testing.T) {
	bubble(t, func(t *testing.T, m *manager, start func()) {
		begin := time.Now()
		m.put("late", begin.Add(-time.Minute), "") // while no daemon ran
		for i := 1; i <= 5; i++ {
			m.put(fmt.Sprint(i), begin.Add(time.Duration(i)*time.Minute), "")
		}
		m.put("never", time.Time{}, "")
		start()
		if got := m.erased(); !slices.Equal(got, []string{"late"}) {
			t.Fatalf("at once: %v", got)
		}
		time.Sleep(10 * time.Minute)
		for i := 1; i <= 5; i++ {
			if at := m.after(fmt.Sprint(i), begin); at != time.Duration(i)*time.Minute {
				t.Errorf("%d was erased after %v", i, at)
			}
		}
		if n := m.left(); n != 1 {
			t.Errorf("%d are left", n)
		}
	})
}

func TestChanges(t *testing.T) {
	bubble(t, func(t *testing.T, m *manager, start func()) {
		begin := time.Now()
		m.put("a", begin.Add(time.Minute), "")
		start()
		m.put("a", begin.Add(3*time.Minute), events.Renewed)
		m.put("b", begin.Add(2*time.Minute), "creating") // sooner than what is waited for
		time.Sleep(time.Hour)
		if at := m.after("a", begin); at != 3*time.Minute {
			t.Errorf("a was erased after %v", at)
		}
		if at := m.after("b", begin); at != 2*time.Minute {
			t.Errorf("b was erased after %v", at)
		}
		// Events that were lost are made up for.
		m.put("c", time.Now().Add(time.Minute), "")
		m.events <- events.Event{Type: events.Lost}
		time.Sleep(time.Minute + time.Second)
		if got := m.erased(); !slices.Contains(got, "c") {
			t.Errorf("erased: %v", got)
		}
		// What is gone needs no timer.
		m.put("d", time.Now().Add(time.Minute), "creating")
		m.mu.Lock()
		delete(m.boxes, "d")
		m.mu.Unlock()
		m.events <- events.Event{Type: events.Deleted, ID: "d"}
		time.Sleep(time.Hour)
	})
}

func TestRetry(t *testing.T) {
	bubble(t, func(t *testing.T, m *manager, start func()) {
		begin := time.Now()
		m.refuse = 2
		m.put("a", begin.Add(time.Minute), "")
		start()
		time.Sleep(time.Hour)
		if at := m.after("a", begin); at != time.Minute+2*retry {
			t.Errorf("erased after %v", at)
		}
		// Renewed between the failure and the next try.
		begin = time.Now()
		m.mu.Lock()
		m.refuse = 1
		m.mu.Unlock()
		m.put("b", begin.Add(time.Minute), "creating")
		time.Sleep(time.Minute + time.Second)
		m.put("b", begin.Add(5*time.Minute), "")
		time.Sleep(time.Hour)
		if at := m.after("b", begin); at != 5*time.Minute {
			t.Errorf("renewed, and erased after %v", at)
		}
	})
}

// TestWallAlarm uses the kernel's timer. (A step of the clock cannot be
// tested on a host that others use; the kernel's part is ECANCELED.)
func TestWallAlarm(t *testing.T) {
	a, err := newWallAlarm()
	if err != nil {
		t.Fatal(err)
	}
	defer a.close()
	set := func(at time.Time) {
		t.Helper()
		if err := a.set(at); err != nil {
			t.Fatal(err)
		}
	}
	set(time.Now().Add(-time.Hour))
	<-a.C() // what has passed rings
	set(time.Unix(0, 0))
	<-a.C()
	set(time.Time{})
	select {
	case <-a.C():
		t.Fatal("an alarm for never")
	case <-time.After(20 * time.Millisecond):
	}
	at := time.Now().Add(30 * time.Millisecond).Round(0) // wall time, as the alarm's
	set(time.Now().Add(time.Hour))
	set(at)
	if <-a.C(); time.Now().Before(at) {
		t.Fatalf("alarm at %v, want %v", time.Now(), at)
	}
}

func TestQueue(t *testing.T) {
	q := newQueue()
	t0 := time.Unix(1000, 0)
	for i := range 100 {
		q.set(fmt.Sprintf("%02d", i), t0.Add(time.Duration(i*37%100)*time.Second))
	}
	q.set("00", time.Time{})
	q.set("none", time.Time{})
	q.set("99", t0.Add(-time.Second))
	if got := q.next(); !got.Equal(t0.Add(-time.Second)) {
		t.Fatalf("next %v", got)
	}
	ids := q.due(t0.Add(time.Hour))
	if len(ids) != 99 || ids[0] != "99" || len(q.byID) != 0 || !q.next().IsZero() {
		t.Fatalf("%d due, first %s, %d left", len(ids), ids[0], len(q.byID))
	}
}
