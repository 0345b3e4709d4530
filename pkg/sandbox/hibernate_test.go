package sandbox

import (
	"context"
	"errors"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// hibernationStory hibernates sandboxes in each way there is, wakes them, and ends them in their
// sleep.
func hibernationStory(ctx context.Context, m *Manager, _ *host) (failed int) {
	k := Keeper{m}
	note, begin := telling(ctx, m, &failed, func(*record.Spec) {})
	create := func(name string, action record.IdleAction) string {
		s := record.Spec{Name: name, Runtime: "runsc", Limits: record.Limits{MemoryBytes: 1 << 28, CPUMillis: 500}, OneShot: name == "mine"}
		if action != "" {
			s.Idle = record.Idle{After: time.Minute, Action: action}
		}
		return begin(s)
	}
	rest := func(id string) {
		r, err := m.Get(ctx, id)
		if err == nil {
			err = k.Rest(ctx, r, yes)
		}
		note(err)
		synctest.Wait()
	}
	wake := func(id string) {
		_, err := k.Wake(ctx, id)
		note(err)
		synctest.Wait()
	}
	a := create("", record.IdleHibernate)
	rest(a)
	wake(a)
	rest(a) // and stays asleep
	b := create("mine", "")
	note(Hibernate(ctx, m, b))
	note(m.Recover(ctx))
	note(m.Resume(ctx, b))
	note(m.Pause(ctx, b))
	note(Hibernate(ctx, m, b))
	_, err := m.Snapshots().Create(ctx, b, record.SnapshotRequest{})
	note(err)
	synctest.Wait()
	note(m.Stop(ctx, b, 0))
	c := create("", record.IdlePause)
	rest(c)
	if !k.Relieve(ctx) {
		failed++
	}
	wake(c)
	note(m.Recover(ctx))
	d := create("", "")
	note(Hibernate(ctx, m, d))
	note(m.Delete(ctx, d))
	synctest.Wait()
	return failed
}

// sleeper creates a sandbox that hibernates when it is idle.
func sleeper(t *testing.T, m *Manager, action record.IdleAction) record.Record {
	t.Helper()
	s := record.Spec{ // of --rm: what hibernates must survive all the same
		Runtime: "runsc", OneShot: true, Limits: record.Limits{MemoryBytes: 1 << 28}, Publish: []record.Publish{{Port: 80}},
	}
	if action != "" {
		s.Idle = record.Idle{After: time.Minute, Action: action}
	}
	return mustCreate(t, m, s)
}

// TestHibernate: a sandbox holds only its disk, its image and its ports while it hibernates, also
// after a reboot, and the next use brings it back.
func TestHibernate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, d := h.boot(t)
		r := sleeper(t, m, record.IdleHibernate)
		life := m.Life(r.ID)
		if err := (Keeper{m}).Rest(t.Context(), r, yes); err != nil {
			t.Fatal(err)
		}
		asleep, err := m.Get(t.Context(), r.ID)
		if err != nil || asleep.State != record.Hibernated || !asleep.Asleep() || asleep.Hibernation.Bytes() != 200<<20 {
			t.Fatalf("hibernated: %+v, %v", asleep, err)
		}
		if context.Cause(life) != errHibernated {
			t.Errorf("its life ended with %v", context.Cause(life))
		}
		if w := h.wrong(d); len(w) > 0 {
			t.Fatal(strings.Join(w, "\n"))
		}
		stop(t, m)
		h.reboot()
		m, d = h.boot(t)
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		if w := h.wrong(d); len(w) > 0 {
			t.Fatal(strings.Join(w, "\n"))
		}
		time.Sleep(time.Second)
		seen := m.Subscribe(t.Context())
		now, err := (Keeper{m}).Wake(t.Context(), r.ID)
		if err != nil || now.State != record.Running || now.Reason != "" || now.Hibernation != nil || !now.Started.After(r.Started) {
			t.Fatalf("awake: %+v, %v", now, err)
		}
		if again, err := (Keeper{m}).Wake(t.Context(), r.ID); err != nil || !again.Started.Equal(now.Started) {
			t.Errorf("woken twice: %+v, %v", again, err)
		}
		if w := h.wrong(d); len(w) > 0 {
			t.Fatal(strings.Join(w, "\n"))
		}
		var types []string
		for len(seen) > 0 {
			types = append(types, (<-seen).Type)
		}
		if want := []string{string(record.Waking), string(record.Running), events.Woken}; !slices.Equal(types, want) {
			t.Errorf("events: %v, want %v", types, want)
		}
		stop(t, m)
	})
}

// TestHibernateRefused: what has no memory to keep, or no place for it, stays as it is.
func TestHibernateRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		full := errs.New(errs.Exhausted, "no room")
		m, _ := h.boot(t, func(c *Config) {
			c.ImageRoom = func(bytes, _ int64) error {
				if bytes > 1<<30 {
					return full
				}
				return nil
			}
		})
		s := idler(record.IdleHibernate)
		s.Runtime = "runc"
		if _, err := m.Create(t.Context(), s); !errs.Is(err, errs.Unsupported) {
			t.Errorf("an idle policy of runc that hibernates: %v", err)
		}
		onRunc := mustCreate(t, m, record.Spec{Runtime: "runc"})
		if err := Hibernate(t.Context(), m, onRunc.ID); !errs.Is(err, errs.Unsupported) {
			t.Errorf("on runc: %v", err)
		}
		r := sleeper(t, m, "")
		h.mu.Lock()
		h.held[r.ID] = 2 << 30
		h.mu.Unlock()
		if err := Hibernate(t.Context(), m, r.ID); !errors.Is(err, full) {
			t.Errorf("without room: %v", err)
		}
		if now, err := m.Get(t.Context(), r.ID); err != nil || now.State != record.Running {
			t.Errorf("afterwards: %+v, %v", now, err)
		}
		if err := m.Stop(t.Context(), r.ID, 0); err != nil {
			t.Fatal(err)
		}
		if err := Hibernate(t.Context(), m, r.ID); !errs.Is(err, errs.WrongState) {
			t.Errorf("stopped: %v", err)
		}
		stop(t, m)
	})
}

// TestHibernateFails: after an error at each step the guest goes on, paused by nobody, and nothing
// is left behind.
func TestHibernateFails(t *testing.T) {
	for _, call := range []string{
		"memory.make", "memory.Pause", "memory.Still", "memory.Checkpoint", "disk.Sync", "memory.Finish",
	} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost()
				m, d := h.boot(t)
				r := sleeper(t, m, "")
				h.failAll = call
				if err := Hibernate(t.Context(), m, r.ID); !errors.Is(err, errInjected) {
					t.Fatalf("error: %v", err)
				}
				h.failAll = ""
				if now, err := m.Get(t.Context(), r.ID); err != nil || now.State != record.Running || !now.Started.Equal(r.Started) {
					t.Errorf("afterwards: %+v, %v", now, err)
				}
				if w := h.wrong(d); len(w) > 0 {
					t.Error(strings.Join(w, "\n"))
				}
				if err := Hibernate(t.Context(), m, r.ID); err != nil {
					t.Errorf("once more: %v", err)
				}
				stop(t, m)
			})
		})
	}
}

// TestHibernatePoolFull: a client hears that the pool became full, and what to do.
func TestHibernatePoolFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		r := sleeper(t, m, "")
		h.failAll, h.failWith = "memory.Checkpoint", syscall.ENOSPC
		err := Hibernate(t.Context(), m, r.ID)
		if !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(), "sandboxd pool grow") {
			t.Errorf("error: %v", err)
		}
		stop(t, m)
	})
}

// TestWakeFails: a wake that fails before the guest runs can be tried again; one that fails
// afterwards ends the sandbox, whose disk is kept.
func TestWakeFails(t *testing.T) {
	for call, want := range map[string]record.State{
		"cgroup.make": record.Hibernated, "memory.Check": record.Hibernated, "memory.Restore": record.Hibernated,
		"agent.Ready": record.Ended,
	} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost()
				m, d := h.boot(t)
				r := sleeper(t, m, "")
				if err := Hibernate(t.Context(), m, r.ID); err != nil {
					t.Fatal(err)
				}
				h.failAll = call
				if err := m.Resume(t.Context(), r.ID); !errors.Is(err, errInjected) {
					t.Fatalf("error: %v", err)
				}
				h.failAll = ""
				now, err := m.Get(t.Context(), r.ID)
				if err != nil || now.State != want {
					t.Fatalf("afterwards: %+v, %v; want %s", now, err, want)
				}
				if want == record.Ended && (now.Reason != record.StartFailed || !strings.Contains(now.Message, "could not be woken")) {
					t.Errorf("it ended with %q: %s", now.Reason, now.Message)
				}
				if w := h.wrong(d); len(w) > 0 {
					t.Error(strings.Join(w, "\n"))
				}
				if want == record.Hibernated {
					if err := m.Resume(t.Context(), r.ID); err != nil {
						t.Errorf("once more: %v", err)
					}
				}
				stop(t, m)
			})
		})
	}
}

// TestWakeElsewhere: a sandbox that cannot be woken on this host says so and stays; stop and start
// begin with its files.
func TestWakeElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		r := sleeper(t, m, "")
		if err := Hibernate(t.Context(), m, r.ID); err != nil {
			t.Fatal(err)
		}
		h.mu.Lock()
		old := h.records[r.ID]
		old.Hibernation = &record.MemoryImage{Files: old.Hibernation.Files, Needs: record.MemoryNeeds{Build: "2"}}
		h.records[r.ID] = old
		h.mu.Unlock()
		if err := m.Resume(t.Context(), r.ID); !errs.Is(err, errs.Unavailable) {
			t.Errorf("of another build: %v", err)
		}
		if now, err := m.Get(t.Context(), r.ID); err != nil || now.State != record.Hibernated {
			t.Fatalf("afterwards: %+v, %v", now, err)
		}
		if err := m.Stop(t.Context(), r.ID, 0); err != nil {
			t.Fatal(err)
		}
		if h.has("memory/" + r.ID) {
			t.Error("a stopped sandbox keeps its image")
		}
		_, err := m.Start(t.Context(), r.ID)
		if err == nil {
			synctest.Wait()
			r, err = m.Await(t.Context(), r.ID)
		}
		if err != nil || r.State != record.Running {
			t.Errorf("started: %+v, %v", r, err)
		}
		stop(t, m)
	})
}

// threeAsleep makes three sandboxes that are paused because they were idle, a second apart.
func threeAsleep(t *testing.T, k Keeper) (ids []string) {
	t.Helper()
	for range 3 {
		r := sleeper(t, k.Manager, record.IdlePause)
		if err := k.Rest(t.Context(), r, yes); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, r.ID)
		time.Sleep(time.Second)
	}
	return ids
}

// TestRelieve: sandboxes that are asleep in memory hibernate one after another, the longest asleep
// first; those that a client paused never do.
func TestRelieve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		k := Keeper{m}
		want := threeAsleep(t, k)
		mine := sleeper(t, m, "")
		if err := m.Pause(t.Context(), mine.ID); err != nil {
			t.Fatal(err)
		}
		var got []string
		for k.Relieve(t.Context()) {
			all, err := m.List(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range all {
				if r.State == record.Hibernated && !slices.Contains(got, r.ID) {
					got = append(got, r.ID)
				}
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("hibernated in the order %v, want %v", got, want)
		}
		stop(t, m)
	})
}

// TestWakeSlow: a runtime may take longer to read a large image than to start.
func TestWakeSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		r := sleeper(t, m, "")
		if err := Hibernate(t.Context(), m, r.ID); err != nil {
			t.Fatal(err)
		}
		gate := make(chan struct{})
		h.mu.Lock()
		h.block["memory.Restore "+r.ID] = gate
		h.mu.Unlock()
		time.AfterFunc(m.life.cfg.StartLimit+time.Second, func() { close(gate) })
		if err := m.Resume(t.Context(), r.ID); err != nil {
			t.Errorf("a wake that takes a second longer than a start may: %v", err)
		}
		stop(t, m)
	})
}

// TestHibernateMeanwhile: a client that hibernates a sandbox hears that another has deleted it.
func TestHibernateMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		r := sleeper(t, m, "")
		h.mu.Lock()
		h.block["memory.Checkpoint "+r.ID] = make(chan struct{})
		h.mu.Unlock()
		result := make(chan error)
		go func() { result <- Hibernate(t.Context(), m, r.ID) }()
		synctest.Wait()
		if err := m.Delete(t.Context(), r.ID); err != nil {
			t.Error(err)
		}
		if err := <-result; !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "was deleted") {
			t.Errorf("hibernated: %v", err)
		}
		stop(t, m)
	})
}

// TestRelieveSlow: a sandbox that does not come to the end of its hibernation holds up those who need
// memory for a moment, and then the next one gives its own. A caller that has gone waits for none.
func TestRelieveSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		k := Keeper{m}
		ids := threeAsleep(t, k)
		states := func() (out []record.State) {
			for _, id := range ids {
				r, _ := h.record(id)
				out = append(out, r.State)
			}
			return out
		}
		gate := make(chan struct{})
		h.mu.Lock()
		h.block["memory.Checkpoint "+ids[0]] = gate
		h.block["memory.Checkpoint "+ids[2]] = gate
		h.mu.Unlock()
		start := time.Now()
		if !k.Relieve(t.Context()) || time.Since(start) != relieveLimit {
			t.Errorf("relieved after %v", time.Since(start))
		}
		if got, want := states(), []record.State{record.Hibernating, record.Hibernated, record.Paused}; !slices.Equal(got, want) {
			t.Errorf("they are %v, want %v", got, want)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start = time.Now()
		if k.Relieve(ctx) || time.Since(start) != time.Second {
			t.Errorf("a caller that has gone waited for %v", time.Since(start))
		}
		close(gate)
		synctest.Wait()
		if got, want := states(), slices.Repeat([]record.State{record.Hibernated}, 3); !slices.Equal(got, want) {
			t.Errorf("in the end they are %v, want %v", got, want)
		}
		stop(t, m)
	})
}

// TestImageRoomPromised: images that are written at the same time share the room of the pool, and
// give back what they were promised.
func TestImageRoomPromised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const mib = 1 << 20
		full := errs.New(errs.Exhausted, "no room")
		h := newHost()
		m, _ := h.boot(t, func(c *Config) {
			c.ImageRoom = func(bytes, promised int64) error {
				if bytes+promised > 250*mib {
					return full
				}
				return nil
			}
		})
		var ids []string
		for range 4 {
			r := sleeper(t, m, "")
			h.mu.Lock()
			h.held[r.ID] = 100 * mib
			h.mu.Unlock()
			ids = append(ids, r.ID)
		}
		gate := make(chan struct{})
		h.mu.Lock()
		h.block["memory.Finish "+ids[0]] = gate
		h.mu.Unlock()
		done := make(chan error)
		go func() { done <- Hibernate(t.Context(), m, ids[0]) }()
		snap, err := m.Snapshots().Create(t.Context(), ids[1], record.SnapshotRequest{Memory: true})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if snap, err = m.Snapshots().Await(t.Context(), snap.ID); err != nil || snap.State != record.SnapshotReady {
			t.Errorf("beside one that hibernates: %+v, %v", snap, err)
		}
		h.mu.Lock()
		h.block["memory.Finish "+"snap-dbbbbbbbbbbb"] = gate
		h.mu.Unlock()
		if snap, err = m.Snapshots().Create(t.Context(), ids[1], record.SnapshotRequest{Memory: true}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := Hibernate(t.Context(), m, ids[2]); !errors.Is(err, full) {
			t.Errorf("while two images are written: %v", err)
		}
		_, err = m.Snapshots().Create(t.Context(), ids[3], record.SnapshotRequest{Memory: true})
		if !errors.Is(err, full) {
			t.Errorf("a snapshot while two images are written: %v", err)
		}
		if r, _ := h.record(ids[2]); r.State != record.Running {
			t.Errorf("the refused one is %s", r.State)
		}
		close(gate)
		if err := <-done; err != nil {
			t.Error(err)
		}
		synctest.Wait()
		for _, id := range ids[1:] {
			if err := Hibernate(t.Context(), m, id); err != nil {
				t.Errorf("one after the other: %v", err)
			}
		}
		h.failAll = "memory.Finish"
		if err := m.Resume(t.Context(), ids[1]); err != nil {
			t.Fatal(err)
		}
		if err := Hibernate(t.Context(), m, ids[1]); !errors.Is(err, errInjected) {
			t.Errorf("error: %v", err)
		}
		if all := m.snapshots.promised; len(all) != 0 {
			t.Errorf("still promised: %v", all)
		}
		stop(t, m)
	})
}

// diesAsleep has a daemon die in the middle of the hibernation of a sandbox.
func (h *host) diesAsleep(t *testing.T) record.Record {
	t.Helper()
	m, _ := h.boot(t)
	r := sleeper(t, m, record.IdleHibernate)
	h.fault = fault{call: "memory.Checkpoint " + r.ID + " #1", mode: crashBefore}
	if err := (Keeper{m}).Rest(t.Context(), r, yes); !errors.Is(err, errDead) {
		t.Fatalf("error: %v", err)
	}
	stop(t, m)
	h.calls, h.fault = nil, fault{}
	return r
}

// TestHibernateRecovers: the recovery does not wait for a hibernation that a dead daemon has left in the
// middle; a use does, and it wakes the sandbox.
func TestHibernateRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		r := h.diesAsleep(t)
		gate := make(chan struct{})
		h.block["memory.Checkpoint "+r.ID] = gate
		m, d := h.boot(t)
		for range 2 { // the sweep leaves it alone
			if err := m.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		if now, err := m.Get(t.Context(), r.ID); err != nil || now.State != record.Hibernating {
			t.Fatalf("after the recovery: %+v, %v", now, err)
		}
		woken := make(chan record.Record, 1)
		go func() {
			now, err := (Keeper{m}).Wake(t.Context(), r.ID)
			if err != nil {
				t.Error(err)
			}
			woken <- now
		}()
		synctest.Wait()
		if len(woken) > 0 {
			t.Error("a use did not wait")
		}
		close(gate)
		if now := <-woken; now.State != record.Running || now.Hibernation != nil {
			t.Errorf("woken: %+v", now)
		}
		synctest.Wait()
		if w := h.wrong(d); len(w) > 0 {
			t.Error(strings.Join(w, "\n"))
		}
		stop(t, m)
	})
}

// TestHibernateRecoversFull: a guest that a dead daemon was about to hibernate, and that was frozen,
// goes on if the pool has no room any more.
func TestHibernateRecoversFull(t *testing.T) {
	for call, mode := range map[string]mode{
		"frozen.unmake": crashBefore, "memory.Pause": crashBefore, "memory.Checkpoint": crashAfter,
	} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost()
				m, _ := h.boot(t)
				r := sleeper(t, m, record.IdlePause)
				if err := (Keeper{m}).Rest(t.Context(), r, yes); err != nil {
					t.Fatal(err)
				}
				h.calls, h.fault = nil, fault{call: call + " " + r.ID + " #1", mode: mode}
				if (Keeper{m}).Relieve(t.Context()) {
					t.Fatal("it hibernates")
				}
				stop(t, m)
				h.calls, h.fault = nil, fault{}
				m, d := h.boot(t, func(c *Config) {
					c.ImageRoom = func(int64, int64) error { return errs.New(errs.Exhausted, "no room") }
				})
				if err := m.Recover(t.Context()); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Hour) // nobody else waits for it
				if now, err := m.Get(t.Context(), r.ID); err != nil || now.State != record.Running {
					t.Errorf("after the recovery: %+v, %v", now, err)
				}
				if w := h.wrong(d); len(w) > 0 {
					t.Error(strings.Join(w, "\n"))
				}
				stop(t, m)
			})
		})
	}
}

// TestHibernateClosing: a daemon that stops while it repeats a hibernation leaves the guest as it is,
// to the next one.
func TestHibernateClosing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		r := h.diesAsleep(t)
		h.block["memory.Checkpoint "+r.ID] = make(chan struct{})
		m, _ := h.boot(t)
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := m.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("closed: %v", err)
		}
		synctest.Wait()
		if got := h.records[r.ID].State; got != record.Hibernating || h.pauses[r.ID] != 2 {
			t.Errorf("it is %s, paused %d times", got, h.pauses[r.ID])
		}
		delete(h.block, "memory.Checkpoint "+r.ID)
		m, d := h.boot(t)
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if w := h.wrong(d); len(w) > 0 {
			t.Error(strings.Join(w, "\n"))
		}
		if now, err := m.Get(t.Context(), r.ID); err != nil || now.State != record.Hibernated {
			t.Errorf("after the recovery: %+v, %v", now, err)
		}
		stop(t, m)
	})
}

// TestHibernateGrows: a guest that takes more memory before it stands still is refused then, and goes on.
func TestHibernateGrows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := errs.New(errs.Exhausted, "no room")
		h := newHost()
		m, d := h.boot(t, func(c *Config) {
			c.ImageRoom = func(bytes, promised int64) error {
				if bytes+promised > 200<<20 {
					return full
				}
				return nil
			}
		})
		r := sleeper(t, m, "")
		gate := make(chan struct{})
		h.mu.Lock()
		h.held[r.ID] = 100 << 20
		h.block["memory.Pause "+r.ID] = gate
		h.mu.Unlock()
		done := make(chan error)
		go func() { done <- Hibernate(t.Context(), m, r.ID) }()
		synctest.Wait()
		h.mu.Lock()
		h.held[r.ID] = 201 << 20
		h.mu.Unlock()
		close(gate)
		if err := <-done; !errors.Is(err, full) {
			t.Errorf("error: %v", err)
		}
		if w := h.wrong(d); len(w) > 0 {
			t.Error(strings.Join(w, "\n"))
		}
		h.mu.Lock()
		h.held[r.ID] = 199 << 20
		h.mu.Unlock()
		if err := Hibernate(t.Context(), m, r.ID); err != nil {
			t.Errorf("once more: %v", err)
		}
		stop(t, m)
	})
}
