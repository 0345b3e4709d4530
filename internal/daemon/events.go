package daemon

import (
	"context"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
)

// recentEvents is how many events are kept for clients that ask for earlier ones. An
// event has some hundred bytes.
const recentEvents = 1024

// recent keeps the last events of all sandboxes, in memory and in order.
type recent struct {
	mu    sync.Mutex
	whole time.Time // since then no event is missing; guarded by mu, as is the next
	ring  []wire.Event
}

func (r *recent) note(e wire.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ring) == recentEvents {
		r.whole = r.ring[0].Time.Add(1)
		r.ring = append(r.ring[:0], r.ring[1:]...)
	}
	r.ring = append(r.ring, e)
}

// since returns the events from a time on. If older ones may be missing, the first is
// EventLost.
func (r *recent) since(at time.Time) (past []wire.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at.Before(r.whole) {
		past = append(past, wire.Event{Time: r.whole.UTC(), Type: sandbox.EventLost})
	}
	for _, e := range r.ring {
		if !e.Time.Before(at) {
			past = append(past, e)
		}
	}
	return past
}

// Subscribe returns events as API types: those from since on, unless it is zero, and
// then what happens.
func (a *admitted) Subscribe(ctx context.Context, since time.Time) <-chan wire.Event {
	in := a.Manager.Subscribe(ctx) // before the past is read, so that nothing is missed
	var past []wire.Event
	if !since.IsZero() {
		past = a.recent.since(since)
	}
	out := make(chan wire.Event)
	go func() {
		defer close(out)
		sent := make(map[wire.Event]bool, len(past)) // what came in between is in both
		for _, e := range past {
			sent[e] = true
			if !offer(ctx, out, e) {
				return
			}
		}
		for e := range in {
			if e := wire.Event(e); !sent[e] && !offer(ctx, out, e) {
				return
			}
		}
	}()
	return out
}

func offer(ctx context.Context, out chan<- wire.Event, e wire.Event) bool {
	select {
	case out <- e:
		return true
	case <-ctx.Done():
		return false
	}
}
