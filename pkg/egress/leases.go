package egress

import (
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	// leaseLeast is how long an answer of DNS opens its address at least, and leaseGrace is
	// how much longer than its TTL: clients keep addresses a little longer than they may.
	leaseLeast = 60 * time.Second
	leaseGrace = 30 * time.Second
	// maxLeases bounds the leases of a sandbox: of more, those that end first go.
	maxLeases = 4096
)

// leases are the addresses that names had for a sandbox: where a rule allows a name, they
// are what it means on ports where no client says the name.
type leases struct {
	mu sync.RWMutex
	by map[netip.Addr][]lease // guarded by mu, as n
	n  int
}

type lease struct {
	name  string // in normal form
	until time.Time
}

// add records that DNS answers name with addrs, for ttl. It returns before the answer may
// be sent.
func (l *leases) add(name string, addrs []netip.Addr, ttl time.Duration, now time.Time) {
	until := now.Add(max(ttl, leaseLeast) + leaseGrace)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.by == nil {
		l.by = map[netip.Addr][]lease{}
	}
	for _, a := range addrs {
		i := slices.IndexFunc(l.by[a], func(x lease) bool { return x.name == name })
		if i >= 0 {
			if x := &l.by[a][i]; x.until.Before(until) {
				x.until = until
			}
			continue
		}
		if l.n >= maxLeases {
			l.makeRoom(now)
		}
		l.by[a] = append(l.by[a], lease{name, until})
		l.n++
	}
}

// makeRoom drops the leases that have ended. If few have, it drops the eighth of all that
// ends first, so that a sandbox that asks for many names does not pay for each.
func (l *leases) makeRoom(now time.Time) {
	ends := make([]time.Time, 0, l.n)
	for _, xs := range l.by {
		for _, x := range xs {
			ends = append(ends, x.until)
		}
	}
	slices.SortFunc(ends, time.Time.Compare)
	limit := ends[min(len(ends)/8, len(ends)-1)]
	if limit.Before(now) {
		limit = now
	}
	l.n = 0
	for a, xs := range l.by {
		xs = slices.DeleteFunc(xs, func(x lease) bool { return !x.until.After(limit) })
		if len(xs) == 0 {
			delete(l.by, a)
			continue
		}
		l.by[a] = xs
		l.n += len(xs)
	}
}

// of returns the names that a has now. With ended, also those that it had: a flow that was
// opened by one goes on.
func (l *leases) of(a netip.Addr, now time.Time, ended bool) (names []string) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, x := range l.by[a] {
		if ended || x.until.After(now) {
			names = append(names, x.name)
		}
	}
	return names
}

// lease records an answer of DNS for the sandbox, see leases.add.
func (s *sandbox) lease(name string, addrs []netip.Addr, ttl time.Duration) {
	s.leases.add(name, addrs, ttl, time.Now())
}

// leased returns the names by which the sandbox may mean dst now.
func (s *sandbox) leased(dst netip.Addr) []string { return s.leases.of(dst, time.Now(), false) }
