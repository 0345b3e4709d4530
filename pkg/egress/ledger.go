package egress

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/conntrack"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

const (
	// closedFor is how long a closed flow stays in the table after it was noticed.
	closedFor = 3 * time.Second
	// countEvery is how often the flows are counted. A closed flow is noticed within
	// countEvery, times out, and is removed by the next count: it is gone after 7 s.
	countEvery = 2 * time.Second
	// countShare bounds what counting may cost: a count that took 1 s is followed by a
	// pause of countShare seconds.
	countShare = 10
)

// A ledger knows how many entries the flows of each sandbox have in conntrack's table,
// which is the whole host's. A flow is counted when it is let in, before its entry
// exists, so a sandbox never has more entries than its limit. Counting the table again
// removes those that ended.
type ledger struct {
	table *conntrack.Table
	pool  netip.Prefix // the sandboxes' addresses
	log   *slog.Logger

	maxOpen, maxAll int
	overOpen        string // why a flow is refused
	overAll         string

	// mu is held while a flow is judged and its packet goes on. The packet makes its
	// entry meanwhile, so a flow let in before count began is in the table then.
	mu sync.Mutex
	by map[netip.Addr]*tally // guarded by mu
}

// tally is what one sandbox has.
type tally struct {
	open, all int // when the table was last counted: flows that are not closed; entries
	older     int // let in before the count that is under way, or failed
	since     int // let in since
}

func newLedger(cfg Config, table *conntrack.Table) *ledger {
	return &ledger{
		table: table, pool: cfg.Pool, log: cfg.Logger,
		maxOpen:  cfg.MaxOpenFlows,
		maxAll:   cfg.MaxFlows - dnsInFlight, // the resolver asks with flows of its own
		overOpen: fmt.Sprintf("limit of %d open flows", cfg.MaxOpenFlows),
		overAll:  fmt.Sprintf("limit of %d flows, closed ones included", cfg.MaxFlows),
		by:       map[netip.Addr]*tally{},
	}
}

// admit counts one more flow from a, or says which limit it would exceed.
//
// Preconditions: l.mu is held.
func (l *ledger) admit(a netip.Addr) (over string) {
	t := l.by[a]
	if t == nil {
		t = &tally{}
		l.by[a] = t
	}
	switch added := t.older + t.since; {
	case t.open+added >= l.maxOpen:
		return l.overOpen
	case t.all+added >= l.maxAll:
		return l.overAll
	}
	t.since++
	return ""
}

// has reports whether a may have flows. It has none if the last count found none, and none
// was let in since.
//
// Preconditions: l.mu is held.
func (l *ledger) has(a netip.Addr) bool { return l.by[a] != nil }

// idle reports whether there is nothing to count: no sandbox had a flow at the last
// count, and none was let in since.
func (l *ledger) idle() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.by) == 0
}

// begin is called before the table is counted.
func (l *ledger) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range l.by {
		t.older, t.since = t.older+t.since, 0
	}
}

// end takes what was counted since begin.
func (l *ledger) end(found map[netip.Addr]tally) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for a, t := range l.by {
		n := found[a]
		t.open, t.all, t.older = n.open, n.all, 0
		if *t == (tally{}) {
			delete(l.by, a)
		}
	}
	for a, n := range found {
		if l.by[a] == nil {
			l.by[a] = &tally{open: n.open, all: n.all}
		}
	}
}

// count counts the flows of all sandboxes, and sets those that are closed to end
// soon: the kernel would keep a closed connection for two minutes, a DNS query for half
// a minute.
func (l *ledger) count() error {
	var found map[netip.Addr]tally
	var changes []byte
	var failed error
	send := func() {
		if err := l.table.Send(changes); err != nil {
			failed = err
		}
		changes = changes[:0]
	}
	err := conntrack.Each(func() {
		found = map[netip.Addr]tally{}
		l.begin()
	}, func(t conntrack.Entry) {
		if !l.pool.Contains(t.Src) {
			return
		}
		n := found[t.Src]
		n.all++
		if !t.Closed {
			n.open++
		}
		found[t.Src] = n
		ends := t.Closed || t.Proto == unix.IPPROTO_UDP && t.Port == policy.DNSPort
		if ends && t.Left > uint32(closedFor/time.Second) {
			if changes = conntrack.AppendExpiry(changes, t.Tuple, closedFor); len(changes) > 32<<10 {
				send()
			}
		}
	})
	if err != nil {
		return err
	}
	send()
	l.end(found)
	return failed
}

// countOn counts the flows until ctx ends, as long as there are any.
func (l *ledger) countOn(ctx context.Context) {
	next := time.NewTimer(countEvery)
	defer next.Stop()
	fault := ""
	for {
		select {
		case <-next.C:
		case <-ctx.Done():
			return
		}
		start := time.Now()
		if !l.idle() {
			err := l.count()
			switch {
			case err == nil:
				fault = ""
			case err.Error() != fault: // each new fault is logged once
				fault = err.Error()
				l.log.Error("cannot count the flows of sandboxes, or cannot end closed ones: a sandbox that opened many opens no more "+
					"until this works again; sandboxd tries again every two seconds", "err", err)
			}
		}
		next.Reset(max(countEvery, countShare*time.Since(start)))
	}
}
