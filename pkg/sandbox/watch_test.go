package sandbox

import (
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/internal/pidfd"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestLingering deletes a sandbox whose killed process the kernel does not end, across
// sweeps and a restart of the daemon. Nobody sees it any more, its slot has no other
// owner, no operation fails, and nothing of it is left when the kernel is done.
func TestLingering(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		log := &lines{Handler: slog.DiscardHandler}
		var mu sync.Mutex
		var ops, deleted []string
		watched := func(c *Config) {
			c.Log = slog.New(log)
			c.OnOperation = func(o Operation) { mu.Lock(); ops = append(ops, o.Name+" "+o.Outcome); mu.Unlock() }
			c.OnEvent = func(e events.Event) {
				mu.Lock()
				defer mu.Unlock()
				if e.Type == events.Deleted {
					deleted = append(deleted, e.ID)
				}
			}
		}
		m, d := h.boot(t, watched)
		s := spec()
		s.Name, s.Publish = "lab", []record.Publish{{Host: netip.MustParseAddrPort("127.0.0.1:8000"), Port: 80}}
		r := mustCreate(t, m, s)
		h.slow[r.ID] = true
		if err := m.Delete(t.Context(), "lab"); err != nil {
			t.Fatal(err)
		}
		lingers := func() {
			t.Helper()
			synctest.Wait() // Delete answers before its ports are closed
			_, err := m.Get(t.Context(), r.ID)
			wantCode(t, err, errs.NotFound)
			wantCode(t, m.Delete(t.Context(), r.ID), errs.NotFound)
			if all, err := m.List(t.Context()); err != nil || len(all) != 0 {
				t.Errorf("listed: %d, %v", len(all), err)
			}
			if now, ok := h.record(r.ID); !ok || now.State != record.Deleting || now.Slot != r.Slot || slices.Contains(h.free, r.Slot) {
				t.Errorf("the record is %+v", now)
			}
			if !h.has("rootfs/"+r.ID) || d.published[r.ID] {
				t.Errorf("what it stands on is gone, or it is still published:\n%s", h)
			}
		}
		lingers()
		for range 3 { // sweeps
			if err := m.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
			lingers()
		}
		if len(deleted) != 1 {
			t.Errorf("told that it is deleted: %v", deleted)
		}
		m, d = reincarnate(t, h, m, watched)
		lingers()
		if other := mustCreate(t, m, s); other.Slot == r.Slot {
			t.Errorf("slot %d has two owners", r.Slot)
		} else if err := m.Delete(t.Context(), "lab"); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		h.shoot(r.ID) // the kernel is done; no sweep runs
		synctest.Wait()
		agree(t, h, d)
		if _, ok := h.record(r.ID); ok {
			t.Error("its record is still there")
		}
		stop(t, m)
		want := []string{"create ok", "delete ok", "create ok", "delete ok", "recover_erase ok"}
		if !slices.Equal(ops, want) {
			t.Errorf("operations %v, want %v", ops, want)
		}
		warned := 0
		for _, l := range log.all {
			if strings.HasPrefix(l, "ERROR") {
				t.Error(l)
			}
			if strings.HasPrefix(l, "WARN") {
				warned++
			}
		}
		if warned != 2 { // once by each daemon
			t.Errorf("%d warnings: %v", warned, log.all)
		}
	})
}

// TestLingeringStop stops a sandbox whose processes linger: the client hears why it is not
// ended yet, and it ends by itself. A deletion meanwhile does not wait for that.
func TestLingeringStop(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		bubble(t, func(t *testing.T, h *host, m *Manager) {
			r := mustCreate(t, m, spec())
			h.slow[r.ID] = true
			err := m.Stop(t.Context(), r.ID, 0)
			wantCode(t, err, errs.Unavailable)
			if !strings.Contains(err.Error(), "sandboxd finishes it") {
				t.Errorf("told %v", err)
			}
			if deleted {
				if err := m.Delete(t.Context(), r.ID); err != nil {
					t.Fatal(err)
				}
			}
			h.shoot(r.ID)
			synctest.Wait()
			if r, ok := h.record(r.ID); ok == deleted || ok && (r.State != record.Ended || r.Reason != record.Stopped) {
				t.Errorf("deleted %v: the record is %+v", deleted, r)
			}
		})
	}
}

// TestLingeringLink: a link that the kernel removes late keeps the slot, and is no error
// of every sweep.
func TestLingeringLink(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, spec())
		open := h.gate("network.Gone " + r.ID)
		if err := m.Delete(t.Context(), r.ID); err != nil {
			t.Fatal(err)
		}
		time.Sleep(goneLimit)
		synctest.Wait()
		for range 2 {
			if err := m.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if _, ok := h.record(r.ID); !ok {
			t.Error("its slot is free while its link is there")
		}
		open()
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

// TestLingeringStray has things without a record whose processes linger: the sweep
// releases them when they are dead, and is not failed until then.
func TestLingeringStray(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, spec())
		h.slow[r.ID] = true
		h.mu.Lock()
		h.free = append(h.free, r.Slot)
		delete(h.records, r.ID) // the store is lost
		h.mu.Unlock()
		for range 2 {
			if err := m.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if !h.has("rootfs/" + r.ID) {
			t.Error("what it stands on is gone")
		}
		h.shoot(r.ID)
		synctest.Wait()
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		h.mu.Lock()
		h.early = nil // it was held without a record
		h.mu.Unlock()
	})
}

// TestKilledInside: only a sentry that exits as after SIGKILL of PID 1, and of which nobody knows more, had a guest
// that killed PID 1. The real ones are in test/e2e (TestKilledFromInside, TestKilledFromOutside).
func TestKilledInside(t *testing.T) {
	seven := 7
	for name, c := range map[string]struct {
		code   *int
		exit   pidfd.Exit
		killed bool
	}{
		"killed inside":      {nil, pidfd.Exit{Code: 137}, true},
		"killed by the host": {nil, pidfd.Exit{Signal: syscall.SIGKILL}, false},
		"a filter's signal":  {nil, pidfd.Exit{Signal: syscall.SIGSYS}, false},
		"it panics":          {nil, pidfd.Exit{Code: 2}, false},
		"it failed":          {nil, pidfd.Exit{Code: 128}, false},
		"it ended well":      {nil, pidfd.Exit{}, false},
		"an obituary":        {&seven, pidfd.Exit{Code: 137}, false},
	} {
		d := death{reason: record.RuntimeCrash, message: "it crashed", code: c.code}
		if killedInside(&d, c.exit) != c.killed || (d.reason == record.Killed) != c.killed {
			t.Errorf("%s: %+v", name, d)
		}
		if c.killed && (d.code == nil || *d.code != 137 || !strings.Contains(d.message, "from inside")) {
			t.Errorf("%s: %+v", name, d)
		}
	}
}
