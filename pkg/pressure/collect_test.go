package pressure

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// house holds what a Collector may remove.
type house struct {
	boxes   []*record.Record
	snaps   []record.Snapshot
	pruned  int
	gone    []string
	refuses error // deletions of snapshots
}

func (h *house) Deadline(r record.Record) time.Time { return r.Expires }

func (h *house) DeleteEnded(_ context.Context, id string) (bool, error) {
	h.gone = append(h.gone, id)
	return true, nil
}

func (h *house) List(context.Context) ([]*record.Record, error) { return h.boxes, nil }

func (h *house) Prune(_ context.Context, all bool, before time.Time) (image.Pruned, error) {
	if all || !before.IsZero() {
		return image.Pruned{}, errors.New("images that nobody uses are somebody's")
	}
	h.pruned++
	return image.Pruned{Bytes: 1}, nil
}

type shelf struct{ *house }

func (s shelf) List(context.Context) ([]record.Snapshot, error) { return s.snaps, nil }

func (s shelf) Delete(_ context.Context, id string) error {
	if s.refuses == nil {
		s.gone = append(s.gone, id)
	}
	return s.refuses
}

// TestCollector: only what would go anyway goes, the earliest first.
func TestCollector(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		time.Sleep(time.Hour)
		h := &house{}
		box := func(id string, state record.State, reason record.Reason, changed, deadline time.Duration) *record.Record {
			r := &record.Record{ID: id, State: state, Reason: reason, Changed: began.Add(changed)}
			if deadline > 0 {
				r.Expires = began.Add(deadline)
			}
			h.boxes = append(h.boxes, r)
			return r
		}
		box("later", record.Ended, record.Exited, 30*time.Minute, 90*time.Minute)
		box("first", record.Ended, record.OOM, 10*time.Minute, 70*time.Minute)
		box("running", record.Running, "", 0, 61*time.Minute)
		box("stopped", record.Ended, record.Stopped, 0, 61*time.Minute)
		box("just", record.Ended, record.Exited, time.Hour-readable+time.Second, 2*time.Hour)
		box("kept", record.Ended, record.Exited, 0, 0)
		box("restarts", record.Ended, record.RuntimeCrash, 0, 61*time.Minute).Spec.Restart = record.Restart{Policy: record.RestartAlways}
		for _, s := range []record.Snapshot{
			{ID: "ready", State: record.SnapshotReady},
			{ID: "failed", State: record.SnapshotFailed},
			{ID: "now", State: record.SnapshotFailed, Changed: time.Now()},
			{ID: "temporary", State: record.SnapshotFailed, Temporary: true},
		} {
			if s.Changed.IsZero() {
				s.Changed = began
			}
			h.snaps = append(h.snaps, s)
		}
		prepared, why := 0, ""
		c := &Collector{
			Sandboxes: h, Snapshots: shelf{h}, Images: h, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
			Prepared: func(context.Context) bool { prepared++; return true }, NoSweep: func() string { return why },
		}
		collect := func(name string, r Rung, want ...string) {
			t.Helper()
			if err := c.Collect(t.Context(), Space{Name: name}, r); err != nil {
				t.Error(err)
			}
			if !slices.Equal(h.gone, want) {
				t.Errorf("%s on %v: removed %q, want %q", name, r, h.gone, want)
			}
			h.gone = nil
		}
		collect(Pool, Collect, "failed", "first", "later")
		if prepared != 0 || h.pruned != 0 {
			t.Errorf("%d, %d", prepared, h.pruned)
		}
		collect(State, Collect)
		collect(Pool, Refuse, "failed", "first", "later")
		if prepared != 1 || h.pruned != 1 {
			t.Errorf("prepared slots were released %d times, images pruned %d times", prepared, h.pruned)
		}
		h.refuses = errs.New(errs.WrongState, "in use")
		collect(Pool, Rest, "first", "later")
		h.refuses = errors.New("an I/O error")
		if err := c.Collect(t.Context(), Space{Name: Pool}, Collect); !errors.Is(err, h.refuses) || len(h.gone) != 2 {
			t.Errorf("%v; removed %q", err, h.gone)
		}
		h.gone, h.refuses = nil, nil
		why = "the store is another's"
		collect(Pool, Rest)
		collect(State, Rest)

		why, h.boxes, h.snaps = "", nil, nil
		for i := range 100 {
			box(fmt.Sprintf("%03d", i), record.Ended, record.Exited, time.Duration(i)*time.Second, 2*time.Hour)
		}
		if err := c.Collect(t.Context(), Space{Name: Pool}, Collect); err != nil || len(h.gone) != atOnce ||
			!strings.HasPrefix(h.gone[31], "031") {
			t.Errorf("of a hundred a round removed %q, %v", h.gone, err)
		}
	})
}
