package table

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// world notes what rows do.
type world struct {
	mu   sync.Mutex
	done []string
	fail map[string]error
}

func (w *world) does(what string) func(context.Context, *record.Record) error {
	return func(ctx context.Context, _ *record.Record) error {
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		w.done = append(w.done, what)
		return w.fail[what]
	}
}

// rows are a house: walls and pipes stand on the ground, the roof on walls.
func (w *world) rows() []Row {
	row := func(name string, after ...string) Row {
		return Row{Name: name, After: after, Limit: time.Minute, Up: w.does("up " + name), Down: w.does("down " + name)}
	}
	return []Row{row("ground"), row("walls", "ground"), row("pipes", "ground"), row("roof", "walls")}
}

func names(steps []Step) (all []string) {
	for _, s := range steps {
		all = append(all, s.Name)
	}
	return all
}

// TestOrder: a row comes up when all are up that it stands on, and goes before them; others go at the
// same time.
func TestOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{}
		rows, r, start := w.rows(), &record.Record{}, time.Now()
		steps, err := Acquire(t.Context(), rows, r)
		if err != nil || !slices.Equal(names(steps), []string{"ground", "walls", "pipes", "roof"}) {
			t.Errorf("up: %v, %v", steps, err)
		}
		if took := time.Since(start); took != 3*time.Second { // walls and pipes together
			t.Errorf("they took %v", took)
		}
		at := func(what string) int { return slices.Index(w.done, what) }
		if at("up ground") != 0 || at("up roof") < at("up walls") {
			t.Errorf("up: %v", w.done)
		}
		w.done = nil
		if _, err := Release(t.Context(), rows, r); err != nil || len(w.done) != 4 || at("down ground") != 3 ||
			at("down walls") < at("down roof") {
			t.Errorf("down: %v, %v", w.done, err)
		}
		rows[1].Wanted = func(*record.Record) bool { return false }
		if steps, err := Acquire(t.Context(), rows, r); err != nil || !slices.Equal(names(steps), []string{"ground", "pipes", "roof"}) {
			t.Errorf("without walls: %v, %v", steps, err)
		}
	})
}

// TestErrors: the first error ends what comes up; what goes away goes, whatever fails.
func TestErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rain, frost := errors.New("rain"), errors.New("frost")
		w := &world{fail: map[string]error{"up walls": rain, "down walls": rain, "down ground": frost}}
		rows, r := w.rows(), &record.Record{}
		rows[2].Up = func(ctx context.Context, _ *record.Record) error { <-ctx.Done(); return context.Cause(ctx) } // endless
		_, err := Acquire(t.Context(), rows, r)
		s, ok := errors.AsType[*StepError](err)
		if !errors.Is(err, rain) || !ok || s.Name != "walls" || slices.Contains(w.done, "up roof") {
			t.Errorf("up: %v, %v", w.done, err)
		}
		if _, err := Release(t.Context(), rows, r); !errors.Is(err, rain) || !errors.Is(err, frost) || len(w.done) != 2+4 {
			t.Errorf("down: %v, %v", w.done, err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(frost)
		if steps, err := Acquire(ctx, rows, r); !errors.Is(err, frost) || len(steps) > 0 {
			t.Errorf("after the end: %v, %v", steps, err)
		}
	})
}

// TestLimit: a row that hangs is given up, later if it reads memory.
func TestLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := func(ctx context.Context, _ *record.Record) error { <-ctx.Done(); return ctx.Err() }
		row := Row{Name: "runtime", Limit: time.Minute, Recall: time.Hour, Up: hang}
		for state, want := range map[record.State]time.Duration{record.Creating: time.Minute, record.Waking: time.Hour} {
			start := time.Now()
			_, err := Acquire(t.Context(), []Row{row}, &record.Record{State: state})
			if !errors.Is(err, ErrTooLong) || !strings.HasPrefix(err.Error(), "runtime: ") || time.Since(start) != want {
				t.Errorf("%s: %v after %v", state, err, time.Since(start))
			}
		}
	})
}

// TestBring: how a row comes up for slots, members, and those that take them.
func TestBring(t *testing.T) {
	row := func(fit, claim bool) Row {
		x := Row{Name: "x", Up: func(context.Context, *record.Record) error { return nil }}
		if fit {
			x.Fit = x.Up
		}
		if claim {
			x.Claim = x.Up
		}
		return x
	}
	slot, taken := record.Record{State: record.Prepared}, record.Record{State: record.Creating, Prepared: true}
	member := slot
	member.Pool.Name = "py"
	for _, c := range []struct {
		row  Row
		r    record.Record
		want string
	}{
		{row(false, false), record.Record{State: record.Creating}, "up:"},
		{row(true, true), record.Record{State: record.Creating}, "up:"},
		{row(true, true), slot, "prepare:"},
		{row(true, true), taken, "fit:"},
		{row(true, true), member, "member:"},
		{row(false, false), taken, "up:"},
	} {
		if verb, _ := c.row.bring(&c.r); verb != c.want {
			t.Errorf("%+v: %q, want %q", c.r, verb, c.want)
		}
	}
}
