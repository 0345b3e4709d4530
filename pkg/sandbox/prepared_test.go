package sandbox

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// wanting has a daemon keep so many prepared slots for runc.
func wanting(n int) func(*Config) {
	return func(c *Config) { c.Prepared = map[string]int{"runc": n} }
}

// keeps has a daemon keep its slots until the test, or the function returned, ends that.
func keeps(t testing.TB, m *Manager) (end func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { m.stock.Keep(ctx) })
	return func() { cancel(); wg.Wait() }
}

// prepared lists the IDs of prepared slots, as the store knows them.
func (h *host) prepared() (ids []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, r := range h.records {
		if r.State == record.Prepared {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// slotKinds are what a prepared slot holds.
var slotKinds = []string{"namespaces", "disk", "cgroup", "network"}

func TestPreparedSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, d := h.boot(t, wanting(2))
		end := keeps(t, m)
		synctest.Wait()
		slots := h.prepared()
		if len(slots) != 2 {
			t.Fatalf("prepared %v:\n%s", slots, h)
		}
		for _, id := range slots {
			for _, kind := range append(kinds[:len(kinds):len(kinds)], "runc", "runsc") {
				if want := slices.Contains(slotKinds, kind); h.has(kind+"/"+id) != want {
					t.Errorf("prepared slot %s: %s is %v", id, kind, !want)
				}
			}
		}
		if all, err := m.List(t.Context()); err != nil || len(all) > 0 {
			t.Errorf("clients see %v, %v", all, err)
		}
		for what, err := range map[string]error{
			"get": errorOf(m.Get(t.Context(), slots[0])), "delete": m.Delete(t.Context(), slots[0]),
			"pause": m.Pause(t.Context(), slots[0]), "start": errorOf(m.Start(t.Context(), slots[0])),
		} {
			if !errs.Is(err, errs.NotFound) {
				t.Errorf("%s of a prepared slot: %v", what, err)
			}
		}
		events := m.Subscribe(t.Context())
		slot, _ := h.record(slots[0])
		limits := record.Limits{MemoryBytes: 1 << 28, CPUMillis: 500, Pids: 64, DiskBytes: 1 << 30}
		r, err := m.Create(t.Context(), record.Spec{Runtime: "runc", Limits: limits})
		if err != nil {
			t.Fatal(err)
		}
		if r.ID != slots[0] || !r.Prepared || r.Slot != slot.Slot || r.Token == "" {
			t.Errorf("the sandbox is %+v, and the oldest slot was %+v", r, slot)
		}
		if r, err = m.Await(t.Context(), r.ID); err != nil || r.State != record.Running {
			t.Fatalf("%+v, %v", r, err)
		}
		if e := <-events; e.Type != string(record.Creating) || e.ID != r.ID {
			t.Errorf("the first event is %+v", e)
		}
		if got := calls(h, r.ID, "make"); !maps.Equal(got, map[string]int{
			"namespaces": 1, "disk": 1, "cgroup": 1, "network": 1, "rootfs": 1, "egress": 1, "bundle": 1, "ports": 1,
		}) {
			t.Errorf("made %v", got)
		}
		if now := h.prepared(); !slices.Equal(now, slots[1:]) {
			t.Errorf("right after the creation there are %v", now)
		}
		time.Sleep(2 * calm)
		synctest.Wait()
		if now := h.prepared(); len(now) != 2 {
			t.Errorf("a while after the creation there are %v", now)
		}
		again, err := m.Create(t.Context(), record.Spec{Runtime: "runsc"})
		if err != nil || again.Prepared {
			t.Errorf("runsc has no slots: %+v, %v", again, err)
		}
		if _, err := m.Await(t.Context(), again.ID); err != nil {
			t.Error(err)
		}
		if err := errors.Join(m.Delete(t.Context(), again.ID), m.Recover(t.Context())); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if now := h.prepared(); len(now) != 2 {
			t.Errorf("after a sweep there are %v", now)
		}
		end()
		if now := h.prepared(); len(now) > 0 {
			t.Errorf("the daemon has left %v", now)
		}
		if w := h.wrong(d); len(w) > 0 {
			t.Errorf("%s", strings.Join(w, "\n"))
		}
		stop(t, m)
	})
}

// errorOf is the error of a call.
func errorOf[T any](_ T, err error) error { return err }

// calls counts the calls "kind.verb id" so far, by kind.
func calls(h *host, id, verb string) map[string]int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := map[string]int{}
	for _, c := range h.calls {
		if kind, ok := strings.CutSuffix(c, "."+verb+" "+id); ok {
			n[kind]++
		}
	}
	return n
}

// TestPreparedOrNot: these creations take no prepared slot.
func TestPreparedOrNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t, wanting(1))
		defer stop(t, m)
		defer keeps(t, m)()
		first := createdAs(t, m, record.Spec{})
		s, err := m.Snapshots().Create(t.Context(), first.ID, record.SnapshotRequest{})
		if err == nil {
			s, err = m.Snapshots().Await(t.Context(), s.ID)
		}
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * calm)
		for what, spec := range map[string]record.Spec{
			"from a snapshot":           {Snapshot: s.ID},
			"of an image to be fetched": {ImageURI: "far:1"},
			"on another runtime":        {Runtime: "runsc"},
		} {
			if r := createdAs(t, m, spec); r.Prepared || len(h.prepared()) != 1 {
				t.Errorf("a sandbox %s took a prepared slot: %+v", what, r)
			}
		}
		if r := createdAs(t, m, record.Spec{}); !r.Prepared {
			t.Errorf("any other takes none: %+v", r)
		}
	})
}

// createdAs creates a sandbox, on runc unless s says otherwise, that must run.
func createdAs(t *testing.T, m *Manager, s record.Spec) record.Record {
	t.Helper()
	if s.Runtime == "" {
		s.Runtime = "runc"
	}
	synctest.Wait()
	r, err := m.Create(t.Context(), s)
	if err == nil {
		synctest.Wait()
		r, err = m.Await(t.Context(), r.ID)
	}
	if err != nil || r.State != record.Running {
		t.Fatalf("%+v, %v", r, err)
	}
	return r
}

// TestPreparedTwoTakers: eight creations at once take the three slots, each its own.
func TestPreparedTwoTakers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, d := h.boot(t, wanting(3))
		end := keeps(t, m)
		synctest.Wait()
		var wg sync.WaitGroup
		taken := make([]record.Record, 8)
		for i := range taken {
			wg.Go(func() {
				var err error
				if taken[i], err = m.Create(t.Context(), record.Spec{Runtime: "runc"}); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		n, ids := 0, map[string]bool{}
		for _, r := range taken {
			ids[r.ID] = true
			if r.Prepared {
				n++
			}
			if _, err := m.Await(t.Context(), r.ID); err != nil {
				t.Error(err)
			}
		}
		if n != 3 || len(ids) != 8 {
			t.Errorf("%d of %d took a slot", n, len(ids))
		}
		end()
		if w := h.wrong(d); len(w) > 0 {
			t.Errorf("%s", strings.Join(w, "\n"))
		}
		stop(t, m)
	})
}

// TestPreparedWaits: no slot is made while a sandbox comes up or waits for its turn.
func TestPreparedWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		gate := make(chan struct{})
		h.block["agent.Ready d"+strings.Repeat("a", record.IDLen-1)] = gate
		m, _ := h.boot(t, wanting(2))
		r, err := m.Create(t.Context(), record.Spec{Runtime: "runc"})
		if err != nil {
			t.Fatal(err)
		}
		defer stop(t, m)
		defer keeps(t, m)()
		time.Sleep(time.Second)
		synctest.Wait()
		if now := h.prepared(); len(now) > 0 {
			t.Errorf("while a sandbox comes up %v were made", now)
		}
		close(gate)
		synctest.Wait()
		if r, err := m.Await(t.Context(), r.ID); err != nil || r.State != record.Running {
			t.Fatalf("%+v, %v", r, err)
		}
		time.Sleep(calm - time.Millisecond)
		synctest.Wait()
		if now := h.prepared(); len(now) > 0 {
			t.Errorf("too soon after it came up %v were made", now)
		}
		time.Sleep(calm)
		synctest.Wait()
		if now := h.prepared(); len(now) != 2 {
			t.Errorf("after it came up there are %v", now)
		}
	})
}

// TestPreparedLost: a slot that lost something is released at the next sweep, or at once
// if it was reported; a creation that is faster brings the lost row up.
func TestPreparedLost(t *testing.T) {
	for _, kind := range slotKinds {
		t.Run(kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost()
				m, d := h.boot(t, wanting(1))
				end := keeps(t, m)
				synctest.Wait()
				for _, by := range []func(id string) error{
					func(string) error { return m.Recover(t.Context()) },
					func(id string) error { return m.Recover(t.Context(), id) },
				} {
					id := h.prepared()[0]
					h.remove(kind + "/" + id)
					if err := by(id); err != nil {
						t.Error(err)
					}
					synctest.Wait()
					if now := h.prepared(); len(now) != 1 || now[0] == id {
						t.Errorf("slot %s lost its %s, and there are %v", id, kind, now)
					}
				}
				id := h.prepared()[0]
				h.remove(kind + "/" + id)
				if r := createdAs(t, m, record.Spec{Limits: record.Limits{DiskBytes: 1 << 30}}); r.ID != id {
					t.Errorf("%s did not take slot %s", r.ID, id)
				}
				end()
				if w := h.wrong(d); len(w) > 0 {
					t.Errorf("%s", strings.Join(w, "\n"))
				}
				stop(t, m)
			})
		})
	}
}

// TestPreparedGiveBack: a creation that is refused leaves its slot to the next.
func TestPreparedGiveBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t, wanting(1))
		defer stop(t, m)
		defer keeps(t, m)()
		createdAs(t, m, record.Spec{Name: "lab"})
		time.Sleep(2 * calm)
		synctest.Wait()
		slots := h.prepared()
		if _, err := m.Create(t.Context(), record.Spec{Name: "lab", Runtime: "runc"}); !errs.Is(err, errs.Exists) {
			t.Errorf("a second lab: %v", err)
		}
		if now := h.prepared(); !slices.Equal(now, slots) {
			t.Errorf("there were %v, and are %v", slots, now)
		}
		if r := createdAs(t, m, record.Spec{}); r.ID != slots[0] {
			t.Errorf("%s did not take %v", r.ID, slots)
		}
	})
}

// TestPreparedInNobodysWay: creations that take no slot wait for none of them. There is an
// address for each sandbox and for each slot, as the configuration wants it.
func TestPreparedInNobodysWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const sandboxes, slots = 3, 2
		h := newHost()
		h.free = h.free[:sandboxes+slots]
		m, d := h.boot(t, func(c *Config) { c.Prepared = map[string]int{"runsc": slots} })
		end := keeps(t, m)
		synctest.Wait()
		held := h.prepared()
		if len(held) != slots {
			t.Fatalf("there are %v", held)
		}
		stuck := make(chan struct{}) // whoever waits for a slot to be released waits until the end
		h.mu.Lock()
		for _, id := range held {
			h.block["network.unmake "+id] = stuck
		}
		h.mu.Unlock()
		start := time.Now()
		for range sandboxes {
			if r, err := m.Create(t.Context(), record.Spec{Runtime: "runc"}); err != nil || r.Prepared {
				t.Errorf("%+v, %v", r, err)
			}
		}
		if d := time.Since(start); d > 0 {
			t.Errorf("%d creations took %s", sandboxes, d)
		}
		synctest.Wait()
		if now := h.prepared(); !slices.Equal(now, held) {
			t.Errorf("there were %v, and are %v", held, now)
		}
		close(stuck)
		end()
		if w := h.wrong(d); len(w) > 0 {
			t.Errorf("%s", strings.Join(w, "\n"))
		}
		stop(t, m)
	})
}

// TestPreparedMakesRoom: prepared slots take no address from a sandbox, and hold nothing
// while the host has no room.
func TestPreparedMakesRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.free = h.free[:2]
		full := errors.New("full")
		var room error
		m, d := h.boot(t, func(c *Config) {
			c.Prepared = map[string]int{"runsc": 2}
			c.Room = func(context.Context, string) error { h.mu.Lock(); defer h.mu.Unlock(); return room }
		})
		end := keeps(t, m)
		synctest.Wait()
		if now := h.prepared(); len(now) != 2 {
			t.Fatalf("there are %v", now)
		}
		for range 2 {
			createdAs(t, m, record.Spec{}) // which cannot take one for runsc
			time.Sleep(2 * calm)           // what is left is prepared again
		}
		_, err := m.Create(t.Context(), record.Spec{Runtime: "runc"})
		if !errs.Is(err, errs.Exhausted) {
			t.Errorf("a third sandbox in two slots: %v", err)
		}
		h.mu.Lock()
		h.free = append(h.free, 2, 3)
		h.mu.Unlock()
		m.stock.Look()
		time.Sleep(2 * calm)
		synctest.Wait()
		if now := h.prepared(); len(now) != 2 {
			t.Errorf("with two more addresses there are %v", now)
		}
		h.mu.Lock()
		room = full
		h.mu.Unlock()
		if err := m.Recover(t.Context()); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if now := h.prepared(); len(now) > 0 {
			t.Errorf("without room there are %v", now)
		}
		end()
		if w := h.wrong(d); len(w) > 0 {
			t.Errorf("%s", strings.Join(w, "\n"))
		}
		stop(t, m)
	})
}

// TestPreparedNoSweep: while nothing is swept no slot is made, and none of an earlier
// daemon is released but by Purge.
func TestPreparedNoSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, d := h.boot(t, wanting(1))
		if err := m.stock.make(t.Context(), "runc"); err != nil {
			t.Fatal(err)
		}
		h.mu.Lock()
		d.dead = true
		h.mu.Unlock()
		stop(t, m)
		left := h.prepared()
		m, d = h.boot(t, wanting(1), func(c *Config) { c.NoSweep = "another store" })
		end := keeps(t, m)
		if err := m.Recover(t.Context()); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if now := h.prepared(); len(left) != 1 || !slices.Equal(now, left) {
			t.Errorf("the daemon that died left %v, and there are %v", left, now)
		}
		if err := m.stock.Purge(t.Context()); err != nil {
			t.Error(err)
		}
		end()
		if w := h.wrong(d); len(w) > 0 {
			t.Errorf("%s", strings.Join(w, "\n"))
		}
		stop(t, m)
	})
}

// TestReadyAtOnce: a creation can take a slot, or a member of a pool, as soon as that is made, and said to be.
func TestReadyAtOnce(t *testing.T) {
	for pool, c := range map[string]record.Capacity{"": {}, "p": {BufferMin: 1, BufferMax: 1, PoolMax: 2}} {
		synctest.Test(t, func(t *testing.T) {
			h := newHost()
			if pool != "" {
				h.pooled(pool, record.Spec{}, c)
			}
			var m *Manager
			var took record.Record
			m, _ = h.boot(t, withPools, func(c *Config) {
				if pool == "" {
					wanting(1)(c)
				}
				c.OnOperation = func(o Operation) {
					if o.Name == opPrepare && took.ID == "" {
						var err error
						if took, err = m.Create(t.Context(), record.Spec{Runtime: "runc", Pool: pool}); err != nil {
							t.Error(err)
						}
					}
				}
			})
			end := keeps(t, m)
			synctest.Wait()
			if r, _ := h.record(took.ID); !r.Prepared || r.Pool.Name != pool || r.Pool.Miss != "" {
				t.Errorf("of pool %q: %v, %+v", pool, r.Prepared, r.Pool)
			}
			end()
			stop(t, m)
		})
	}
}
