// Package events tells readers what happens to sandboxes.
package events

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
	Cursor  string // of this event; see Bus.Since
}

// The events that are no change of state, or that come after the last one.
const (
	Renewed = "renewed"   // it expires at another time
	Labels  = "labels"    // its labels changed
	Renamed = "renamed"   // it has another name, which the event tells
	Updated = "updated"   // its limits or its network policy changed
	Health  = "health"    // its reason is the new health: healthy or unhealthy
	Restart = "restarted" // by its policy; its reason is why it had ended
	Woken   = "woken"     // a use of it has woken it; its message tells how long it slept
	Pulling = "pulling"   // its message is the progress of the pull of its image
	Denied  = "denied"    // its network refused something, which its message tells; only for Bus.Since, and not kept
	Deleted = "deleted"   // its processes are dead, or killed and lingering, and its ID is unknown
	Pressed = "pressure"  // a disk of the host is on another rung, which is the reason (pkg/pressure): it has no ID
	Expires = "expires"   // a certificate or a key of the host, as its message says: it has no ID
	Pruned  = "pruned"    // a version of sandboxd, which is the reason, was removed: it has no ID
	Lost    = "lost"      // events are missing: the reader must read the whole list again
	// Cursor is no event: its cursor is that of the last one. It is the first that
	// Bus.Since sends.
	Cursor = ""
)

// buffer is how far a reader may fall behind: a burst of 50 sandboxes is
// 250 events.
const buffer = 512

// kept is how many events a daemon remembers. One has some hundred bytes.
const kept = 1024

// now is the wall clock without a monotonic reading, as in the records.
func now() time.Time { return time.Now().Round(0).UTC() }

// A Bus sends events to all subscribers and waits for none of them. It keeps the last ones for
// readers that come back. They die with the daemon. A reader that comes back to the next
// daemon gets all events of that, among them what it found when it started.
type Bus struct {
	OnEvent func(Event) // called for every event; may be nil, and must not block
	mu      sync.Mutex
	subs    map[*subscriber]struct{} // guarded by mu
	epoch   int64                    // when the first event or reader came, in ns; guarded by mu
	n       int64                    // events so far; guarded by mu
	recent  []Event                  // the last of them, at most kept; guarded by mu
}

// cursor is that of the n-th event. The caller holds mu.
func (b *Bus) cursor(n int64) string {
	if b.epoch == 0 {
		b.epoch = now().UnixNano()
	}
	return fmt.Sprintf("%x-%d", b.epoch, n)
}

type subscriber struct {
	ch   chan Event
	lost bool // Lost is in ch
	all  bool // it also gets Denied
}

// Since is Subscribe for a reader that has read all up to the event with this cursor, or that
// wants the events from a time on; if both are zero, only new events are sent. It begins with a
// Cursor, and with Lost if the daemon does not know any more what came first. A cursor of
// another daemon, such as the one before a restart, stands for the start of this one.
func (b *Bus) Since(ctx context.Context, cursor string, at time.Time) <-chan Event {
	b.mu.Lock()
	defer b.mu.Unlock()
	after, lost := b.after(cursor, at)
	first := b.n - int64(len(b.recent)) // events that are forgotten
	past := b.recent[max(0, after-first):]
	s := &subscriber{ch: make(chan Event, buffer+len(past)), all: true}
	s.ch <- Event{Type: Cursor, Cursor: b.cursor(after)}
	if lost {
		s.ch <- Event{Time: b.began(first), Type: Lost, Cursor: b.cursor(first)}
	}
	for _, e := range past {
		s.ch <- e
	}
	b.add(ctx, s)
	return s.ch
}

// after is the number of the last event before those that a reader wants, and whether some
// of these are forgotten. The caller holds mu.
func (b *Bus) after(cursor string, at time.Time) (n int64, lost bool) {
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
func (b *Bus) began(forgotten int64) time.Time {
	if forgotten == 0 {
		b.cursor(0) // makes the epoch
		return time.Unix(0, b.epoch)
	}
	return b.recent[0].Time
}

// Subscribe returns a channel that is closed when ctx ends.
func (b *Bus) Subscribe(ctx context.Context) <-chan Event {
	s := &subscriber{ch: make(chan Event, buffer)}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.add(ctx, s)
	return s.ch
}

// add is called with mu held.
func (b *Bus) add(ctx context.Context, s *subscriber) {
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

// ofPool says whether a sandbox took a member of its pool.
func ofPool(p *record.PoolUse) string {
	if p.Miss == "" {
		return "took a member of pool " + p.Name
	}
	return "took no member of pool " + p.Name + ": " + p.Miss
}

// Publish tells all readers that something happened to r.
func (b *Bus) Publish(kind string, r *record.Record) {
	e := Event{Time: now(), Type: kind, ID: r.ID, Name: r.Spec.Name, Reason: string(r.Reason), Message: r.Message}
	if r.State == record.Running && kind == string(record.Running) && r.Pool.Name != "" {
		e.Message = ofPool(&r.Pool)
	}
	if b.OnEvent != nil {
		b.OnEvent(e)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	e = b.keep(e)
	for s := range b.subs {
		s.send(e)
	}
}

// Tell tells those who read by Since of something that happened to the host and not to a sandbox.
// It is kept like the others, and has no ID.
func (b *Bus) Tell(kind, reason, message string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.keep(Event{Time: now(), Type: kind, Reason: reason, Message: message})
	for s := range b.subs {
		if s.all {
			s.send(e)
		}
	}
}

// keep is called with mu held. It gives an event its cursor.
func (b *Bus) keep(e Event) Event {
	b.n++
	e.Cursor = b.cursor(b.n)
	if len(b.recent) == kept {
		b.recent = append(b.recent[:0], b.recent[1:]...)
	}
	b.recent = append(b.recent, e)
	return e
}

// Pass sends an event that is not kept, to those who read by Since and keep up.
func (b *Bus) Pass(e Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for s := range b.subs {
		if s.all && !s.lost && len(s.ch) < cap(s.ch)/2 {
			s.ch <- e
		}
	}
}

// Read reports whether anybody reads by Since.
func (b *Bus) Read() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for s := range b.subs {
		if s.all {
			return true
		}
	}
	return false
}

// send keeps the last place in the buffer for Lost. While that is unread, and
// until half of the buffer is free again, events are dropped. A reader that reads the
// whole list after Lost has missed nothing.
func (s *subscriber) send(e Event) {
	switch n := len(s.ch); {
	case s.lost && n > cap(s.ch)/2:
		return
	case n == cap(s.ch)-1:
		s.lost = true
		e = Event{Time: e.Time, Type: Lost, Cursor: e.Cursor}
	default:
		s.lost = false
	}
	s.ch <- e // only Publish sends, under the lock: there is room
}
