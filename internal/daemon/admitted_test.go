package daemon

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/admission"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestQueued: the answer to a creation waits for none whose turn or image is to come.
func TestQueued(t *testing.T) {
	queue := admission.NewQueue(1)
	a := &admitted{gate: &admission.Gate{Queue: queue}}
	here := record.Spec{ImageURI: "python:3", Image: record.Image{Layers: []string{"sha256:a"}}}
	first, second, far := &record.Record{ID: "first", Spec: here}, &record.Record{ID: "second", Spec: here}, &record.Record{ID: "far"}
	far.Spec.ImageURI = "registry.example.com/far"
	now, later := queue.Enter(t.Context(), first.ID), queue.Enter(t.Context(), second.ID)
	defer later.Done()
	if a.Queued(first) || !a.Queued(second) || !a.Queued(far) {
		t.Errorf("first %t, second %t, far %t", a.Queued(first), a.Queued(second), a.Queued(far))
	}
	now.Done()
	<-later.Came()
	if a.Queued(second) {
		t.Error("the turn of the second has come")
	}
	restored := &record.Record{ID: "restored", Spec: record.Spec{Snapshot: "snap-x"}}
	if a.Queued(restored) {
		t.Error("one of a snapshot needs no image")
	}
}

// TestImageRoom: a memory image may take what is free beyond the reserve, to the byte, and the
// refusal says how much there is.
func TestImageRoom(t *testing.T) {
	const mib = 1 << 20
	unknown := errors.New("statfs")
	var failed error
	room := imageRoom(func() (free, total int64, err error) { return 500 * mib, 900 * mib, failed }, 100*mib)
	if err := room(400*mib, 0); err != nil {
		t.Error(err)
	}
	if err := room(100*mib, 300*mib); err != nil {
		t.Error(err)
	}
	for others, promised := range map[string]int64{"500 MiB free, and": 0, "being written may take 200 MiB of it": 200 * mib} {
		err := room(400*mib-promised+1, promised)
		if !errs.Is(err, errs.Exhausted) {
			t.Fatalf("got %v", err)
		}
		for _, words := range []string{"500 MiB free", "100 MiB must stay free", "storage.reserve", others} {
			if !strings.Contains(err.Error(), words) {
				t.Errorf("%q is not in: %v", words, err)
			}
		}
	}
	if failed = unknown; !errors.Is(room(0, 0), unknown) {
		t.Error("a pool of unknown size has room")
	}
}

// TestImageBytes: only a sandbox that is being created with memory counts with an image.
func TestImageBytes(t *testing.T) {
	const mib = 1 << 20
	var failed error
	has := int64(-1)
	held := func(string) (int64, error) {
		if has < 0 {
			return 0, errors.New("no cgroup")
		}
		return has, nil
	}
	bytes := imageBytes(func(_ context.Context, id string) (record.Snapshot, bool, error) {
		switch {
		case failed != nil:
			return record.Snapshot{}, false, failed
		case id != "snap-a":
			return record.Snapshot{}, false, nil
		}
		return record.Snapshot{Memory: &record.Memory{MemoryImage: record.MemoryImage{
			Files: []record.MemoryFile{{Bytes: 300 * mib}, {Bytes: mib}},
		}}}, true, nil
	}, held)
	of := func(state record.State, snapshot string, memory bool) int64 {
		return bytes(&record.Record{State: state, Spec: record.Spec{Snapshot: snapshot, Memory: memory}})
	}
	for i, got := range []int64{
		of(record.Creating, "snap-a", true) - 301*mib, of(record.Creating, "snap-a", false), of(record.Creating, "snap-b", true),
		of(record.Starting, "snap-a", true), of(record.Creating, "", false),
	} {
		if got != 0 {
			t.Errorf("%d: %d bytes too many", i, got)
		}
	}
	for _, has = range []int64{0, mib, 301 * mib, 400 * mib} { // what it has read no longer counts: the host has given it
		if got := of(record.Creating, "snap-a", true); got != max(0, 301*mib-has) {
			t.Errorf("%d bytes, with %d read", got, has)
		}
	}
	if failed = errors.New("no store"); of(record.Creating, "snap-a", true) != 0 {
		t.Error("what cannot be read counts")
	}
}

// TestRestoreAdmitted: a sandbox that is to begin with a memory image needs the memory of the image.
func TestRestoreAdmitted(t *testing.T) {
	const mib = 1 << 20
	drain, err := admission.OpenDrain(filepath.Join(t.TempDir(), "draining"))
	if err != nil {
		t.Fatal(err)
	}
	a := &admitted{
		may: func(context.Context) error { return nil },
		gate: &admission.Gate{
			Limits: admission.Limits{MaxSandboxes: 10, MemoryReserve: 100 * mib},
			Host: admission.Host{
				Sandboxes:   func(context.Context) ([]*record.Record, error) { return nil, nil },
				Deadline:    func(record.Record) time.Time { return time.Time{} },
				MemoryBytes: func() (int64, error) { return 300 * mib, nil },
				StartBytes:  func(string) int64 { return 28 * mib },
				ImageBytes: imageBytes(func(context.Context, string) (record.Snapshot, bool, error) {
					return record.Snapshot{Memory: &record.Memory{MemoryImage: record.MemoryImage{
						Files: []record.MemoryFile{{Bytes: 250 * mib}},
					}}}, true, nil
				}, func(string) (int64, error) { return 0, errors.New("no cgroup") }),
			},
			Queue: admission.NewQueue(1),
			Drain: drain,
		},
	}
	_, err = a.Create(t.Context(), record.Spec{Runtime: "runsc", Snapshot: "snap-a", Memory: true}) // else it would reach the Manager
	if !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(), "this one needs 250 MiB") {
		t.Errorf("got %v", err)
	}
}
