package egress

import (
	"context"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/egress/terminate"
)

// Denial is a flow that was refused.
type Denial struct {
	ID    string         // of the sandbox
	Proto string         // "tcp", "udp", "icmp", or a number
	Dst   netip.AddrPort // port 0 where the protocol has none; the zero AddrPort of a query of DNS
	Name  string         // that the guest asked DNS for, or called the server; or one that Dst had lately; or ""
	Rule  string         // why: a rule as written, or "host address", policy.PrivateRange, policy.Default, …
	By    string         // one of By…: what denied it
	Fixed bool           // a rule of the host denies it, so none of the sandbox could open it
}

// The values of Denial.By.
const (
	ByPolicy = "policy" // a rule, the mode, or a private range that no rule names
	ByBlock  = "block"  // an address that no policy opens
	ByLimit  = "limit"  // the sandbox has as many flows as it may
	ByDNS    = "dns"    // the resolver refused a query
	ByProxy  = "proxy"  // the proxy saw a name, or none, after the connection was open
)

// Reason is why, in words for whoever reads of a denial: in the API, in events, in the log, in
// the answer to a guest.
func (n Denial) Reason() string {
	switch n.By {
	case ByBlock:
		return "closed to every sandbox, whatever its rules: " + n.Rule
	case ByLimit:
		return "over a limit: " + n.Rule
	}
	switch {
	case n.Rule == policy.Default && n.By == ByDNS:
		return "no rule allows this name"
	case n.Rule == policy.Default:
		return "no rule allows it"
	case n.Rule == policy.PrivateRange:
		return "a private address, and no rule names it"
	case n.Rule == policy.NoNetwork:
		return "the sandbox has network mode none"
	case strings.HasPrefix(n.Rule, "deny "), strings.HasPrefix(n.Rule, "allow "):
		return "by the rule " + n.Rule
	}
	return n.Rule
}

// byOf is what denies for a cause.
func byOf(c policy.Cause) string {
	switch c {
	case policy.ByBlock:
		return ByBlock
	case policy.ByLimit:
		return ByLimit
	}
	return ByPolicy
}

// deniedPerSecond is how many denials of one sandbox are reported each second.
const deniedPerSecond = 100

// rate counts by whole seconds.
type rate struct {
	second int64
	n      int
}

func (r *rate) allow(now time.Time, limit int) bool {
	if s := now.Unix(); s != r.second {
		r.second, r.n = s, 0
	}
	r.n++
	return r.n <= limit
}

// turns bound what a child has the daemon do: some at a time, and mostAsked with those that wait.
type turns struct {
	at    chan struct{}
	asked *atomic.Int32
}

func newTurns(atATime int) turns { return turns{make(chan struct{}, atATime), new(atomic.Int32)} }

// take calls f when its turn comes, unless k ends before. False: too many wait.
func (t turns) take(k *ownChild, f func()) bool {
	if t.asked.Add(1) > mostAsked {
		t.asked.Add(-1)
		return false
	}
	k.p.done.Go(func() {
		defer t.asked.Add(-1)
		select {
		case t.at <- struct{}{}:
			defer func() { <-t.at }()
			f()
		case <-k.ctx.Done():
		}
	})
	return true
}

// denials reports what is denied, outside of the packet path.
type denials struct {
	onDeny  func(Denial) // nil: nobody wants to know
	telling sync.Mutex   // held while it is called
	mu      sync.Mutex   // of toTell
	toTell  []Denial
	more    chan struct{} // there is something to tell

	onInspect func(InspectEvent) // likewise
	inspects  chan InspectEvent
}

func newDenials(onDeny func(Denial), onInspect func(InspectEvent)) denials {
	return denials{
		onDeny: onDeny, more: make(chan struct{}, 1), onInspect: onInspect, inspects: make(chan InspectEvent, 256),
	}
}

// mostToTell is how many denials wait to be told.
const mostToTell = 1024

// putInspect is put for what was noticed in decrypted connections.
func (d *denials) putInspect(n InspectEvent) {
	if d.onInspect == nil {
		return
	}
	select {
	case d.inspects <- n:
	default:
	}
}

// tell reports an event, as often as its notes let pass. The log has its names only.
func (k *ownChild) tell(notes *terminate.Notes, e InspectEvent) {
	if !notes.May(time.Now()) {
		return
	}
	e.ID, e.Text = k.s.id, e.Text[:min(len(e.Text), maxEventText)]
	k.p.log.Info("inspect", "sandbox", e.ID, "kind", e.Kind, "host", e.Host, "binding", e.Binding, "credential", e.Credential)
	k.p.e.putInspect(e)
}

// warn logs what a child can cause, as often as its notes let pass.
func (k *ownChild) warn(text string, args ...any) {
	if k.notes.May(time.Now()) {
		k.p.log.With("sandbox", k.s.id).Warn(text, args...)
	}
}

// put reports a denial, unless the receiver is too slow.
func (d *denials) put(n Denial) {
	d.mu.Lock()
	if len(d.toTell) < mostToTell {
		d.toTell = append(d.toTell, n)
	}
	d.mu.Unlock()
	select {
	case d.more <- struct{}{}:
	default:
	}
}

// tell reports a denial of a first packet, unless the rate is exceeded or the receiver is
// too slow.
//
// Preconditions: ledger.mu is held.
func (d *denials) tell(s *sandbox, f policy.Flow, why policy.Reason) {
	name := ""
	if names := s.leased(f.Dst); len(names) > 0 {
		name = names[0]
	}
	d.tellAs(s, f, name, why, byOf(why.Cause))
}

// tellAs is tell for a denial with a name, by one of By….
func (d *denials) tellAs(s *sandbox, f policy.Flow, name string, why policy.Reason, by string) {
	if d.onDeny == nil || !s.deny.allow(time.Now(), deniedPerSecond) {
		return
	}
	d.put(Denial{
		ID: s.id, Proto: policy.ProtoName(f.Proto), Dst: netip.AddrPortFrom(f.Dst, f.Port), Name: name, Rule: why.Text, By: by,
		Fixed: s.policy.Load().Fixed(f, name),
	})
}

// Told returns when OnDeny has been called for every flow denied so far: a guest learns of a denial
// after it was put. The caller may hold no lock that OnDeny takes.
func (d *denials) Told() {
	d.telling.Lock()
	defer d.telling.Unlock()
	d.mu.Lock()
	all := d.toTell
	d.toTell = nil
	d.mu.Unlock()
	for _, n := range all {
		d.onDeny(n)
	}
}

func (d *denials) tellDenials(ctx context.Context) {
	for {
		select {
		case <-d.more:
			d.Told()
		case n := <-d.inspects:
			d.onInspect(n)
		case <-ctx.Done():
			return
		}
	}
}

// An InspectEvent is what was refused, or noticed, in the decrypted connections of a sandbox.
// Texts are printable. They have no value of a credential in them, unless a guest has taken over
// its child.
type InspectEvent struct {
	ID   string
	Kind string // one of Inspect…
	Host string // in normal form, or ""
	// Method, Binding, Credential and Place are those of terminate.Event, or "".
	Method, Binding, Credential, Place string
	Text                               string // what more there is to say, in at most maxEventText bytes, or ""
}

const maxEventText = 300

// The values of InspectEvent.Kind.
const (
	InspectRule        = "rule"               // no rule allows the request
	InspectForeign     = "foreign"            // a placeholder that is none of this sandbox
	InspectWrongHost   = "wrong-host"         // a placeholder on its way to a host that it is not for
	InspectWrongPlace  = "wrong-place"        // a placeholder where it may not stand
	InspectMalformed   = "malformed"          // a request that two readers could read differently
	InspectUnavailable = "unavailable"        // a value could not be had, or cannot stand where it should
	InspectEcho        = "echo"               // a value in an answer
	InspectUntrusted   = "untrusted"          // the guest does not trust the sandbox's authority
	InspectHandshake   = "handshake"          // another failure of TLS with the guest
	InspectLeft        = "left"               // the guest got a certificate, and sent no request
	InspectUnverified  = "unverified"         // the certificate of the server does not verify
	InspectWantsClient = "client-certificate" // the server wants a certificate of its client
	InspectNoChild     = "no-child"           // no child runs for the sandbox, so its connections are reset
)

var (
	kindsOfEvents = map[terminate.EventKind]string{
		terminate.RuleDenied: InspectRule, terminate.Foreign: InspectForeign, terminate.WrongHost: InspectWrongHost,
		terminate.WrongPlace: InspectWrongPlace, terminate.Malformed: InspectMalformed, terminate.Unavailable: InspectUnavailable,
		terminate.Echo: InspectEcho,
	}
	kindsOfNotes = map[terminate.NoteKind]string{
		terminate.GuestRefuses: InspectUntrusted, terminate.GuestHandshake: InspectHandshake, terminate.GuestLeft: InspectLeft,
		terminate.ServerUnverified: InspectUnverified, terminate.ServerWants: InspectWantsClient,
	}
)
