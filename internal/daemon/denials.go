package daemon

import (
	"log/slog"
	"sync"
	"time"
)

// A guest is refused as often as it likes, and each time by another address: its
// denials may take so many lines of the log at once, and then one in a while.
// Above that journald drops lines of the whole daemon, errors included. What is
// not logged is counted, and stays in the sandbox's history and at level debug.
const (
	denialBurst = 20
	denialEvery = time.Second
	// moreEvery is how often it is said how many there were beside.
	moreEvery = 10 * time.Second
)

// denials decides which refused flows get a line.
type denials struct {
	log *slog.Logger

	mu  sync.Mutex
	ofs map[string]*bucket // by sandbox, guarded by mu
}

// bucket is what one sandbox may have logged.
type bucket struct {
	lines int       // that it may have now
	full  time.Time // when lines was last added to
	more  int       // that got none, and were not told of
}

func newDenials(log *slog.Logger) *denials {
	return &denials{log: log, ofs: map[string]*bucket{}}
}

// allow takes one line, if id may have it; else it counts.
func (d *denials) allow(id string, now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	b := d.ofs[id]
	if b == nil {
		b = &bucket{lines: denialBurst, full: now}
		d.ofs[id] = b
	}
	if n := int(now.Sub(b.full) / denialEvery); n > 0 {
		b.lines = min(b.lines+n, denialBurst)
		b.full = b.full.Add(time.Duration(n) * denialEvery)
	}
	if b.lines > 0 {
		b.lines--
		return true
	}
	if b.more++; b.more == 1 {
		time.AfterFunc(moreEvery, func() { d.tell(id, b) })
	}
	return false
}

// tell says how many got no line.
func (d *denials) tell(id string, b *bucket) {
	d.mu.Lock()
	n := b.more
	b.more = 0
	d.mu.Unlock()
	d.log.Info("more denied", "sandbox", id, "n", n, "within", moreEvery)
}

// forget drops what is remembered of a sandbox that is gone.
func (d *denials) forget(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.ofs, id)
}
