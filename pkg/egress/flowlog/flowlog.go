// Package flowlog remembers what each sandbox sent, received and connected to.
//
// A Log is what one sandbox has done: traffic of its link, and connections by
// destination. A Book has the logs of all sandboxes, and keeps them in files.
//
// A guest chooses its destinations, and may choose a new one for every packet. So a Log
// holds the last maxReached destinations that let the guest in at least once, and the
// last maxRefused that never did: refused attempts push out no connection. What is
// pushed out is added to one entry for all others. To count costs the same, and a Log
// takes the same memory, however many destinations there were.
package flowlog

import (
	"cmp"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// How many destinations a Log holds. pip, npm, apt and git reach some twenty each. A full
// Log takes 40 KB of memory and as much on disk, and three times that if all names are as
// long as DNS allows.
const (
	maxReached = 128
	maxRefused = 128
)

// Destination is where a connection goes.
type Destination struct {
	Name  string     `json:"name,omitempty"` // in normal form; "": not known
	Addr  netip.Addr `json:"addr,omitzero"`  // if there is no name
	Port  uint16     `json:"port,omitempty"` // 0: the protocol has no ports
	Proto uint8      `json:"proto"`
}

// Tally counts connections.
type Tally struct {
	Allowed uint64    `json:"allowed"`
	Denied  uint64    `json:"denied"`
	First   time.Time `json:"first,omitzero"`
	Last    time.Time `json:"last,omitzero"`
}

func (t *Tally) add(allowed bool, at time.Time) {
	if allowed {
		t.Allowed++
	} else {
		t.Denied++
	}
	if t.First.IsZero() {
		t.First = at
	}
	t.Last = at
}

func (t *Tally) merge(o Tally) {
	t.Allowed += o.Allowed
	t.Denied += o.Denied
	if t.First.IsZero() || o.First.Before(t.First) {
		t.First = o.First
	}
	if o.Last.After(t.Last) {
		t.Last = o.Last
	}
}

// Entry is what is known of one destination.
type Entry struct {
	Destination
	Tally
}

// Traffic is what passed a link, from the sandbox's side: Rx is what it received.
type Traffic struct {
	RxBytes   uint64 `json:"rxBytes"`
	TxBytes   uint64 `json:"txBytes"`
	RxPackets uint64 `json:"rxPackets"`
	TxPackets uint64 `json:"txPackets"`
}

// since is what was added to t after the counters showed was. A counter never goes back:
// if one did, all began again at 0.
func (t Traffic) since(was Traffic) Traffic {
	if t.RxBytes < was.RxBytes || t.TxBytes < was.TxBytes || t.RxPackets < was.RxPackets || t.TxPackets < was.TxPackets {
		return t
	}
	return Traffic{t.RxBytes - was.RxBytes, t.TxBytes - was.TxBytes, t.RxPackets - was.RxPackets, t.TxPackets - was.TxPackets}
}

func (t *Traffic) add(d Traffic) {
	t.RxBytes += d.RxBytes
	t.TxBytes += d.TxBytes
	t.RxPackets += d.RxPackets
	t.TxPackets += d.TxPackets
}

// Report is what a Log knows.
type Report struct {
	Since   time.Time // when the log began; zero: there is none
	Traffic Traffic
	Total   Tally   // of all connections
	Flows   []Entry // the latest first
	Other   Tally   // of destinations that are not in Flows
}

// Log is what one sandbox has done. Its methods may be called concurrently.
type Log struct {
	id string

	mu      sync.Mutex // guards all below
	since   time.Time
	total   Tally
	table   table
	traffic Traffic
	link    link
	closing bool // the sandbox ended: the log leaves memory when it is on disk

	io     sync.Mutex // guards the files and all below
	gone   bool       // the files are removed, and stay so
	seq    uint64     // of the last write
	live   state      // what the last write has
	synced state      // what is on disk even after a power cut
}

// link is the present link of a sandbox and what its counters showed last. That is a part
// of the log's traffic. The kernel gives no index twice between two boots.
type link struct {
	Boot    string  `json:"boot,omitempty"`
	Index   int     `json:"index,omitempty"`
	Counted Traffic `json:"counted,omitzero"`
}

// Count counts one connection.
func (l *Log) Count(to Destination, allowed bool, at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total.add(allowed, at)
	l.table.count(to, allowed, at)
}

// sample takes what the counters of a link show, and returns what passed since the last
// sample. A link that is new counts from 0.
func (l *Log) sample(boot string, index int, now Traffic) Traffic {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.link.Counted
	if l.link.Boot != boot || l.link.Index != index {
		was = Traffic{}
	}
	passed := now.since(was)
	l.link = link{boot, index, now}
	l.traffic.add(passed)
	return passed
}

// Report copies what the log knows.
func (l *Log) Report() Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.report()
}

// report is Report.
//
// Preconditions: l.mu is held.
func (l *Log) report() Report {
	return Report{Since: l.since, Traffic: l.traffic, Total: l.total, Flows: l.table.entries(), Other: l.table.other}
}

// table has the destinations of a Log.
type table struct {
	by       map[Destination]*entry
	reached  ring // those with an allowed connection
	refused  ring
	other    Tally
	leftover *entry // was pushed out, and is used again: a flood leaves nothing to collect
	deleted  int    // keys of by, since it was made anew
}

// maxDeleted is after how many deletions the map of a table is made anew, which takes 8 us.
// A map of Go's keeps room for deleted keys, and grows: without this a flooded log takes
// 137 KB in place of 39 KB (measured with Go 1.26).
const maxDeleted = 128

func (t *table) count(to Destination, allowed bool, at time.Time) {
	e := t.by[to]
	if e == nil {
		e = t.insert(to)
	} else {
		e.unlink()
	}
	e.add(allowed, at)
	t.place(e)
}

// insert makes the entry of a new destination, which place must follow.
func (t *table) insert(to Destination) *entry {
	if t.by == nil {
		t.by = map[Destination]*entry{}
	}
	e := t.leftover
	if t.leftover = nil; e == nil {
		e = new(entry)
	}
	*e = entry{Entry: Entry{Destination: to}}
	t.by[to] = e
	return e
}

// place makes e the latest of its ring, and pushes out the oldest if the ring is full.
func (t *table) place(e *entry) {
	r, most := &t.refused, maxRefused
	if e.Allowed > 0 {
		r, most = &t.reached, maxReached
	}
	r.push(e)
	if r.n <= most {
		return
	}
	old := r.oldest()
	old.unlink()
	t.other.merge(old.Tally)
	t.leftover = old
	delete(t.by, old.Destination)
	if t.deleted++; t.deleted < maxDeleted {
		return
	}
	t.deleted = 0
	clear(t.by)
	for e := range t.all {
		t.by[e.Destination] = e
	}
}

// all yields the entries, the latest of each ring first.
func (t *table) all(yield func(*entry) bool) {
	for _, r := range []*ring{&t.reached, &t.refused} {
		for e := r.root.next; e != nil && e != &r.root; e = e.next {
			if !yield(e) {
				return
			}
		}
	}
}

// entries are the destinations, the latest first.
func (t *table) entries() []Entry {
	all := make([]Entry, 0, len(t.by))
	for e := range t.all {
		all = append(all, e.Entry)
	}
	slices.SortStableFunc(all, func(a, b Entry) int { return cmp.Or(b.Last.Compare(a.Last), b.First.Compare(a.First)) })
	return all
}

// ring is a list of entries, the latest first.
type ring struct {
	root entry // next is the latest, prev the oldest
	n    int
}

type entry struct {
	Entry
	in         *ring
	prev, next *entry
}

func (r *ring) push(e *entry) {
	if r.root.next == nil {
		r.root.next, r.root.prev = &r.root, &r.root
	}
	e.in, e.prev, e.next = r, &r.root, r.root.next
	e.prev.next, e.next.prev = e, e
	r.n++
}

func (r *ring) oldest() *entry { return r.root.prev }

func (e *entry) unlink() {
	e.prev.next, e.next.prev = e.next, e.prev
	e.in.n--
	e.in, e.prev, e.next = nil, nil, nil
}
