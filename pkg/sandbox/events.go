package sandbox

import (
	"context"
	"fmt"
	"slices"
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
	EventRenamed = "renamed"   // it has another name, which the event tells
	EventUpdated = "updated"   // its limits or its network policy changed
	EventHealth  = "health"    // its reason is the new health: healthy or unhealthy
	EventRestart = "restarted" // by its policy; its reason is why it had ended
	EventPulling = "pulling"   // its message is the progress of the pull of its image
	EventDenied  = "denied"    // its network refused something, which its message tells; only for EventsSince, and not kept
	EventDeleted = "deleted"   // its processes are dead, or killed and lingering, and its ID is unknown
	EventLost    = "lost"      // events are missing: the reader must read the whole list again
	// EventCursor is no event: its cursor is that of the last one. It is the first that
	// EventsSince sends.
	EventCursor = ""
)

// eventBuffer is how far a reader may fall behind: a burst of 50 sandboxes is
// 250 events.
const eventBuffer = 512

// eventsKept is how many events a daemon remembers. One has some hundred bytes.
const eventsKept = 1024

// bus sends events to all subscribers and waits for none of them. It keeps the last ones for
// readers that come back. They die with the daemon. A reader that comes back to the next
// daemon gets all events of that, among them what it found when it started.
type bus struct {
	onEvent func(Event) // may be nil
	mu      sync.Mutex
	subs    map[*subscriber]struct{} // guarded by mu
	epoch   int64                    // when the first event or reader came, in ns; guarded by mu
	n       int64                    // events so far; guarded by mu
	recent  []Event                  // the last of them, at most eventsKept; guarded by mu
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
	all  bool // it also gets EventDenied
}

// EventsSince is Manager.Subscribe for a reader that has read all up to the event with this
// cursor, or that wants the events from a time on; if both are zero, only new events are
// sent. It begins with an EventCursor, and with EventLost if the daemon does not know any
// more what came first. A cursor of another daemon, such as the one before a restart, stands
// for the start of this one.
func EventsSince(ctx context.Context, m *Manager, cursor string, at time.Time) <-chan Event {
	return m.life.bus.since(ctx, cursor, at)
}

func (b *bus) since(ctx context.Context, cursor string, at time.Time) <-chan Event {
	b.mu.Lock()
	defer b.mu.Unlock()
	after, lost := b.after(cursor, at)
	first := b.n - int64(len(b.recent)) // events that are forgotten
	past := b.recent[max(0, after-first):]
	s := &subscriber{ch: make(chan Event, eventBuffer+len(past)), all: true}
	s.ch <- Event{Type: EventCursor, Cursor: b.cursor(after)}
	if lost {
		s.ch <- Event{Time: b.began(first), Type: EventLost, Cursor: b.cursor(first)}
	}
	for _, e := range past {
		s.ch <- e
	}
	b.add(ctx, s)
	return s.ch
}

// after is the number of the last event before those that a reader wants, and whether some
// of these are forgotten. The caller holds mu.
func (b *bus) after(cursor string, at time.Time) (n int64, lost bool) {
	first := b.n - int64(len(b.recent))
	switch {
	case cursor != "":
		if epoch, text, _ := strings.Cut(cursor, "-"); epoch == fmt.Sprintf("%x", b.epoch) {
			if i, err := strconv.ParseInt(text, 10, 64); err == nil && i >= 0 {
				n = min(i, b.n)
			}
		}
		return n, n < first
	case !at.IsZero():
		old := slices.IndexFunc(b.recent, func(e Event) bool { return !e.Time.Before(at) })
		if old < 0 {
			old = len(b.recent)
		}
		return first + int64(old), old == 0 && at.Before(b.began(first))
	}
	return b.n, false
}

// began is the time from which on all events are kept, if the first so many are forgotten.
// The caller holds mu.
func (b *bus) began(forgotten int64) time.Time {
	if forgotten == 0 {
		b.cursor(0) // makes the epoch
		return time.Unix(0, b.epoch)
	}
	return b.recent[0].Time
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
	if len(b.recent) == eventsKept {
		b.recent = append(b.recent[:0], b.recent[1:]...)
	}
	b.recent = append(b.recent, e)
	for s := range b.subs {
		s.send(e)
	}
}

// Denied tells the readers of events that the network of a sandbox refused something. Guests
// cause that, so such an event is not kept, and only readers that keep up get it: it must
// displace no other event. The caller limits how many there are.
func Denied(m *Manager, id, what string) {
	b := &m.life.bus
	if !b.read() {
		return
	}
	r, err := m.Get(context.Background(), id)
	if err != nil {
		return // it is gone, and nobody asks for it
	}
	b.pass(Event{Time: now(), Type: EventDenied, ID: id, Name: r.Spec.Name, Message: what})
}

// pass sends an event that is not kept.
func (b *bus) pass(e Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for s := range b.subs {
		if s.all && !s.lost && len(s.ch) < cap(s.ch)/2 {
			s.ch <- e
		}
	}
}

// read reports whether anybody reads by EventsSince.
func (b *bus) read() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for s := range b.subs {
		if s.all {
			return true
		}
	}
	return false
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
