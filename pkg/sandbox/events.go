package sandbox

import (
	"context"
	"fmt"
	"strconv"
	"strings"
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
	Cursor  string // of this event; see EventsSince
}

// The events that are no change of state, or that come after the last one.
const (
	EventRenewed = "renewed"   // it expires at another time
	EventLabels  = "labels"    // its labels changed
	EventUpdated = "updated"   // its limits or its network policy changed
	EventHealth  = "health"    // its reason is the new health: healthy or unhealthy
	EventRestart = "restarted" // by its policy; its reason is why it had ended
	EventPulling = "pulling"   // its message is the progress of the pull of its image
	EventDeleted = "deleted"   // its processes are dead, or killed and lingering, and its ID is unknown
	EventLost    = "lost"      // events are missing: the reader must read the whole list again
	// EventCursor is no event: its cursor is that of the last one. It is the first that
	// EventsSince sends.
	EventCursor = ""
)

// eventBuffer is how far a reader may fall behind: a burst of 50 sandboxes is
// 250 events.
const eventBuffer = 512

// bus sends events to all subscribers and waits for none of them. It keeps the last ones for
// readers that come back. They die with the daemon. A reader that comes back to the next
// daemon gets all events of that, among them what it found when it started.
type bus struct {
	onEvent func(Event) // may be nil
	mu      sync.Mutex
	subs    map[*subscriber]struct{} // guarded by mu
	epoch   int64                    // when the first event or reader came, in ns; guarded by mu
	n       int64                    // events so far; guarded by mu
	recent  []Event                  // the last of them, at most eventBuffer/2; guarded by mu
}

// cursor is that of the n-th event. The caller holds mu.
func (b *bus) cursor(n int64) string {
	if b.epoch == 0 {
		b.epoch = now().UnixNano()
	}
	return fmt.Sprintf("%x-%d", b.epoch, n)
}

type subscriber struct {
	ch   chan Event
	lost bool // EventLost is in ch
}

// EventsSince is Manager.Subscribe for a reader that has read all up to the event with this
// cursor; empty: none, and only new events are sent. It begins with an EventCursor, and with
// EventLost if the daemon does not know any more what came after the cursor. A cursor of
// another daemon, such as the one before a restart, stands for the start of this one.
func EventsSince(ctx context.Context, m *Manager, cursor string) <-chan Event {
	return m.life.bus.since(ctx, cursor)
}

func (b *bus) since(ctx context.Context, cursor string) <-chan Event {
	s := &subscriber{ch: make(chan Event, eventBuffer)}
	b.mu.Lock()
	defer b.mu.Unlock()
	after := b.n
	if cursor != "" {
		after = 0
		if epoch, n, _ := strings.Cut(cursor, "-"); epoch == fmt.Sprintf("%x", b.epoch) {
			if i, err := strconv.ParseInt(n, 10, 64); err == nil && i >= 0 {
				after = min(i, b.n)
			}
		}
	}
	s.ch <- Event{Type: EventCursor, Cursor: b.cursor(after)}
	first := b.n - int64(len(b.recent)) // events that are forgotten
	if after < first {
		s.ch <- Event{Time: now(), Type: EventLost, Cursor: b.cursor(first)}
	}
	for _, e := range b.recent[max(0, after-first):] {
		s.ch <- e
	}
	b.add(ctx, s)
	return s.ch
}

// subscribe returns a channel that is closed when ctx ends.
func (b *bus) subscribe(ctx context.Context) <-chan Event {
	s := &subscriber{ch: make(chan Event, eventBuffer)}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.add(ctx, s)
	return s.ch
}

// add is called with mu held.
func (b *bus) add(ctx context.Context, s *subscriber) {
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
}

func (b *bus) publish(kind string, r *record.Record) {
	e := Event{Time: now(), Type: kind, ID: r.ID, Name: r.Spec.Name, Reason: string(r.Reason), Message: r.Message}
	if b.onEvent != nil {
		b.onEvent(e)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.n++
	e.Cursor = b.cursor(b.n)
	if len(b.recent) == eventBuffer/2 {
		b.recent = append(b.recent[:0], b.recent[1:]...)
	}
	b.recent = append(b.recent, e)
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
		e = Event{Time: e.Time, Type: EventLost, Cursor: e.Cursor}
	default:
		s.lost = false
	}
	s.ch <- e // only publish sends, under the lock: there is room
}
