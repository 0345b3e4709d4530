package daemon

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

// A guest can cause any number of denials, each for another address. So the log takes a
// burst of lines for each guest, and then one line per denialEvery. With more lines,
// journald drops lines of the whole daemon, errors included. Denials that are not
// logged are counted, and stay in the sandbox's history and at level debug. Readers of
// events get those that are logged.
const (
	denialBurst = 20
	denialEvery = time.Second
	// moreEvery is the interval of the line that counts unlogged denials.
	moreEvery = 10 * time.Second
)

// deniedKept is how many different denials of a sandbox are remembered. One takes some
// 300 bytes, and none is kept of a sandbox that was refused nothing.
const deniedKept = 64

// denials remembers what sandboxes were refused, and decides which refusals get a log
// line and an event.
type denials struct {
	log   *slog.Logger
	began time.Time

	mu    sync.Mutex
	ofs   map[string]*refusals  // by sandbox, guarded by mu
	event func(id, text string) // tells readers of events; may be nil; guarded by mu
}

// refusals are the denials of one sandbox, and its log budget.
type refusals struct {
	total int64         // denials that the Engine reported
	last  []wire.Denial // the last different ones, the newest last

	lines int       // lines it may log now
	full  time.Time // when lines was last added to
	more  int       // denials without a line, not reported yet
}

func newDenials(log *slog.Logger) *denials {
	return &denials{log: log, began: time.Now().UTC(), ofs: map[string]*refusals{}}
}

// open begins to remember for a sandbox. A late denial of one that is gone is not kept.
func (d *denials) open(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ofs[id] == nil {
		d.ofs[id] = &refusals{lines: denialBurst, full: time.Now()}
	}
}

// note remembers a denial.
func (d *denials) note(id string, n wire.Denial) {
	d.mu.Lock()
	defer d.mu.Unlock()
	b := d.ofs[id]
	if b == nil {
		return
	}
	b.total++
	n.First, n.Times = n.Time, 1
	same := slices.IndexFunc(b.last, func(o wire.Denial) bool {
		return o.Address == n.Address && o.Port == n.Port && o.Protocol == n.Protocol && o.Name == n.Name && o.Rule == n.Rule &&
			o.By == n.By
	})
	switch {
	case same >= 0:
		n.First, n.Times = b.last[same].First, b.last[same].Times+1
		b.last = slices.Delete(b.last, same, same+1)
	case len(b.last) >= deniedKept && !weak.Off(weak.Log):
		b.last = slices.Delete(b.last, 0, 1)
	}
	b.last = append(b.last, n)
}

// of returns what is remembered of a sandbox.
func (d *denials) of(id string) wire.Denials {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := wire.Denials{Items: []wire.Denial{}, Since: d.began}
	if b := d.ofs[id]; b != nil {
		out.Items, out.Total = append(out.Items, b.last...), b.total
	}
	return out
}

// count is how many denials of a sandbox there were.
func (d *denials) count(id string) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if b := d.ofs[id]; b != nil {
		return b.total
	}
	return 0
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
		return false
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
func (d *denials) tell(id string, b *refusals) {
	d.mu.Lock()
	n := b.more
	b.more = 0
	d.mu.Unlock()
	d.log.Info("more denied", "sandbox", id, "n", n, "within", moreEvery)
}

// tellReaders passes a denial on to readers of events.
func (d *denials) tellReaders(id, text string) {
	d.mu.Lock()
	event := d.event
	d.mu.Unlock()
	if event != nil {
		event(id, text)
	}
}

// toReaders makes f the receiver of what readers of events are told.
func (d *denials) toReaders(f func(id, text string)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.event = f
}

// forget removes what is remembered of a deleted sandbox.
func (d *denials) forget(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.ofs, id)
}

// denialOf returns a denial as an API type. Guests choose the name.
func denialOf(n egress.Denial, at time.Time) wire.Denial {
	out := wire.Denial{
		Time: at.UTC(), Protocol: n.Proto, Name: printable(n.Name), Rule: n.Rule, By: n.By, Reason: n.Reason(),
	}
	if n.By == egress.ByDNS {
		out.Protocol = "dns"
	} else if n.Dst.IsValid() {
		out.Address, out.Port = n.Dst.Addr().String(), int(n.Dst.Port())
	}
	out.Allow = allowOf(n, out)
	return out
}

// maxName is the length of the longest name in DNS, in bytes.
const maxName = 253

// printable makes a short word of what a guest has sent as a name.
func printable(name string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) && r != ' ' {
			return r
		}
		return '?'
	}, strings.ToValidUTF8(name[:min(len(name), maxName)], "?"))
}

// hidesName reports whether clients of a port do not show which server they mean: QUIC and
// DNS over TLS. No rule by name opens it.
func hidesName(proto string, port int) bool { return port == 853 || port == 443 && proto == "udp" }

// allowOf is the rule, as sandboxctl takes it, that would open what was denied; "": none
// would, or one stands against it.
func allowOf(n egress.Denial, d wire.Denial) string {
	target := ""
	if n.Fixed {
		return ""
	}
	switch n.Rule {
	case policy.Default:
		target = cmp.Or(d.Name, d.Address)
	case policy.PrivateRange, policy.NoName, policy.NoNameDenied: // no rule by name opens it
		target = d.Address
	}
	if target == d.Name && hidesName(d.Protocol, d.Port) {
		return ""
	}
	switch {
	case target == "" || d.Port == 0 && d.Protocol != "dns" && d.Protocol != "icmp":
		return ""
	case d.Protocol == "dns":
		return target
	case d.Port == 0:
		return target + "/icmp"
	}
	rule := fmt.Sprintf("%s:%d", target, d.Port)
	if d.Protocol != "tcp" {
		rule += "/" + d.Protocol
	}
	return rule
}
