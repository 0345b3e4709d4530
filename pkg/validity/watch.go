package validity

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"
)

const (
	// again is how often the same end is said.
	again = 24 * time.Hour
	// slow is how often Slow is asked.
	slow = time.Hour
)

// Watch says which ends are near. Its methods may be called concurrently.
type Watch struct {
	// Quick and Slow return all ends, and an error for those that could not be read. Quick is
	// asked at each Look, Slow once an hour.
	Quick, Slow func(ctx context.Context, now time.Time) ([]End, error)
	// Tell is called with each end that is due, once a day. May be nil.
	Tell func(e End, text string)
	Log  *slog.Logger
	Now  func() time.Time // nil: time.Now

	mu    sync.Mutex
	asked time.Time            // when Slow was asked; guarded by mu, as all below
	late  []End                // what it answered
	ends  []End                // of both
	told  map[string]time.Time // when what was said
}

func (w *Watch) now() time.Time {
	if w.Now != nil {
		return w.Now()
	}
	return time.Now()
}

// Look reads all ends and says those that are due. It is cheap enough for every minute.
func (w *Watch) Look(ctx context.Context) {
	now := w.now()
	w.mu.Lock()
	defer w.mu.Unlock()
	ends, err := w.Quick(ctx, now)
	w.unread(err, now)
	// A clock that was set back asks at once.
	if since := now.Sub(w.asked); w.Slow != nil && (since < 0 || since >= slow) {
		w.late, err = w.Slow(ctx, now)
		w.unread(err, now)
		w.asked = now
	}
	w.ends = append(ends, w.late...)
	for _, e := range w.ends {
		if !e.Due(now) || !w.first(e.What+"\x00"+e.File+"\x00"+e.Name+"\x00"+e.At.String(), now) {
			continue
		}
		text := e.Text(now)
		w.Log.Warn("ends soon", "what", e.What, "name", e.Name, "at", e.At.UTC(), "text", text)
		if w.Tell != nil {
			w.Tell(e, text)
		}
	}
}

// unread says that ends could not be read. Preconditions: mu is held.
func (w *Watch) unread(err error, now time.Time) {
	if err != nil && w.first(err.Error(), now) {
		w.Log.Error("not all ends of certificates and keys are known", "err", err)
	}
}

// first reports whether something was not said within a day, and notes that it is said now.
// Preconditions: mu is held.
func (w *Watch) first(what string, now time.Time) bool {
	if w.told == nil {
		w.told = map[string]time.Time{}
	}
	for k, at := range w.told {
		if since := now.Sub(at); since < 0 || since >= again {
			delete(w.told, k)
		}
	}
	_, said := w.told[what]
	if !said {
		w.told[what] = now
	}
	return !said
}

// A Left is how long the next end of a kind is away.
type Left struct {
	What, File   string
	Left, Notice time.Duration // Left is negative if it is past
}

// Left returns, for each file, for all API keys and for all authorities, the end that is due
// first.
func (w *Watch) Left() (out []Left) {
	now := w.now()
	w.mu.Lock()
	defer w.mu.Unlock()
	ends := slices.Clone(w.ends)
	slices.SortStableFunc(ends, first)
	for _, e := range ends {
		if !slices.ContainsFunc(out, func(l Left) bool { return l.What == e.What && l.File == e.File }) {
			out = append(out, Left{e.What, e.File, e.At.Sub(now), e.Notice()})
		}
	}
	return out
}
