// Package history keeps the recent events of each sandbox, for people who ask about its
// state. It is in memory and bounded. There is a ring for each kind of event, so that a
// thousand refused flows cannot push out the events of a start. It begins anew with the
// daemon; facts that must survive are in the record.
package history

import (
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
)

// Kind is a kind of event.
type Kind uint8

// The kinds.
const (
	State     Kind = iota // a sandbox entered a state, expires at another time, …
	Operation             // the daemon finished something on it
	Network               // the egress refused a flow
	kinds
)

// String is the name of the kind in a line.
func (k Kind) String() string { return [...]string{"lifecycle", "runtime", "network"}[k] }

// Bounds: entries per kind and sandbox, and bytes of a text. A thousand sandboxes with
// full rings take some 15 MB; an idle sandbox has four entries.
const (
	maxEntries = 32
	maxText    = 300
)

// Entry is one event, or the same event several times in a row.
type Entry struct {
	Time  time.Time // of the last time
	Kind  Kind
	Text  string // one line of printable characters
	Times int
}

// Book holds the histories of all sandboxes. Its methods may be called
// concurrently.
type Book struct {
	began time.Time

	mu    sync.Mutex
	pages map[string]*page // guarded by mu
}

type page struct {
	rings   [kinds][]Entry
	dropped [kinds]int // older entries that were dropped
}

// New returns a Book that begins now.
func New() *Book { return &Book{began: time.Now(), pages: map[string]*page{}} }

// Began is when the Book was made.
func (b *Book) Began() time.Time { return b.began }

// Open begins the history of a sandbox, unless it has one.
func (b *Book) Open(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pages[id] == nil {
		b.pages[id] = &page{}
	}
}

// Forget drops the history of a sandbox.
func (b *Book) Forget(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.pages, id)
}

// Note adds an event of a sandbox whose history is open. Otherwise it does nothing: a
// late event must not bring back a sandbox that is gone. It reports whether the event
// differs from the last one.
func (b *Book) Note(id string, k Kind, at time.Time, text string) (fresh bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.pages[id]
	if p == nil {
		return true
	}
	ring := p.rings[k]
	text = printable(text)
	if n := len(ring); n > 0 && ring[n-1].Text == text {
		ring[n-1].Time = at
		ring[n-1].Times++
		return false
	}
	if len(ring) == maxEntries {
		ring = append(ring[:0], ring[1:]...)
		p.dropped[k]++
	}
	p.rings[k] = append(ring, Entry{at, k, text, 1})
	return true
}

// Of returns the entries of these kinds, the oldest first, and how many older entries
// were dropped.
func (b *Book) Of(id string, ks ...Kind) (entries []Entry, dropped int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.pages[id]
	if p == nil {
		return nil, 0
	}
	for _, k := range ks {
		entries = append(entries, p.rings[k]...)
		dropped += p.dropped[k]
	}
	slices.SortStableFunc(entries, func(a, b Entry) int { return a.Time.Compare(b.Time) })
	return entries, dropped
}

// Change is the text of a change of state.
func Change(state, reason, message string) string {
	if reason != "" {
		state += " (" + reason + ")"
	}
	if message != "" {
		state += ": " + message
	}
	return state
}

// printable makes one short line of s, some of which guests have chosen.
func printable(s string) string {
	cut := ""
	if len(s) > maxText {
		s, cut = s[:maxText], "…"
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(s, "\ufffd")) + cut
}
