package sandbox

import (
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func mustKeepMemory(t *testing.T, m *Manager, sandbox string) record.Snapshot {
	t.Helper()
	s, err := m.Snapshots().Create(t.Context(), sandbox, record.SnapshotRequest{Memory: true})
	if err == nil {
		s, err = m.Snapshots().Await(t.Context(), s.ID)
	}
	if err != nil || s.State != record.SnapshotReady || s.Memory.Bytes() != 200<<20 {
		t.Fatalf("snapshot: %v, %+v", err, s)
	}
	return s
}

// withMemory is the specification of a sandbox whose memory is kept.
func withMemory() record.Spec {
	return record.Spec{
		Runtime: "runsc", Entrypoint: []string{"serve"}, Limits: record.Limits{MemoryBytes: 256 << 20, Pids: 100},
		Image: record.Image{Digest: "sha256:1", Layers: []string{"sha256:2"}},
	}
}

// TestMemory: the memory is kept while the sandbox stands still, with its disk. A sandbox that
// begins with it is restored and adopted, and afterwards starts as any other.
func TestMemory(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx := t.Context()
		a := mustCreate(t, m, withMemory())
		h.calls = nil
		snap := mustKeepMemory(t, m, a.ID)
		noReads := func(c string) bool { return strings.HasPrefix(c, "store.Get") || c == "store.Snapshots" }
		want := []string{
			"store.PutSnapshot creating " + snap.ID, "snapshot.Prepare", "memory.make " + snap.ID, "cgroup.MemoryHeld " + a.ID,
			"cgroup.Limit " + a.ID, "cgroup.LimitCPU " + a.ID, "memory.Still " + a.ID,
			"snapshot.make " + snap.ID, "memory.Checkpoint " + a.ID, "memory.Finish " + snap.ID, "cgroup.Limit " + a.ID,
			"cgroup.LimitCPU " + a.ID, "snapshot.Finish " + snap.ID,
			"store.PutSnapshot ready " + snap.ID,
		}
		if got := slices.DeleteFunc(slices.Clone(h.calls), noReads); !slices.Equal(got, want) {
			t.Errorf("calls\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		if snap.Memory.Token != a.Token || snap.Memory.Spec.Entrypoint[0] != "serve" || snap.Memory.Needs.Build == "" {
			t.Errorf("the record has %+v", snap.Memory)
		}

		h.calls = nil
		spec := withMemory()
		spec.Snapshot, spec.Memory, spec.MemoryBytes = snap.ID, true, 136<<20 // and the head-room
		b := mustCreate(t, m, spec)
		for _, call := range []string{"memory.Check " + snap.ID, "memory.Restore " + b.ID, "agent.Adopt " + b.ID} {
			if times(call, h.calls) != 1 {
				t.Errorf("%q was called %d times", call, times(call, h.calls))
			}
		}
		if n := times("runsc.Start "+b.ID, h.calls) + times("agent.Ready "+b.ID, h.calls); n != 0 {
			t.Error("it was started")
		}
		h.calls = nil
		if err := m.Stop(ctx, b.ID, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Start(ctx, b.ID); err != nil {
			t.Fatal(err)
		}
		if r, err := m.Await(ctx, b.ID); err != nil || r.State != record.Running || times("runsc.Start "+b.ID, h.calls) != 1 {
			t.Errorf("started again: %v, %s", err, r.State)
		}
	})
}

// TestMemoryRefused: what cannot be kept or restored is refused before anything is made, and
// the refusal says why.
func TestMemoryRefused(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx := t.Context()
		a := mustCreate(t, m, withMemory())
		kept, files := mustKeepMemory(t, m, a.ID), mustSnapshot(t, m, a.ID, "")
		other := kept
		other.ID, other.Memory = record.NewSnapshotID('d'), new(*kept.Memory)
		other.Memory.Needs.Build = "2"
		h.snapshots[other.ID] = other

		refused := func(name string, code errs.Code, words string, change func(*record.Spec)) {
			t.Helper()
			s := withMemory()
			s.Snapshot, s.Memory = kept.ID, true
			change(&s)
			_, err := m.Create(ctx, s)
			if !errs.Is(err, code) || !strings.Contains(err.Error(), words) {
				t.Errorf("%s: got %v, want %s with %q", name, err, code, words)
			}
		}
		refused("no memory", errs.Invalid, "has files and no memory", func(s *record.Spec) { s.Snapshot = files.ID })
		refused("another build", errs.Unavailable, "another build", func(s *record.Spec) { s.Snapshot = other.ID })
		refused("another runtime", errs.Unsupported, "need runtime runsc", func(s *record.Spec) { s.Runtime = "runc" })
		refused("less memory", errs.Invalid, "200 MiB, more than the limit of 135 MiB", func(s *record.Spec) { s.MemoryBytes = 135 << 20 })
		for words, change := range map[string]func(*record.Spec){
			`differ: entrypoint; the source's entrypoint is ["serve"], and runs on: leave yours out`: func(s *record.Spec) {
				s.Entrypoint = []string{"serve", "more"}
			},
			"differ: security":           func(s *record.Spec) { s.Security = record.SecurityStrict },
			"differ: read-only root":     func(s *record.Spec) { s.ReadOnly = true },
			"differ: tmpfs":              func(s *record.Spec) { s.Tmpfs = []record.Tmpfs{{Path: "/x"}} },
			"differ: volumes":            func(s *record.Spec) { s.Volumes = []record.VolumeMount{{Claim: "v", Create: true, Path: "/v"}} },
			"differ: credential proxy":   func(s *record.Spec) { s.Inspect = true },
			"differ: limit of processes": func(s *record.Spec) { s.Pids = 50 },
			"differ: size of /dev/shm":   func(s *record.Spec) { s.ShmBytes = 1 << 20 },
		} {
			refused(words, errs.Invalid, words, change)
		}
		for i := range h.records {
			if i != a.ID {
				t.Errorf("a sandbox was made: %s", i)
			}
		}

		b := mustCreate(t, m, record.Spec{Runtime: "runc"})
		_, err := m.Snapshots().Create(ctx, b.ID, record.SnapshotRequest{Memory: true})
		wantCode(t, err, errs.Unsupported)
		if err := m.Pause(ctx, a.ID); err != nil {
			t.Fatal(err)
		}
		_, err = m.Snapshots().Create(ctx, a.ID, record.SnapshotRequest{Memory: true})
		wantCode(t, err, errs.WrongState)
		if len(h.snapshots) != 3 {
			t.Errorf("%d snapshots have records", len(h.snapshots))
		}
		delete(h.snapshots, other.ID) // it was never on the pool
	})
}

// TestMemoryDamaged: an image that is not whole starts nothing, and the sandbox says why.
func TestMemoryDamaged(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		snap := mustKeepMemory(t, m, mustCreate(t, m, withMemory()).ID)
		h.remove("memory/" + snap.ID)
		h.calls = nil
		spec := withMemory()
		spec.Snapshot, spec.Memory = snap.ID, true
		r, err := m.Create(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		r, err = m.Await(t.Context(), r.ID)
		if err != nil || r.State != record.Ended || r.Reason != record.CreateFailed ||
			!strings.Contains(r.Message, "the memory image is damaged") {
			t.Errorf("%v: %s %s: %s", err, r.State, r.Reason, r.Message)
		}
		if times("memory.Restore "+r.ID, h.calls) != 0 {
			t.Error("it was restored")
		}
		h.plant("memory/" + snap.ID) // so that host and store agree
	})
}

// TestMemoryFails: a checkpoint that fails leaves the sandbox running, and nothing of an image.
func TestMemoryFails(t *testing.T) {
	for _, call := range []string{"memory.make", "memory.Still", "snapshot.make", "memory.Checkpoint", "memory.Finish", "snapshot.Finish"} {
		bubble(t, func(t *testing.T, h *host, m *Manager) {
			r := mustCreate(t, m, withMemory())
			h.failAll = call
			s, err := m.Snapshots().Create(t.Context(), r.ID, record.SnapshotRequest{Memory: true})
			if err == nil {
				s, err = m.Snapshots().Await(t.Context(), s.ID)
			}
			if err != nil || s.State != record.SnapshotFailed || s.Message == "" {
				t.Errorf("%s: %v: %s: %s", call, err, s.State, s.Message)
			}
			if got, _ := h.record(r.ID); got.State != record.Running || !h.has("process/"+r.ID) || h.has("memory/"+s.ID) {
				t.Errorf("%s: the sandbox is %s, and its memory is kept: %v", call, got.State, h.has("memory/"+s.ID))
			}
		})
	}
}

// TestMemoryNoRoom: a pool without room for the image refuses the snapshot before anything stands
// still or is written. A snapshot of the files needs no such room.
func TestMemoryNoRoom(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, withMemory())
		h.held[r.ID] = 90 << 20
		m.life.cfg.ImageRoom = func(bytes, _ int64) error {
			if bytes != 90<<20 {
				t.Errorf("it is asked for room of %d bytes", bytes)
			}
			return errs.New(errs.Exhausted, "the pool is full")
		}
		h.calls = nil
		_, err := m.Snapshots().Create(t.Context(), r.ID, record.SnapshotRequest{Memory: true})
		wantCode(t, err, errs.Exhausted)
		did := slices.DeleteFunc(slices.Clone(h.calls), func(c string) bool { return strings.HasPrefix(c, "store.Get") })
		if want := []string{"cgroup.MemoryHeld " + r.ID}; !slices.Equal(did, want) || len(h.snapshots) != 0 {
			t.Errorf("before it is refused: %q, %d records", did, len(h.snapshots))
		}
		mustSnapshot(t, m, r.ID, "files")
	})
}
