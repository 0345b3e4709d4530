package sandbox

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func raise(l *record.Terms) error {
	l.MemoryBytes, l.CPUMillis, l.DiskBytes = 128<<20, 500, 128<<20
	return nil
}

func TestUpdate(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, spec())
		news := m.Subscribe(t.Context())
		got, err := m.Update(t.Context(), r.ID, raise)
		if err != nil || got.Spec.MemoryBytes != 128<<20 || got.Updated.IsZero() {
			t.Fatalf("%+v, %v", got, err)
		}
		if l := h.limits[r.ID]; l.MemoryBytes != 128<<20 || l.Pids != 16+record.AgentTasks || h.cpu[r.ID] != 500 ||
			h.diskLimit[r.ID] != 128<<20 {
			t.Errorf("the host has %+v, cpu %d, disk %d", l, h.cpu[r.ID], h.diskLimit[r.ID])
		}
		synctest.Wait()
		if e := <-news; e.Type != events.Updated || e.ID != r.ID {
			t.Errorf("event %+v", e)
		}
		calls := len(h.calls)
		if _, err := m.Update(t.Context(), r.ID, raise); err != nil {
			t.Errorf("to what is: %v", err)
		}
		for _, c := range h.calls[calls:] {
			if strings.HasPrefix(c, "store.Put") || strings.HasPrefix(c, "cgroup.Limit") {
				t.Errorf("to what is: %s", c)
			}
		}
	})
}

// TestUpdateRefused: nothing changes, on the host or in the store.
func TestUpdateRefused(t *testing.T) {
	for name, c := range map[string]struct {
		runtime string
		prepare func(h *host, m *Manager, id string)
		change  func(*record.Terms) error
		code    errs.Code
		says    string
	}{
		"memory in use": {
			"runc", func(h *host, _ *Manager, id string) { h.held[id] = 60 << 20 },
			func(l *record.Terms) error { l.MemoryBytes = 32 << 20; return nil }, errs.WrongState, "uses 60 MiB",
		},
		"disk in use": {
			"runc", func(h *host, _ *Manager, id string) { h.diskUsed[id] = 40 << 20 },
			func(l *record.Terms) error { l.DiskBytes = 32 << 20; return nil }, errs.WrongState, "holds 40 MiB",
		},
		"pids, gVisor": {
			"runsc", func(*host, *Manager, string) {}, func(l *record.Terms) error { l.Pids = 99; return nil },
			errs.Unsupported, "create another",
		},
		"no change": {
			"runc", func(*host, *Manager, string) {}, func(*record.Terms) error { return errs.New(errs.Invalid, "no") },
			errs.Invalid, "no",
		},
		"ended": {"runc", func(h *host, _ *Manager, id string) {
			h.exit(id, Obituary{})
			synctest.Wait()
		}, raise, errs.WrongState, "not running"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *host, m *Manager) {
				s := spec()
				s.Runtime = c.runtime
				r := mustCreate(t, m, s)
				c.prepare(h, m, r.ID)
				before := h.limits[r.ID]
				if _, err := m.Update(t.Context(), r.ID, c.change); !errs.Is(err, c.code) || !strings.Contains(err.Error(), c.says) {
					t.Errorf("%v", err)
				}
				now, _ := h.record(r.ID)
				if now.Spec.Limits != r.Spec.Limits || h.limits[r.ID] != before {
					t.Errorf("record %+v, host %+v", now.Spec.Limits, h.limits[r.ID])
				}
				h.exit(r.ID, Obituary{})
				synctest.Wait()
			})
		})
	}
}

// TestUpdateHoldsLater: limits of which a daemon died before they held, and that
// are too small by now, hold as soon as they fit, and the others at once.
func TestUpdateHoldsLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		s := spec()
		s.MemoryBytes, s.DiskBytes = 256<<20, 256<<20
		r := mustCreate(t, m, s)
		h.fault = fault{call: "cgroup.Limit " + r.ID + " #1", mode: crashBefore}
		m.Update(t.Context(), r.ID, func(l *record.Terms) error { //nolint:errcheck // nobody hears of it
			l.Limits = record.Limits{MemoryBytes: 64 << 20, DiskBytes: 64 << 20, CPUMillis: 250, Pids: 8}
			return nil
		})
		stop(t, m)
		h.held[r.ID], h.diskUsed[r.ID] = 100<<20, 100<<20
		m, _ = h.boot(t)
		defer func() { stop(t, m) }()
		for _, want := range []struct{ memory, disk int64 }{{256 << 20, 256 << 20}, {64 << 20, 256 << 20}, {64 << 20, 64 << 20}} {
			err := m.Recover(t.Context())
			if fits := want.memory+want.disk == 128<<20; (err == nil) != fits {
				t.Errorf("%v", err)
			}
			if l := h.limits[r.ID]; l.MemoryBytes != want.memory || l.Pids != 8+record.AgentTasks || h.cpu[r.ID] != 250 ||
				h.diskLimit[r.ID] != want.disk {
				t.Errorf("the host has %+v, cpu %d, disk %d; want %+v", l, h.cpu[r.ID], h.diskLimit[r.ID], want)
			}
			if want.memory == 256<<20 {
				h.held[r.ID] = 0
			} else {
				h.diskUsed[r.ID] = 0
			}
		}
	})
}

// TestKeepLimits: a sweep writes limits that are new to it, and all limits once in
// limitTurns sweeps, so that what another program changed is undone.
func TestKeepLimits(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, spec())
		wrote := func(sweeps int) (n int) {
			t.Helper()
			calls := len(h.calls)
			for range sweeps {
				if err := m.Recover(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			for _, c := range h.calls[calls:] {
				if strings.HasPrefix(c, "cgroup.Limit "+r.ID) {
					n++
				}
			}
			return n
		}
		if n := wrote(1); n != 1 {
			t.Errorf("the first sweep after the creation wrote limits %d times, want once", n)
		}
		h.limits[r.ID] = CgroupLimits{} // another program
		if n := wrote(limitTurns); n != 1 {
			t.Errorf("%d sweeps wrote limits %d times, want once", limitTurns, n)
		}
		if h.limits[r.ID].MemoryBytes != r.Spec.MemoryBytes {
			t.Errorf("the host has %+v after %d sweeps", h.limits[r.ID], limitTurns)
		}
		if _, err := m.Update(t.Context(), r.ID, raise); err != nil {
			t.Fatal(err)
		}
		if n := wrote(1); n != 1 {
			t.Errorf("the first sweep after an update wrote limits %d times, want once", n)
		}
	})
}

// TestUpdateFails: what the host refuses, the record does not keep.
func TestUpdateFails(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, spec())
		h.fault = fault{call: "cgroup.Limit " + r.ID + " #1", mode: errAfter}
		if _, err := m.Update(t.Context(), r.ID, raise); !errors.Is(err, errInjected) {
			t.Fatalf("%v", err)
		}
		now, _ := h.record(r.ID)
		if now.Spec.Limits != r.Spec.Limits || h.limits[r.ID].MemoryBytes != 64<<20 {
			t.Errorf("record %+v, host %+v", now.Spec.Limits, h.limits[r.ID])
		}
	})
}

// TestExpiredIsTold: events of a sandbox whose time is up say so, those of one
// that was kept for long enough keep its reason.
func TestExpiredIsTold(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		s := spec()
		s.Timeout = time.Second
		r := mustCreate(t, m, s)
		news := m.Subscribe(t.Context())
		time.Sleep(time.Second)
		if err := m.Expire(t.Context(), r.ID); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"deleting", events.Deleted} {
			if e := <-news; e.Type != want || e.Reason != string(record.Expired) {
				t.Errorf("event %+v, want %s for expired", e, want)
			}
		}
	})
}

// TestUpdateNetwork: what a sandbox may reach is another thing at once, and still
// after the daemon.
func TestUpdateNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, d := h.boot(t)
		r := mustCreate(t, m, spec())
		open := func(c *record.Terms) error {
			c.Network, c.NetworkPolicy = record.Network{Mode: record.NetworkOpen}, []byte(`{"defaultAction":"allow"}`)
			return nil
		}
		news := m.Subscribe(t.Context())
		got, err := m.Update(t.Context(), r.ID, open)
		if err != nil || got.Spec.Network.Mode != record.NetworkOpen || !got.Updated.IsZero() {
			t.Fatalf("%+v, %v", got, err)
		}
		if d.registered[r.ID].Mode != record.NetworkOpen {
			t.Errorf("the egress knows %+v", d.registered[r.ID])
		}
		if e := <-news; e.Type != events.Updated {
			t.Errorf("event %+v", e)
		}
		before := len(h.calls)
		if _, err := m.Update(t.Context(), r.ID, open); err != nil ||
			slices.ContainsFunc(h.calls[before:], func(c string) bool {
				return strings.HasPrefix(c, "egress") ||
					strings.HasPrefix(c, "store.Put")
			}) {
			t.Errorf("to what is: %v, %v", err, h.calls[before:])
		}
		if err := m.Pause(t.Context(), r.ID); err != nil {
			t.Fatal(err)
		}
		h.fault = fault{call: "egress.make " + r.ID + " #3", mode: errAfter} // after its creation and the first change
		none := func(c *record.Terms) error { c.Network.Mode = record.NetworkNone; return nil }
		if _, err := m.Update(t.Context(), r.ID, none); !errors.Is(err, errInjected) {
			t.Errorf("the egress refused, and Update says %v", err)
		}
		if now, _ := h.record(r.ID); now.Spec.Network.Mode != record.NetworkOpen || d.registered[r.ID].Mode != record.NetworkOpen {
			t.Errorf("after that the record says %s, the egress %s", now.Spec.Network.Mode, d.registered[r.ID].Mode)
		}
		stop(t, m)
		m, d = h.boot(t)
		if err := m.Recover(t.Context()); err != nil || d.registered[r.ID].Mode != record.NetworkOpen {
			t.Errorf("the next daemon: %v, its egress knows %+v", err, d.registered[r.ID])
		}
		h.exit(r.ID, Obituary{})
		synctest.Wait()
		if _, err := m.Update(t.Context(), r.ID, open); !errs.Is(err, errs.WrongState) {
			t.Errorf("of one that has ended: %v", err)
		}
		stop(t, m)
	})
}

// registered is how often an egress was given the policy of a sandbox.
func (h *host) registered(id string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return times("egress.make "+id, h.calls)
}

// TestReregister: whatever lives is given to the egress again, also in the middle of a
// transition that was cut short. What ends, has ended or is gone is not.
func TestReregister(t *testing.T) {
	for _, c := range []struct {
		name  string
		do    func(t *testing.T, h *host, m *Manager, id string) error
		state record.State
		again bool
	}{
		{"running", func(*testing.T, *host, *Manager, string) error { return nil }, record.Running, true},
		{"paused", func(t *testing.T, _ *host, m *Manager, id string) error { return m.Pause(t.Context(), id) }, record.Paused, true},
		{"pausing", func(t *testing.T, h *host, m *Manager, id string) error {
			h.fault = fault{call: "frozen.make " + id + " #1", mode: errBefore}
			thaw := h.gate("frozen.unmake " + id) // which takes too long
			defer thaw()
			wantErr(t, m.Pause(t.Context(), id))
			return nil
		}, record.Pausing, true},
		{"resuming", func(t *testing.T, h *host, m *Manager, id string) error {
			h.fault = fault{call: "frozen.unmake " + id + " #1", mode: errBefore}
			err := m.Pause(t.Context(), id)
			wantErr(t, m.Resume(t.Context(), id))
			return err
		}, record.Resuming, true},
		{"ended", func(t *testing.T, _ *host, m *Manager, id string) error { return m.Stop(t.Context(), id, 0) }, record.Ended, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *host, m *Manager) {
				id := mustCreate(t, m, spec()).ID
				if err := c.do(t, h, m, id); err != nil {
					t.Fatal(err)
				}
				if r, err := m.Get(t.Context(), id); err != nil || r.State != c.state {
					t.Fatalf("%+v, %v", r, err)
				}
				want := h.registered(id)
				for _, again := range []func() error{
					func() error { return Reregister(t.Context(), m, id) },
					func() error { return tried(TryReregister(t.Context(), m, id)) },
				} {
					if c.again {
						want++
					}
					if err := again(); err != nil || h.registered(id) != want {
						t.Errorf("%v; registered %d times, want %d", err, h.registered(id), want)
					}
				}
				if err := m.Recover(t.Context()); err != nil {
					t.Error(err)
				}
				if err := m.Delete(t.Context(), id); err != nil {
					t.Fatal(err)
				}
				synctest.Wait() // Delete answers before the disk is gone
				wantCode(t, Reregister(t.Context(), m, id), errs.NotFound)
				wantCode(t, tried(TryReregister(t.Context(), m, id)), errs.NotFound)
			})
		})
	}
}

func wantErr(t *testing.T, err error) {
	t.Helper()
	if err == nil {
		t.Error("it did not fail")
	}
}

var errBusy = errors.New("another operation holds it")

// tried is the error of TryReregister, errBusy if it did nothing.
func tried(done bool, err error) error {
	if done == (err != nil) {
		return errors.Join(errBusy, err)
	}
	return err
}

// TestReregisterBusy: while a start goes on, which may have read the secrets already, Reregister
// waits for it and TryReregister does not. One that waits for its turn has read nothing.
func TestReregisterBusy(t *testing.T) {
	queued(t, func(t *testing.T, h *host, m *Manager, q *turn) {
		ready := h.gate("agent.Ready daaaaaaaaaaa")
		r, err := m.Create(t.Context(), spec())
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range []error{Reregister(t.Context(), m, r.ID), tried(TryReregister(t.Context(), m, r.ID))} {
			if err != nil || h.registered(r.ID) != 0 {
				t.Errorf("before its turn: %v; registered %d times", err, h.registered(r.ID))
			}
		}
		close(q.came)
		synctest.Wait()
		if h.registered(r.ID) != 1 {
			t.Fatalf("%s is not registered before its agent answers", r.ID)
		}
		start := time.Now()
		if done, err := TryReregister(t.Context(), m, r.ID); done || err != nil || time.Since(start) != 0 {
			t.Errorf("busy: %v, %v after %s", done, err, time.Since(start))
		}
		waited := make(chan error)
		go func() { waited <- Reregister(t.Context(), m, r.ID) }()
		synctest.Wait()
		if h.registered(r.ID) != 1 {
			t.Error("it did not wait for the start")
		}
		ready()
		if err := <-waited; err != nil || h.registered(r.ID) != 2 {
			t.Errorf("%v; registered %d times", err, h.registered(r.ID))
		}
		if err := tried(TryReregister(t.Context(), m, r.ID)); err != nil || h.registered(r.ID) != 3 {
			t.Errorf("free: %v; registered %d times", err, h.registered(r.ID))
		}
		h.fault = fault{call: "egress.make " + r.ID + " #4", mode: errBefore}
		if done, err := TryReregister(t.Context(), m, r.ID); done || !errors.Is(err, errInjected) {
			t.Errorf("refused: %v, %v", done, err)
		}
	})
}
