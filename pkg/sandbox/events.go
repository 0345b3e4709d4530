package sandbox

import (
	"context"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// An Event is something that happened to a sandbox. Its Type is the state
// entered, or one of the constants below.
type Event struct {
	Time    time.Time
	Type    string
	ID      string
	Name    string
	Reason  string
	Message string
}

// The events that are no change of state, or that come after the last one.
const (
	EventRenewed = "renewed"   // it expires at another time
	EventLabels  = "labels"    // its labels changed
	EventRenamed = "renamed"   // it has another name, which the event tells
	EventUpdated = "updated"   // its limits or its network policy changed
	EventHealth  = "health"    // its reason is the new health: healthy or unhealthy
	EventRestart = "restarted" // by its policy; its reason is why it had ended
	EventPulling = "pulling"   // its message is the progress of the pull of its image
	EventDeleted = "deleted"   // its processes are dead and its ID is unknown
	EventLost    = "lost"      // the reader was too slow: it must read the whole list again
)

// eventBuffer is how far a reader may fall behind: a burst of 50 sandboxes is
// 250 events.
const eventBuffer = 512

// bus sends events to all subscribers and waits for none of them.
type bus struct {
	onEvent func(Event) // may be nil
	mu      sync.Mutex
	subs    map[*subscriber]struct{} // guarded by mu
}

type subscriber struct {
	ch   chan Event
	lost bool // EventLost is in ch
}

// subscribe returns a channel that is closed when ctx ends.
func (b *bus) subscribe(ctx context.Context) <-chan Event {
	s := &subscriber{ch: make(chan Event, eventBuffer)}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.subs == nil {
		b.subs = map[*subscriber]struct{}{}
	}
	b.subs[s] = struct{}{}
	context.AfterFunc(ctx, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.subs, s)
		close(s.ch)
	})
	return s.ch
}

func (b *bus) publish(kind string, r *record.Record) {
	e := Event{Time: now(), Type: kind, ID: r.ID, Name: r.Spec.Name, Reason: string(r.Reason), Message: r.Message}
	if b.onEvent != nil {
		b.onEvent(e)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for s := range b.subs {
		s.send(e)
	}
}

// send keeps the last place in the buffer for EventLost. While that is unread, and
// until half of the buffer is free again, events are dropped. A reader that reads the
// whole list after EventLost has missed nothing.
func (s *subscriber) send(e Event) {
	switch n := len(s.ch); {
	case s.lost && n > cap(s.ch)/2:
		return
	case n == cap(s.ch)-1:
		s.lost = true
		e = Event{Time: e.Time, Type: EventLost}
	default:
		s.lost = false
	}
	s.ch <- e // only publish sends, under the lock: there is room
}
