package sandbox

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func mustSnapshot(t *testing.T, m *Manager, sandbox, name string) record.Snapshot {
	t.Helper()
	s, err := m.Snapshots().Create(t.Context(), sandbox, record.SnapshotRequest{Name: name})
	if err != nil || s.State != record.SnapshotCreating {
		t.Fatalf("snapshot: %v, state %q", err, s.State)
	}
	if s, err = m.Snapshots().Await(t.Context(), s.ID); err != nil || s.State != record.SnapshotReady || s.Bytes == 0 {
		t.Fatalf("snapshot: %v, state %q: %s", err, s.State, s.Message)
	}
	return s
}

func wantWire(t *testing.T, err error, code errs.Code, wire string) {
	t.Helper()
	e, ok := err.(*errs.Error) //nolint:errorlint // the outermost
	if !ok || e.Code != code || e.Wire != wire {
		t.Errorf("got %v, want %s %s", err, code, wire)
	}
}

func TestSnapshotOfEveryState(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx := t.Context()
		a := mustCreate(t, m, record.Spec{Runtime: "runc", Name: "lab", Security: record.SecurityStrict})
		h.calls = nil
		if s := mustSnapshot(t, m, "lab", ""); s.Level() != record.SecurityStrict {
			t.Errorf("the level of security is %q", s.Security)
		}
		got := slices.DeleteFunc(slices.Clone(h.calls), func(c string) bool {
			return strings.HasPrefix(c, "store.Get") ||
				c == "store.Snapshots"
		})
		if want := []string{
			"store.PutSnapshot creating snap-" + first, "snapshot.Prepare", "frozen.make " + first, "snapshot.make snap-" + first,
			"frozen.unmake " + first, "snapshot.Finish snap-" + first, "store.PutSnapshot ready snap-" + first,
		}; !slices.Equal(got, want) {
			t.Errorf("calls\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		if err := m.Pause(ctx, a.ID); err != nil {
			t.Fatal(err)
		}
		mustSnapshot(t, m, a.ID, "")
		if !h.has("frozen/" + a.ID) {
			t.Error("a snapshot thawed a paused sandbox")
		}
		h.shoot(a.ID)
		synctest.Wait()
		mustSnapshot(t, m, a.ID, "")
		if r, err := m.Get(ctx, a.ID); err != nil || r.State != record.Ended {
			t.Errorf("the source is %s, %v", r.State, err)
		}
		list, err := m.Snapshots().List(ctx)
		if err != nil || len(list) != 3 {
			t.Fatalf("%d snapshots, %v", len(list), err)
		}
		// They outlive their source, and what begins as one outlives it.
		if err := m.Delete(ctx, a.ID); err != nil {
			t.Fatal(err)
		}
		mustCreate(t, m, record.Spec{Runtime: "runc", Snapshot: list[0].ID})
		for _, s := range list {
			if err := m.Snapshots().Delete(ctx, s.ID); err != nil {
				t.Fatal(err)
			}
			wantCode(t, m.Snapshots().Delete(ctx, s.ID), errs.NotFound)
		}
	})
}

func TestSnapshotRefused(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx := t.Context()
		snapshot := func(id string) error { _, err := m.Snapshots().Create(ctx, id, record.SnapshotRequest{}); return err }
		wantCode(t, snapshot("nobody"), errs.NotFound)
		open := h.gate("agent.Ready " + first)
		if _, err := m.Create(ctx, spec()); err != nil {
			t.Fatal(err)
		}
		wantCode(t, snapshot(first), errs.WrongState) // at once
		open()
		synctest.Wait()
		h.fault = fault{call: "disk.make " + second + " #1", mode: errBefore}
		if _, err := m.Create(ctx, spec()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		wantCode(t, snapshot(second), errs.WrongState) // it never ran
		open = h.gate("disk.unmake " + first)
		if err := m.Delete(ctx, first); err != nil {
			t.Fatal(err)
		}
		wantCode(t, snapshot(first), errs.NotFound) // it is being deleted
		open()
		synctest.Wait()
		if list, err := m.Snapshots().List(ctx); err != nil || len(list) > 0 {
			t.Errorf("%v, %v", list, err)
		}
	})
}

func TestSnapshotInUse(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx := t.Context()
		mustCreate(t, m, spec())
		open := h.gate("snapshot.make snap-" + first)
		s, err := m.Snapshots().Create(ctx, first, record.SnapshotRequest{Name: "one"})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		wantWire(t, m.Snapshots().Delete(ctx, s.ID), errs.WrongState, "SNAPSHOT::INVALID_STATE")
		_, err = m.Create(ctx, record.Spec{Runtime: "runc", Snapshot: s.ID})
		if e := errs.CodeOf(err); e != errs.WrongState {
			t.Errorf("a sandbox of half a snapshot: %v", err)
		}
		open()
		synctest.Wait()
		_, err = m.Create(ctx, record.Spec{Runtime: "runc", Snapshot: s.ID, Limits: record.Limits{DiskBytes: 1 << 19}})
		wantCode(t, err, errs.Invalid) // it holds more
		_, err = m.Create(ctx, record.Spec{Runtime: "runc", Snapshot: "snap-dzzzzzzzzzzz"})
		wantCode(t, err, errs.NotFound)

		h.mu.Lock()
		next := "d" + strings.Repeat(string(rune('a'+h.born)), record.IDLen-1)
		h.mu.Unlock()
		open = h.gate("disk.make " + next)
		r, err := m.Create(ctx, record.Spec{Runtime: "runc", Snapshot: s.ID})
		if err != nil || r.ID != next {
			t.Fatalf("%s, %v", r.ID, err)
		}
		synctest.Wait()
		err = m.Snapshots().Delete(ctx, s.ID)
		wantWire(t, err, errs.WrongState, "SNAPSHOT::DELETE_CONFLICT")
		if !strings.Contains(err.Error(), next) {
			t.Errorf("it does not say who: %v", err)
		}
		open()
		synctest.Wait()
		// Two of one name: which is meant must be said.
		other := mustSnapshot(t, m, first, "one")
		wantCode(t, m.Snapshots().Delete(ctx, "one"), errs.WrongState)
		if err := m.Snapshots().Delete(ctx, other.ID); err != nil {
			t.Fatal(err)
		}
		if err := m.Snapshots().Delete(ctx, "one"); err != nil {
			t.Fatal(err)
		}
	})
}

// TestSnapshotName: of many who want one name for themselves, one gets it, and it is
// free again when that one is gone.
func TestSnapshotName(t *testing.T) {
	bubble(t, func(t *testing.T, _ *host, m *Manager) {
		ctx := t.Context()
		var sources []string
		for range 4 {
			r, err := m.Create(ctx, spec())
			if err != nil {
				t.Fatal(err)
			}
			sources = append(sources, r.ID)
		}
		synctest.Wait()
		var taken, refused atomic.Int32
		var wg sync.WaitGroup
		for _, id := range sources {
			wg.Go(func() {
				_, err := m.Snapshots().Create(ctx, id, record.SnapshotRequest{Name: "before", Unique: true})
				switch {
				case err == nil:
					taken.Add(1)
				case errs.Is(err, errs.Exists):
					refused.Add(1)
				default:
					t.Error(err)
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		if taken.Load() != 1 || refused.Load() != 3 {
			t.Errorf("%d have the name, %d were refused", taken.Load(), refused.Load())
		}
		_, err := m.Snapshots().Create(ctx, sources[0], record.SnapshotRequest{Name: "before", Unique: true})
		wantWire(t, err, errs.Exists, "SNAPSHOT::ALREADY_EXISTS")
		if err := m.Snapshots().Delete(ctx, "before"); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Snapshots().Create(ctx, sources[0], record.SnapshotRequest{Name: "before", Unique: true}); err != nil {
			t.Errorf("once it is free: %v", err)
		}
		synctest.Wait()
	})
}

// A long copy holds up a delete of its source for a moment only.
func TestSnapshotOfWhatIsDeleted(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		mustCreate(t, m, spec())
		h.gate("snapshot.make snap-" + first) // never opened
		s, err := m.Snapshots().Create(t.Context(), first, record.SnapshotRequest{})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		start := time.Now()
		if err := m.Delete(t.Context(), first); err != nil || time.Since(start) > hurryLimit+time.Second {
			t.Fatalf("delete: %v after %v", err, time.Since(start))
		}
		if s, err = m.Snapshots().Await(t.Context(), s.ID); err != nil || s.State != record.SnapshotFailed ||
			!strings.Contains(s.Message, "deleted") {
			t.Errorf("%+v, %v", s, err)
		}
		if err := m.Snapshots().Delete(t.Context(), s.ID); err != nil {
			t.Error(err)
		}
	})
}

// A temporary snapshot stays while its maker may need it. The next daemon deletes it.
func TestTemporarySnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		mustCreate(t, m, spec())
		temporary, err := m.Snapshots().Create(t.Context(), first, record.SnapshotRequest{Temporary: true})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		kept := mustSnapshot(t, m, first, "kept")
		time.Sleep(time.Hour)
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		if s, err := m.Snapshots().Get(t.Context(), temporary.ID); err != nil || s.State != record.SnapshotReady {
			t.Errorf("after a sweep: %+v, %v", s, err)
		}
		for i, state := range []record.SnapshotState{record.SnapshotCreating, record.SnapshotFailed, record.SnapshotDeleting} {
			half := temporary // as a daemon that died left it
			half.ID, half.State = fmt.Sprintf("snap-d%sa", strings.Repeat(string(rune('b'+i)), 10)), state
			h.snapshots[half.ID] = half
		}
		m, d := reincarnate(t, h, m)
		if all, err := m.Snapshots().List(t.Context()); err != nil || len(all) != 1 || all[0].ID != kept.ID {
			t.Errorf("the next daemon has %+v, %v", all, err)
		}
		agree(t, h, d)
		stop(t, m)
	})
}

// What was accepted and is a matter of a moment is taken, also of a sandbox that
// is deleted at once.
func TestSnapshotBeforeDelete(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		mustCreate(t, m, spec())
		open := h.gate("snapshot.make snap-" + first)
		s, err := m.Snapshots().Create(t.Context(), first, record.SnapshotRequest{})
		if err != nil {
			t.Fatal(err)
		}
		deleted := make(chan error)
		go func() { deleted <- m.Delete(t.Context(), first) }()
		synctest.Wait()
		open()
		if err := <-deleted; err != nil {
			t.Fatal(err)
		}
		if s, err = m.Snapshots().Await(t.Context(), s.ID); err != nil || s.State != record.SnapshotReady {
			t.Errorf("%+v, %v", s, err)
		}
		if err := m.Snapshots().Delete(t.Context(), s.ID); err != nil {
			t.Error(err)
		}
	})
}

// A delete that comes while the intent is written cuts the copy short all the same.
func TestSnapshotOfWhatIsDeletedAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		mustCreate(t, m, spec())
		open := h.gate("store.PutSnapshot creating snap-" + first)
		h.gate("snapshot.make snap-" + first)                                 // never opened
		go m.Snapshots().Create(t.Context(), first, record.SnapshotRequest{}) //nolint:errcheck // looked at below
		synctest.Wait()
		deleted := make(chan error)
		go func() { deleted <- m.Delete(t.Context(), first) }()
		synctest.Wait()
		start := time.Now()
		open()
		if err := <-deleted; err != nil || time.Since(start) > hurryLimit+time.Second {
			t.Fatalf("delete: %v after %v", err, time.Since(start))
		}
		if s, err := m.Snapshots().Await(t.Context(), "snap-"+first); err != nil || s.State != record.SnapshotFailed ||
			!strings.Contains(s.Message, "deleted") {
			t.Errorf("%+v, %v", s, err)
		}
		if err := m.Snapshots().Delete(t.Context(), "snap-"+first); err != nil {
			t.Error(err)
		}
	})
}

// A sandbox that could not be thawed stands still until the sweep.
func TestSnapshotThawsLater(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		mustCreate(t, m, spec())
		h.fault = fault{call: "frozen.unmake " + first + " #1", mode: errBefore}
		s, err := m.Snapshots().Create(t.Context(), first, record.SnapshotRequest{})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if s, _ = m.Snapshots().Get(t.Context(), s.ID); s.State != record.SnapshotCreating || !h.has("frozen/"+first) {
			t.Fatalf("the snapshot is %s, frozen %v", s.State, h.has("frozen/"+first))
		}
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		if s, _ = m.Snapshots().Get(t.Context(), s.ID); s.State != record.SnapshotFailed || h.has("frozen/"+first) {
			t.Errorf("the snapshot is %s, frozen %v", s.State, h.has("frozen/"+first))
		}
	})
}

// A failed one is kept for who asks why, as long as an ended sandbox, and does
// not count meanwhile.
func TestFailedSnapshotsGo(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, spec())
		m.snapshots.max = 1
		for i := range 3 {
			id := fmt.Sprintf("snap-dghost%06d", i)
			h.snapshots[id] = record.Snapshot{ID: id, State: record.SnapshotFailed, Message: "why", Changed: now()}
		}
		s := mustSnapshot(t, m, r.ID, "")
		if _, err := m.Snapshots().Create(t.Context(), r.ID, record.SnapshotRequest{}); !errs.Is(err, errs.Exhausted) {
			t.Errorf("beyond the limit: %v", err)
		}
		time.Sleep(30 * time.Minute)
		if err := m.Recover(t.Context()); err != nil || len(h.snapshots) != 4 {
			t.Errorf("%d are left, %v", len(h.snapshots), err)
		}
		time.Sleep(31 * time.Minute)
		if err := m.Recover(t.Context()); err != nil || len(h.snapshots) != 1 || h.snapshots[s.ID].State != record.SnapshotReady {
			t.Errorf("%d are left, %v", len(h.snapshots), err)
		}
	})
}

// What lies on the pool without a record is moved aside, but for a damaged
// record's, and but for another store's.
func TestSnapshotStrays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.plant("snapshot/snap-dghostghosta")
		h.plant("snapshot/snap-dghostghostb")
		h.plant("snapshot/snap-aghostghosta") // another instance's
		h.badSnapshots = []string{"snap-dghostghostb"}
		m, _ := h.boot(t, func(c *Config) { c.NoSweep = "another store" })
		if err := m.Recover(t.Context()); err != nil || len(h.strays) > 0 {
			t.Fatalf("strays %v, %v", h.strays, err)
		}
		stop(t, m)
		m, _ = h.boot(t)
		if err := m.Recover(t.Context()); err != nil || !slices.Equal(h.strays, []string{"snap-dghostghosta"}) {
			t.Fatalf("strays %v, %v", h.strays, err)
		}
		wantCode(t, func() error { _, err := m.Snapshots().Get(t.Context(), "snap-dghostghostb"); return err }(), errs.Internal)
		if err := m.Snapshots().Delete(t.Context(), "snap-dghostghostb"); err != nil || h.has("snapshot/snap-dghostghostb") ||
			len(h.badSnapshots) > 0 {
			t.Errorf("delete of a damaged one: %v", err)
		}
		stop(t, m)
	})
}

// Whoever reads the files of a snapshot keeps it; many may, and others may do what they do.
func TestSnapshotUse(t *testing.T) {
	bubble(t, func(t *testing.T, _ *host, m *Manager) {
		ctx := t.Context()
		mustCreate(t, m, spec())
		s := mustSnapshot(t, m, first, "one")
		select {
		case <-m.Snapshots().Taken():
		default:
			t.Error("nobody is told that it was taken")
		}
		_, one, err := m.Snapshots().Use(ctx, "one", "")
		if err != nil {
			t.Fatal(err)
		}
		got, two, err := m.Snapshots().Use(ctx, s.ID, "")
		if err != nil || got.ID != s.ID || !m.Snapshots().InUse(s.ID) {
			t.Fatalf("%+v, %v", got, err)
		}
		one()
		one() // twice is once
		wantWire(t, m.Snapshots().Delete(ctx, s.ID), errs.WrongState, "SNAPSHOT::DELETE_CONFLICT")
		mustCreate(t, m, record.Spec{Runtime: "runc", Snapshot: s.ID})
		two()
		// Two deletes at once: one removes it, and the other finds nothing.
		var gone, missed atomic.Int32
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				switch err := m.Snapshots().Delete(ctx, s.ID); {
				case err == nil:
					gone.Add(1)
				case errs.Is(err, errs.NotFound):
					missed.Add(1)
				default:
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if gone.Load() != 1 || missed.Load() != 1 || m.Snapshots().InUse(s.ID) {
			t.Errorf("%d deletes removed it, %d found nothing", gone.Load(), missed.Load())
		}
		_, _, err = m.Snapshots().Use(ctx, s.ID, "")
		wantCode(t, err, errs.NotFound)
	})
}

// Remove takes what has ended, also while it waits for its restart, and what is being deleted. It does
// nothing to the rest: not to a creation that is under way either.
func TestRemove(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		running, paused, ended := mustCreate(t, m, spec()), mustCreate(t, m, spec()), mustCreate(t, m, spec())
		again := mustCreate(t, m, restartable(record.RestartAlways))
		if err := m.Pause(t.Context(), paused.ID); err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{again.ID, ended.ID} {
			h.exit(id, Obituary{ExitCode: 3})
		}
		synctest.Wait()
		for id, want := range map[string]errs.Code{
			running.ID: errs.WrongState, paused.ID: errs.WrongState, ended.ID: "", again.ID: "", "dzzzzzzzzzzz": errs.NotFound,
		} {
			err := Remove(t.Context(), m, id)
			if want == "" && err != nil || want != "" && !errs.Is(err, want) {
				t.Errorf("remove %s: %v, want %q", id, err, want)
			}
		}
		coming, err := m.Create(t.Context(), spec())
		if err != nil {
			t.Fatal(err)
		}
		wantCode(t, Remove(t.Context(), m, coming.ID), errs.WrongState)
		if r, err := m.Await(t.Context(), coming.ID); err != nil || r.State != record.Running {
			t.Errorf("after a remove that was refused a creation ended as %s, %v", r.State, err)
		}
		if left, err := m.List(t.Context()); err != nil || len(left) != 3 {
			t.Errorf("%d are left, %v", len(left), err)
		}
		stop(t, m)
	})
}

// Only what has ended, and stays so, is pruned.
func TestDeleteEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		running := mustCreate(t, m, spec())
		again := mustCreate(t, m, restartable(record.RestartAlways))
		ended := mustCreate(t, m, spec())
		for _, id := range []string{again.ID, ended.ID} {
			h.exit(id, Obituary{ExitCode: 3})
		}
		synctest.Wait()
		for _, c := range []struct {
			id   string
			want bool
		}{{running.ID, false}, {again.ID, false}, {ended.ID, true}, {ended.ID, false}, {"dzzzzzzzzzzz", false}} {
			if gone, err := DeleteEnded(t.Context(), m, c.id); err != nil || gone != c.want {
				t.Errorf("%s: %v, %v", c.id, gone, err)
			}
		}
		if left, err := m.List(t.Context()); err != nil || len(left) != 2 {
			t.Errorf("%d are left, %v", len(left), err)
		}
		stop(t, m)
		m, _ = h.boot(t, func(c *Config) { c.NoSweep = "another store" })
		_, err := DeleteEnded(t.Context(), m, again.ID)
		wantCode(t, err, errs.WrongState)
		stop(t, m)
	})
}

// When the disk is full in the middle of a snapshot, its sandbox runs on, and nothing is left
// but the record that says so. TestFullPool, in pkg/snapshot, fills real pools.
func TestSnapshotOnFullDisk(t *testing.T) {
	for _, step := range []string{"snapshot.make", "snapshot.Finish"} {
		for _, how := range []mode{errBefore, errAfter} {
			bubble(t, func(t *testing.T, h *host, m *Manager) {
				mustCreate(t, m, spec())
				h.fault = fault{call: step + " snap-" + first + " #1", mode: how}
				s, err := m.Snapshots().Create(t.Context(), first, record.SnapshotRequest{Name: ""})
				if err == nil {
					s, err = m.Snapshots().Await(t.Context(), s.ID)
				}
				if err != nil || s.State != record.SnapshotFailed || s.Message == "" || h.has("snapshot/"+s.ID) {
					t.Errorf("%s: %+v, %v, on the pool %v", step, s, err, h.has("snapshot/"+s.ID))
				}
				if r, err := m.Get(t.Context(), first); err != nil || r.State != record.Running || h.has("frozen/"+first) {
					t.Errorf("%s: its sandbox is %s, frozen %v, %v", step, r.State, h.has("frozen/"+first), err)
				}
				h.fault = fault{}
				mustSnapshot(t, m, first, "")
			})
		}
	}
}
