package idle

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/internal/keylock"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// manager is a fake sandbox.Keeper.
type manager struct {
	locks  keylock.Set
	events chan events.Event
	frozen atomic.Bool

	mu     sync.Mutex
	boxes  map[string]record.Record
	lives  map[string]context.CancelFunc
	ctx    map[string]context.Context
	load   float64 // CPUs that each sandbox uses
	since  time.Time
	before time.Duration // CPU time before since
	looks  int
	refuse int // so many calls of Rest fail
	rested []time.Time
	woken  int
	slow   chan struct{} // a pause waits for it; may be nil
}

func newManager() *manager {
	return &manager{
		events: make(chan events.Event, 100), since: time.Now(), boxes: map[string]record.Record{},
		lives: map[string]context.CancelFunc{}, ctx: map[string]context.Context{},
	}
}

const after = 10 * time.Minute

// put makes a sandbox that runs, with a policy.
func (m *manager) put(id string, action record.IdleAction) record.Record {
	r := record.Record{ID: id, State: record.Running, Started: time.Now()}
	r.Spec.Idle = record.Idle{After: after, Action: action}
	m.mu.Lock()
	m.ctx[id], m.lives[id] = context.WithCancel(context.Background())
	m.mu.Unlock()
	m.set(r)
	return r
}

func (m *manager) set(r record.Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boxes[r.ID] = r
	m.frozen.Store(r.State == record.Paused)
	m.events <- events.Event{Type: string(r.State), ID: r.ID}
}

// use sets how many CPUs sandboxes use from now on.
func (m *manager) use(cpus float64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.before += time.Duration(m.load * float64(time.Since(m.since)))
	m.load, m.since = cpus, time.Now()
}

func (m *manager) CPU(string) (time.Duration, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.looks++
	return m.before + time.Duration(m.load*float64(time.Since(m.since))), nil
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

func (m *manager) Subscribe(context.Context) <-chan events.Event { return m.events }

func (m *manager) Life(id string) context.Context {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.ctx[id]
}

func (m *manager) Rest(ctx context.Context, was record.Record, still func() bool) error {
	unlock, ok := m.locks.TryLock(was.ID)
	if !ok {
		return nil
	}
	defer unlock()
	m.mu.Lock()
	if m.refuse > 0 {
		m.refuse--
		m.mu.Unlock()
		return errors.New("refused")
	}
	m.mu.Unlock()
	r, err := m.Get(ctx, was.ID)
	if err != nil || r.State != record.Running || !still() {
		return err
	}
	m.mu.Lock()
	slow := m.slow
	m.rested = append(m.rested, time.Now())
	m.mu.Unlock()
	if slow != nil {
		<-slow
	}
	r.State, r.Reason = record.Paused, record.ReasonIdle
	if r.Spec.Idle.Action == record.IdleHibernate {
		m.mu.Lock()
		m.lives[r.ID]()
		m.mu.Unlock()
		time.Sleep(time.Millisecond) // what else it takes to hibernate: meanwhile all hear that its life is over
		r.State = record.Hibernated
	}
	if r.Spec.Idle.Action == record.IdleStop {
		m.mu.Lock()
		m.lives[r.ID]()
		m.mu.Unlock()
		r.State, r.Reason = record.Ended, record.Stopped
	}
	m.set(r)
	return nil
}

func (m *manager) Calm(ctx context.Context, was record.Record, why string, still func() bool) error {
	unlock, ok := m.locks.TryLock(was.ID)
	if !ok {
		return nil
	}
	defer unlock()
	r, err := m.Get(ctx, was.ID)
	if err != nil || r.State != record.Running || !still() {
		return err
	}
	r.State, r.Reason, r.Message = record.Paused, record.ReasonIdle, why
	m.set(r)
	return nil
}

func (m *manager) Wake(ctx context.Context, id string) (record.Record, error) {
	unlock, err := m.locks.Lock(ctx, id)
	if err != nil {
		return record.Record{}, err
	}
	defer unlock()
	r, err := m.Get(ctx, id)
	if err == nil && r.Asleep() {
		m.mu.Lock()
		m.woken++
		if r.State == record.Hibernated {
			m.ctx[id], m.lives[id] = context.WithCancel(context.Background())
			r.Started = time.Now()
		}
		m.mu.Unlock()
		r.State, r.Reason = record.Running, ""
		m.set(r)
	}
	return r, err
}

// times are when Rest did something, since a moment.
func (m *manager) times(begin time.Time) (all []time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, t := range m.rested {
		all = append(all, t.Sub(begin))
	}
	return all
}

func bubble(t *testing.T, f func(t *testing.T, m *manager, w *Watcher)) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		m, done := newManager(), make(chan error, 1)
		w := New(m, slog.New(slog.DiscardHandler))
		go func() { done <- w.Run(ctx) }()
		f(t, m, w)
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("run: %v", err)
		}
		for _, end := range m.lives {
			end()
		}
		synctest.Wait()
		w.wards.Range(func(k, _ any) bool { t.Errorf("%v ended, and is still watched", k); return true })
	})
}

func (w *Watcher) mustUse(t *testing.T, r *record.Record) (leave func()) {
	t.Helper()
	leave, err := w.Use(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return leave
}

func want(t *testing.T, got []time.Duration, all ...time.Duration) {
	t.Helper()
	if len(got) != len(all) {
		t.Fatalf("at rest after %v, want %v", got, all)
	}
	for i := range got {
		if got[i] != all[i] {
			t.Fatalf("at rest after %v, want %v", got, all)
		}
	}
}

// TestDue: a sandbox rests when its time has passed since its last use, whatever other sandboxes do.
func TestDue(t *testing.T) {
	bubble(t, func(t *testing.T, m *manager, w *Watcher) {
		begin := time.Now()
		r := m.put("a", record.IdlePause)
		time.Sleep(9 * time.Minute)
		leave := w.mustUse(t, &r)
		time.Sleep(30 * time.Second)
		leave()
		time.Sleep(9 * time.Minute)
		leave = w.mustUse(t, &r) // as long as it is open
		w.mustUse(t, &r)()
		time.Sleep(5 * time.Hour)
		want(t, m.times(begin))
		leave()
		ended := time.Since(begin)
		time.Sleep(after - time.Second)
		want(t, m.times(begin))
		time.Sleep(time.Hour)
		want(t, m.times(begin), ended+after)
		if m.looks > 50 { // five hours have thirty times ten minutes
			t.Errorf("%d looks", m.looks)
		}
	})
}

// TestUnused: what is never used rests too, also if no event of it has been seen, and a sandbox
// without a policy does not.
func TestUnused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newManager()
		m.put("a", record.IdleStop)
		none := m.put("b", "")
		none.Spec.Idle = record.Idle{}
		m.set(none)
		for len(m.events) > 0 {
			<-m.events
		}
		time.Sleep(time.Hour) // no daemon
		ctx, cancel := context.WithCancel(t.Context())
		w, begin := New(m, slog.New(slog.DiscardHandler)), time.Now()
		go w.Run(ctx) //nolint:errcheck // it ends with ctx
		time.Sleep(time.Hour)
		want(t, m.times(begin), after) // its time began anew
		lost := record.Record{ID: "c", State: record.Running, Started: time.Now(), Spec: record.Spec{Idle: record.Idle{After: after}}}
		m.mu.Lock()
		m.boxes["c"] = lost
		m.ctx["c"], m.lives["c"] = context.WithCancel(context.Background())
		m.mu.Unlock()
		m.events <- events.Event{Type: events.Lost}
		begin = time.Now()
		time.Sleep(after + time.Second)
		if got := m.times(begin); len(got) != 2 || got[1] != after {
			t.Errorf("%v", got)
		}
		cancel()
		for _, end := range m.lives {
			end()
		}
	})
}

// TestBusy: CPU time above the floor keeps a sandbox awake, less does not, and what it used before
// its last look does not either. On gVisor, where waiting costs more, the floor is higher.
func TestBusy(t *testing.T) {
	for under, floor := range map[string]float64{"runc": 0.01, "runsc": 0.03} {
		bubble(t, func(t *testing.T, m *manager, w *Watcher) {
			m.use(0.9)
			time.Sleep(time.Hour)
			begin := time.Now()
			r := m.put("a", record.IdlePause)
			r.Spec.Runtime = under
			m.set(r)
			time.Sleep(5 * time.Hour)
			m.use(1.1 * floor) // a job in the background
			time.Sleep(time.Hour)
			want(t, m.times(begin))
			m.use(0.9 * floor)
			time.Sleep(2 * after)
			if got := m.times(begin); len(got) != 1 || got[0] > 6*time.Hour+2*after {
				t.Errorf("%s: at rest after %v", under, got)
			}
		})
	}
}

// TestWakes: a use wakes it once, however many there are, and then its time begins anew.
func TestWakes(t *testing.T) {
	bubble(t, func(t *testing.T, m *manager, w *Watcher) {
		begin := time.Now()
		r := m.put("a", record.IdlePause)
		time.Sleep(after + time.Minute)
		old := r // read before it slept
		r, _ = m.Get(t.Context(), "a")
		if !r.Asleep() {
			t.Fatalf("%+v", r)
		}
		for i := range 100 {
			rec := r
			if i%2 == 0 {
				rec = old
			}
			go func() {
				leave, err := w.Use(t.Context(), &rec)
				if err != nil || rec.State != record.Running {
					t.Errorf("it is %s: %v", rec.State, err)
				}
				leave()
			}()
		}
		synctest.Wait()
		if m.woken != 1 {
			t.Errorf("woken %d times", m.woken)
		}
		time.Sleep(time.Hour)
		want(t, m.times(begin), after, 2*after+time.Minute)
	})
}

// TestOthersPause: what a client paused stays so, and has no timer.
func TestOthersPause(t *testing.T) {
	bubble(t, func(t *testing.T, m *manager, w *Watcher) {
		begin := time.Now()
		r := m.put("a", record.IdlePause)
		synctest.Wait()
		r.State = record.Paused
		m.set(r)
		time.Sleep(time.Hour)
		w.mustUse(t, &r)()
		if m.woken > 0 || r.State != record.Paused {
			t.Errorf("woken %d times, it is %s", m.woken, r.State)
		}
		r.State = record.Running
		m.set(r)
		time.Sleep(time.Hour)
		want(t, m.times(begin), time.Hour+after)
	})
}

// TestUseMeetsRest: a use that comes while the pause goes on waits for it, and wakes the sandbox; it
// gives up when the pause takes too long. A use before the pause has begun stops it.
func TestUseMeetsRest(t *testing.T) {
	bubble(t, func(t *testing.T, m *manager, w *Watcher) {
		begin := time.Now()
		r := m.put("a", record.IdlePause)
		m.mu.Lock()
		m.slow = make(chan struct{})
		m.mu.Unlock()
		time.Sleep(after)
		synctest.Wait() // the pause has begun, and the record does not say so yet
		late := r
		if _, err := w.Use(t.Context(), &late); !errs.Is(err, errs.Unavailable) || time.Since(begin) != after+wakeLimit {
			t.Errorf("after %v: %v", time.Since(begin), err)
		}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := w.Use(gone, &late); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		used := make(chan record.Record)
		go func() {
			rec := r
			leave := w.mustUse(t, &rec)
			defer leave()
			used <- rec
		}()
		synctest.Wait()
		close(m.slow)
		if rec := <-used; rec.State != record.Running || m.woken != 1 {
			t.Errorf("it is %s, woken %d times", rec.State, m.woken)
		}
		// An operation holds it when it is due, and a use begins before that ends.
		unlock, _ := m.locks.TryLock("a")
		time.Sleep(after + time.Second)
		leave := w.mustUse(t, &r)
		unlock()
		time.Sleep(time.Hour)
		if got := m.times(begin); len(got) != 1 {
			t.Errorf("at rest after %v", got)
		}
		leave()
	})
}

// TestOtherLife: what watched the life that ended by a hibernation does nothing to the next one, whose
// uses it does not know.
func TestOtherLife(t *testing.T) {
	bubble(t, func(t *testing.T, m *manager, w *Watcher) {
		begin := time.Now()
		r := m.put("a", record.IdleHibernate)
		time.Sleep(after + time.Second)
		want(t, m.times(begin), after)
		r, _ = m.Get(t.Context(), r.ID)
		leave := w.mustUse(t, &r)
		time.Sleep(time.Hour)
		leave()
		want(t, m.times(begin), after)
		time.Sleep(after + time.Second)
		want(t, m.times(begin), after, 2*after+time.Hour+time.Second)
	})
}

// TestRetry: a policy that could not be applied is tried again.
func TestRetry(t *testing.T) {
	bubble(t, func(t *testing.T, m *manager, w *Watcher) {
		begin := time.Now()
		m.refuse = 2
		m.put("a", record.IdlePause)
		time.Sleep(time.Hour)
		want(t, m.times(begin), after+2*retry)
	})
}

// slept reports whether a use has woken one.
func (m *manager) slept() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.woken > 0
}

// TestRace: while a use goes on, its sandbox does not stand still, whenever the policy is applied.
func TestRace(t *testing.T) {
	m := newManager()
	m.events = make(chan events.Event, 1<<20)
	r := m.put("a", record.IdlePause)
	r.Spec.Idle.After = 1 // idle as soon as there is no use
	m.set(r)
	w := New(m, slog.New(slog.DiscardHandler))
	d := w.ward(&r)
	d.mu.Lock()
	d.timer.Stop()
	d.timer = time.NewTimer(time.Hour) // it rings here, and not each nanosecond, which would leave a single CPU to nobody else
	d.mu.Unlock()
	var users, ringer sync.WaitGroup
	done := make(chan struct{})
	ringer.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				d.ring()
				runtime.Gosched()
			}
		}
	})
	for range 4 {
		users.Go(func() {
			for i := 0; i < 2000 || !m.slept() && !t.Failed(); i++ {
				rec, _ := m.Get(t.Context(), "a")
				leave, err := w.Use(t.Context(), &rec)
				if err != nil || rec.State != record.Running || m.frozen.Load() {
					t.Errorf("in use it is %s, frozen: %v; %v", rec.State, m.frozen.Load(), err)
				}
				runtime.Gosched()
				if m.frozen.Load() {
					t.Error("it was frozen while in use")
				}
				leave()
				for range 1 + rand.N(8) { // else the users may take turns so that one always uses it
					runtime.Gosched()
				}
			}
		})
	}
	users.Wait()
	close(done)
	ringer.Wait()
	w.cancel()
	m.lives["a"]()
}

func BenchmarkUse(b *testing.B) {
	m := newManager()
	r := m.put("a", record.IdlePause)
	w := New(m, slog.New(slog.DiscardHandler))
	b.ReportAllocs()
	for b.Loop() {
		leave, _ := w.Use(b.Context(), &r)
		leave()
	}
}
