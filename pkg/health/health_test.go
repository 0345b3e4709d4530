package health

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// manager is a fake sandbox.Keeper, and what happens in its sandboxes.
type manager struct {
	mu       sync.Mutex
	boxes    map[string]record.Record
	starts   []time.Duration // when sandboxes were restarted, since begin
	recycled []string
	said     []string
	stands   bool // all of them stand still
	refuse   int  // so many calls of Restart fail
	began    time.Time
	events   chan events.Event
	lives    map[string]life // by sandbox, of its present one

	tries int
	probe func(ctx context.Context, command string) (string, error)
}

// life is how the manager ends that of a sandbox.
type life struct {
	context.Context
	end context.CancelFunc
}

func newManager() *manager {
	return &manager{
		boxes: map[string]record.Record{}, began: time.Now(),
		events: make(chan events.Event, 100), lives: map[string]life{},
	}
}

// put changes a sandbox and says so.
func (m *manager) put(r record.Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.putLocked(r)
}

func (m *manager) putLocked(r record.Record) {
	r.Changed = time.Now()
	if r.State == record.Running && r.Started.IsZero() {
		r.Started = r.Changed
	}
	was, lived := m.lives[r.ID]
	if live := r.State != record.Ended && r.State != record.Starting; live && !lived {
		ctx, end := context.WithCancel(context.Background())
		m.lives[r.ID] = life{ctx, end}
	} else if !live && lived {
		was.end()
		delete(m.lives, r.ID)
	}
	m.boxes[r.ID] = r
	m.events <- events.Event{Type: string(r.State), ID: r.ID}
}

// end has a sandbox end.
func (m *manager) end(id string, why record.Reason, code int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.boxes[id]
	r.State, r.Reason, r.ExitCode = record.Ended, why, &code
	m.putLocked(r)
}

func (m *manager) remove(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if was, ok := m.lives[id]; ok {
		was.end()
	}
	delete(m.boxes, id)
	m.events <- events.Event{Type: events.Deleted, ID: id}
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

func (m *manager) List(context.Context) (all []*record.Record, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.boxes {
		all = append(all, &r)
	}
	return all, nil
}

func (m *manager) Subscribe(context.Context) <-chan events.Event { return m.events }

func (m *manager) Life(id string) context.Context {
	m.mu.Lock()
	defer m.mu.Unlock()
	if l, ok := m.lives[id]; ok {
		return l.Context
	}
	return context.Background()
}

// Restart does what sandbox.Keeper does to the record.
func (m *manager) Restart(_ context.Context, id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	r, ok := m.boxes[id]
	if !ok || !r.Restarting() {
		return nil
	}
	if m.refuse > 0 {
		m.refuse--
		return errors.New("the disk is full")
	}
	r.Again(false)
	m.starts = append(m.starts, time.Since(m.began))
	r.State, r.Reason, r.ExitCode = record.Running, "", nil
	m.putLocked(r)
	return nil
}

func (m *manager) Recycle(_ context.Context, was record.Record, why string) error {
	m.mu.Lock()
	m.recycled = append(m.recycled, was.ID+": "+why)
	m.mu.Unlock()
	m.end(was.ID, record.Unhealthy, 137)
	return nil
}

func (m *manager) StandsStill(string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stands
}

func (m *manager) Announce(r record.Record, health, _ string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.said = append(m.said, r.ID+" "+health)
}

func (m *manager) ProbePort(ctx context.Context, _ record.Record, _ uint16) error {
	_, err := m.ProbeCommand(ctx, record.Record{}, "port", 0)
	return err
}

func (m *manager) ProbeCommand(ctx context.Context, _ record.Record, command string, _ time.Duration) (string, error) {
	m.mu.Lock()
	m.tries++
	f := m.probe
	m.mu.Unlock()
	return f(ctx, command)
}

func (m *manager) tried() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.tries
}

func (m *manager) answer(output string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.probe = func(context.Context, string) (string, error) { return output, err }
}

func (m *manager) restarts() []time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.starts
}

func (m *manager) recycles() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.recycled
}

// box is a sandbox as it is now.
func (m *manager) box(id string) record.Record {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.boxes[id]
}

// watched runs f in a bubble, beside a Watcher.
func watched(t *testing.T, f func(*testing.T, *manager, *Watcher)) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		m := newManager()
		w := New(m, m, slog.New(slog.NewTextHandler(io.Discard, nil)))
		ended := make(chan error)
		go func() { ended <- w.Run(ctx) }()
		synctest.Wait()
		f(t, m, w)
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if len(w.wards) > 0 {
			t.Errorf("%d sandboxes are still looked after", len(w.wards))
		}
	})
}

func box(id string, policy record.RestartPolicy, times int) record.Record {
	return record.Record{ID: id, State: record.Running, Spec: record.Spec{Restart: record.Restart{Policy: policy, Max: times}}}
}

// TestBackOff: the waits double up to a minute, and begin anew after a life of
// ten seconds.
func TestBackOff(t *testing.T) {
	watched(t, func(t *testing.T, m *manager, _ *Watcher) {
		m.put(box("a", record.RestartAlways, 0))
		synctest.Wait()
		for i, want := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60, 60} {
			end := time.Now()
			m.end("a", record.Exited, 0)
			time.Sleep(want*time.Second - time.Millisecond)
			synctest.Wait()
			if len(m.restarts()) != i {
				t.Fatalf("restart %d came before %v had passed", i+1, want*time.Second)
			}
			time.Sleep(time.Millisecond)
			synctest.Wait()
			if len(m.restarts()) != i+1 {
				t.Fatalf("no restart %d after %v", i+1, time.Since(end))
			}
		}
		time.Sleep(10 * time.Second)
		m.end("a", record.OOM, 137)
		time.Sleep(time.Second)
		synctest.Wait()
		if r := m.box("a"); r.State != record.Running || r.Restarts != 10 || r.QuickRestarts != 1 {
			t.Errorf("%s after %d restarts, %d of them quick", r.State, r.Restarts, r.QuickRestarts)
		}
	})
}

// TestStartFailed: what does not come up is not soon tried again, since it may
// hang each time and keep those from their turn that would come up.
func TestStartFailed(t *testing.T) {
	watched(t, func(t *testing.T, m *manager, _ *Watcher) {
		m.put(box("a", record.RestartAlways, 0))
		m.end("a", record.StartFailed, 0)
		time.Sleep(record.RestartLast - time.Millisecond)
		synctest.Wait()
		if n := len(m.restarts()); n != 0 {
			t.Errorf("it was tried after %v", m.restarts()[0])
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if n := len(m.restarts()); n != 1 {
			t.Errorf("%d restarts after a minute", n)
		}
	})
}

// TestPolicies says which ends are the last.
func TestPolicies(t *testing.T) {
	for _, c := range []struct {
		policy record.RestartPolicy
		reason record.Reason
		code   int
		again  bool
	}{
		{record.RestartNo, record.Exited, 1, false},
		{record.RestartNo, record.HostReboot, 0, false},
		{record.RestartOnFailure, record.Exited, 0, false},
		{record.RestartOnFailure, record.Exited, 3, true},
		{record.RestartOnFailure, record.Killed, 137, true},
		{record.RestartOnFailure, record.OOM, 137, true},
		{record.RestartOnFailure, record.DiskFull, 1, true},
		{record.RestartOnFailure, record.RuntimeCrash, 0, true},
		{record.RestartOnFailure, record.HostReboot, 0, true},
		{record.RestartOnFailure, record.StartFailed, 0, true},
		{record.RestartOnFailure, record.Unhealthy, 0, true},
		{record.RestartOnFailure, record.Stopped, 143, false},
		{record.RestartOnFailure, record.CreateFailed, 0, false},
		{record.RestartAlways, record.Exited, 0, true},
		{record.RestartAlways, record.StartFailed, 0, true},
		{record.RestartAlways, record.Stopped, 0, false},
		{record.RestartAlways, record.Expired, 0, false},
		{record.RestartAlways, record.CreateFailed, 0, false},
		{record.RestartAlways, record.Timeout, 0, false},
	} {
		watched(t, func(t *testing.T, m *manager, _ *Watcher) {
			m.put(box("a", c.policy, 0))
			m.end("a", c.reason, c.code)
			time.Sleep(time.Hour)
			synctest.Wait()
			if again := len(m.restarts()) == 1; again != c.again {
				t.Errorf("%s, %s with code %d: restarted: %v", c.policy, c.reason, c.code, again)
			}
		})
	}
}

func TestOnFailureMax(t *testing.T) {
	watched(t, func(t *testing.T, m *manager, _ *Watcher) {
		m.put(box("a", record.RestartOnFailure, 2))
		for range 3 {
			time.Sleep(time.Minute)
			m.end("a", record.Exited, 3)
		}
		time.Sleep(time.Hour)
		r := m.box("a")
		if r.State != record.Ended || r.Reason != record.Exited || r.Restarts != 2 || !r.NextStart().IsZero() {
			t.Errorf("%+v", r)
		}
		r.Again(true) // somebody starts it: it may fail twice once more
		r.State = record.Running
		m.put(r)
		m.end("a", record.Exited, 3)
		time.Sleep(time.Hour)
		if r := m.box("a"); r.State != record.Running || r.Restarts != 1 {
			t.Errorf("%+v", r)
		}
	})
}

// TestCalledOff: what is deleted, stopped or started while it waits for its
// restart is not restarted.
func TestCalledOff(t *testing.T) {
	watched(t, func(t *testing.T, m *manager, w *Watcher) {
		for _, id := range []string{"deleted", "stopped", "started"} {
			m.put(box(id, record.RestartAlways, 0))
			m.end(id, record.Exited, 1)
		}
		synctest.Wait()
		m.remove("deleted")
		m.end("stopped", record.Stopped, 1)
		r := m.box("started")
		r.State, r.Started = record.Starting, time.Time{}
		m.put(r)
		time.Sleep(time.Hour)
		synctest.Wait()
		if len(m.restarts()) > 0 {
			t.Errorf("restarts after %v", m.restarts())
		}
		if len(w.wards) > 0 {
			t.Errorf("wards are left: %v", w.wards)
		}
	})
}

// TestRestartRefused: what goes wrong here is tried again, ever less often, and
// does not count. It is said once.
func TestRestartRefused(t *testing.T) {
	watched(t, func(t *testing.T, m *manager, w *Watcher) {
		var said bytes.Buffer
		w.log = slog.New(slog.NewTextHandler(&said, nil))
		m.refuse = 5
		m.put(box("a", record.RestartAlways, 0))
		m.end("a", record.Exited, 1)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		const want = (1 + 10 + 20 + 40 + 60 + 60) * time.Second
		if r := m.box("a"); r.State != record.Running || r.Restarts != 1 || m.restarts()[0] != want {
			t.Errorf("%+v, %v; want %v", r, m.restarts(), want)
		}
		if n := strings.Count(said.String(), "a restart is delayed"); n != 1 {
			t.Errorf("said %d times:\n%s", n, said.String())
		}
	})
}

// TestNewDaemon: what waits is found in the list, and a clock that was set back
// makes nobody wait for more than a minute.
func TestNewDaemon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newManager()
		a := box("a", record.RestartAlways, 0)
		a.State, a.Reason, a.Changed = record.Ended, record.HostReboot, time.Now().Add(-time.Hour)
		b := a
		b.ID, b.Changed = "b", time.Now().Add(time.Hour)
		m.boxes["a"], m.boxes["b"] = a, b
		ctx, cancel := context.WithCancel(t.Context())
		go New(m, m, slog.Default()).Run(ctx) //nolint:errcheck // it ends with ctx
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(m.restarts()) != 2 || m.restarts()[0] != 0 || m.restarts()[1] != time.Minute {
			t.Errorf("restarts after %v", m.restarts())
		}
		m.events <- events.Event{Type: events.Lost}
		cancel()
		synctest.Wait()
	})
}
