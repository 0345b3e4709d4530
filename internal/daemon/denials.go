package daemon

import (
	"log/slog"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/weak"
)

// A guest can cause any number of denials, each for another address. So the log takes a
// burst of lines for each guest, and then one line per denialEvery. With more lines,
// journald drops lines of the whole daemon, errors included. Denials that are not
// logged are counted, and stay in the sandbox's history and at level debug.
const (
	denialBurst = 20
	denialEvery = time.Second
	// moreEvery is the interval of the line that counts unlogged denials.
	moreEvery = 10 * time.Second
)

// denials decides which denied flows get a log line.
type denials struct {
	log *slog.Logger

	mu  sync.Mutex
	ofs map[string]*bucket // by sandbox, guarded by mu
}

// bucket is the log budget of one sandbox.
type bucket struct {
	lines int       // lines it may log now
	full  time.Time // when lines was last added to
	more  int       // denials without a line, not reported yet
}

func newDenials(log *slog.Logger) *denials {
	return &denials{log: log, ofs: map[string]*bucket{}}
}

// allow takes one line of id's budget; if there is none left, it counts the denial.
func (d *denials) allow(id string, now time.Time) bool {
	if weak.Off(weak.Log) {
		return true
	}
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

// tell logs how many denials got no line.
func (d *denials) tell(id string, b *bucket) {
	d.mu.Lock()
	n := b.more
	b.more = 0
	d.mu.Unlock()
	d.log.Info("more denied", "sandbox", id, "n", n, "within", moreEvery)
}

// forget removes the bucket of a deleted sandbox.
func (d *denials) forget(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.ofs, id)
}
