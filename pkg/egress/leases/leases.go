// Package leases remembers which addresses DNS has answered for which names.
//
// A Table has the leases of one sandbox. Where a rule allows a name, they are what the
// name means on ports where no client says it. A Book has the tables of all sandboxes, and
// keeps each in a file, so that they outlive the daemon:
//
//	Add ─▶ memory ─▶ a line at the end of the file ─▶ (the guest gets the answer)
//	         └──────▶ the file is written anew, when it has grown
//
// The files are meant for a tmpfs: nothing is synced. A daemon that is killed loses
// nothing, because the kernel has each line before the guest has its answer.
//
// What surprises: leases that have ended stay, until there are too many. A flow that one
// has opened goes on, and whoever judges it again must know the name.
package leases

import (
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	// Least is how long an answer of DNS opens its address at least, and Grace is how much
	// longer than its TTL: clients keep addresses a little longer than they may.
	Least = 60 * time.Second
	Grace = 30 * time.Second
	// slack is how much of Grace a lease may have lost before another answer extends it. So a
	// name that a guest asks for all the time is not written all the time.
	slack = 5 * time.Second
	// longest is the longest TTL that the resolver tells a guest.
	longest = time.Hour
	// most bounds the leases of a sandbox: of more, those that end first go.
	most = 4096
)

// A Table has the leases of one sandbox. The zero value is in memory only. Its methods may
// be called concurrently.
type Table struct {
	mu sync.RWMutex
	by map[netip.Addr][]lease // guarded by mu, as n
	n  int

	kept kept
}

type lease struct {
	name  string
	until time.Time
}

// Add records that DNS answers name with addrs, for ttl. When it returns, the lease is
// kept, and the answer may be sent.
func (t *Table) Add(name string, addrs []netip.Addr, ttl time.Duration, now time.Time) {
	until := now.Add(min(max(ttl, Least), longest) + Grace)
	until = until.Add(-time.Duration(until.Nanosecond() % int(time.Millisecond))) // a file has no more
	addrs = addrs[:min(len(addrs), most)]
	if later, room := t.extend(name, addrs, until, now); len(later) > 0 {
		t.keep(name, later, until, room, now)
	}
}

// extend lets name have addrs until then, and returns those that it did not have so long.
// If others had to make room, these are those that end at room or before.
func (t *Table) extend(name string, addrs []netip.Addr, until, now time.Time) (later []netip.Addr, room time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.by == nil {
		t.by = map[netip.Addr][]lease{}
	}
	for t.n+len(addrs) > most && t.n+t.lacks(name, addrs) > most {
		room = t.makeRoom(now)
	}
	for _, a := range addrs {
		if x := t.find(name, a); x == nil {
			t.by[a] = append(t.by[a], lease{name, until})
			t.n++
		} else if until.Sub(x.until) > slack {
			x.until = until
		} else {
			continue
		}
		later = append(later, a)
	}
	return later, room
}

// find returns the lease of name and a, or nil.
//
// Preconditions: t.mu is held.
func (t *Table) find(name string, a netip.Addr) *lease {
	for i := range t.by[a] {
		if x := &t.by[a][i]; x.name == name {
			return x
		}
	}
	return nil
}

// lacks counts the addresses that name does not have.
//
// Preconditions: t.mu is held.
func (t *Table) lacks(name string, addrs []netip.Addr) (n int) {
	for _, a := range addrs {
		if t.find(name, a) == nil {
			n++
		}
	}
	return n
}

// makeRoom drops the leases that have ended. If few have, it drops the quarter of all that
// ends first, so that a sandbox that asks for many names does not pay for each. All that
// end at room or before are gone then.
//
// Preconditions: t.mu is held, and there are leases.
func (t *Table) makeRoom(now time.Time) (room time.Time) {
	ends := make([]time.Duration, 0, t.n) // from now
	for _, xs := range t.by {
		for i := range xs {
			ends = append(ends, xs[i].until.Sub(now))
		}
	}
	slices.Sort(ends)
	room = now.Add(max(ends[len(ends)/4], 0))
	t.drop(room)
	return room
}

// drop removes the leases that end at room or before.
//
// Preconditions: t.mu is held.
func (t *Table) drop(room time.Time) {
	for a, xs := range t.by {
		rest := slices.DeleteFunc(xs, func(x lease) bool { return !x.until.After(room) })
		t.n -= len(xs) - len(rest)
		switch len(rest) {
		case len(xs):
		case 0:
			delete(t.by, a)
		default:
			t.by[a] = rest
		}
	}
}

// Of returns the names that a has now. With ended, also those that it had: a flow that was
// opened by one goes on.
func (t *Table) Of(a netip.Addr, now time.Time, ended bool) (names []string) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, x := range t.by[a] {
		if ended || x.until.After(now) {
			names = append(names, x.name)
		}
	}
	return names
}

// A Lease says that a name has an address.
type Lease struct {
	Name  string // in normal form
	Addr  netip.Addr
	Until time.Time
}

// All yields the leases, also those that have ended. The loop must not call other methods
// of t.
func (t *Table) All(yield func(Lease) bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for a, xs := range t.by {
		for _, x := range xs {
			if !yield(Lease{x.name, a, x.until}) {
				return
			}
		}
	}
}
