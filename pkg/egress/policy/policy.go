// Package policy decides by rules what a sandbox may reach. It reads and writes rules,
// and does no I/O.
//
//	networkPolicy, --allow, configuration ──▶ record.Network ──▶ Compile ──▶ Policy
//	first packet of a flow ──▶ Decide ──▶ Allow, Deny, or Proxy: the name decides
//	name that a client says  ──▶ DecideName ──▶ allow or deny
//	query of DNS             ──▶ Resolves
//
// The first rule that matches decides; where none does, the mode. A rule by name matches
// what the flow's name says. A first packet has no name. So Decide asks: would every name
// give the same answer? Then that is the answer. Else a proxy reads the name, if the port
// is one on which clients say it. On other ports the names decide that DNS answered with
// the address.
//
// What surprises: an address rule that allows wins over a rule by name that stands before
// it and allows as well. Both say yes, and the flow needs no proxy.
package policy

import (
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// MaxRules is how many rules a policy may have.
const MaxRules = 4096

// Host are the rules of the host. They stand before those of each sandbox: first what is
// always denied, then what is always allowed. The Allow field of a rule has no meaning
// here.
type Host struct{ Deny, Allow []record.Rule }

// A Policy is a record.Network compiled for fast decisions. It is immutable.
type Policy struct {
	mode  record.NetworkMode
	rules []rule
	named bool // a rule has a name
}

type rule struct {
	allow       bool
	host        bool         // of the host, not of the sandbox
	name        string       // or else
	prefix      netip.Prefix // an address
	first, last uint16       // ports; 0, 0: all
	proto       uint8        // 0: all
	private     bool         // an allow rule that names a private range, or part of one
	when        *condition   // nil: not only some requests
	text        string
}

// protocols are the protocols that a rule may name.
var protocols = map[string]uint8{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "icmp": unix.IPPROTO_ICMP}

// Proto returns the number of a protocol that a rule may name, or 0.
func Proto(name string) uint8 { return protocols[name] }

// ProtoName is the name of a protocol that a rule may name, or its number.
func ProtoName(p uint8) string {
	for name, n := range protocols {
		if n == p {
			return name
		}
	}
	return strconv.Itoa(int(p))
}

// HasPorts reports whether the protocol has ports where TCP has them.
func HasPorts(proto uint8) bool {
	switch proto {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE, unix.IPPROTO_SCTP, unix.IPPROTO_DCCP:
		return true
	}
	return false
}

// Compile checks n and puts the rules of the host before its own. Its errors are for the
// client.
func Compile(h Host, n record.Network) (*Policy, error) {
	switch n.Mode {
	case record.NetworkNone, record.NetworkRules, record.NetworkOpen:
	default:
		return nil, errs.New(errs.Invalid, "network mode %q: want none, rules or open", n.Mode)
	}
	if len(n.Rules) > MaxRules {
		return nil, errs.New(errs.Invalid, "%d network rules: at most %d are allowed; join ranges into one CIDR", len(n.Rules), MaxRules)
	}
	if size := sizeOfRequests(n.Rules); size > maxRequests {
		return nil, errs.New(errs.Invalid, "the rules about requests have %d KiB of methods and paths, those of each port counted; "+
			"at most %d KiB are allowed: write ranges of ports, and patterns such as /v1/* in the place of several paths", size>>10,
			maxRequests>>10)
	}
	p := &Policy{mode: n.Mode, rules: make([]rule, 0, len(h.Deny)+len(h.Allow)+len(n.Rules))}
	for _, layer := range []struct {
		rules []record.Rule
		allow bool
	}{{h.Deny, false}, {h.Allow, true}} {
		for i, r := range layer.rules {
			r.Allow = layer.allow
			if err := p.add(i, r, true); err != nil {
				return nil, err
			}
		}
	}
	for i, r := range n.Rules {
		if err := p.add(i, r, false); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// add checks rule i and appends it.
func (p *Policy) add(i int, r record.Rule, host bool) error {
	proto, ok := protocols[r.Proto]
	switch {
	case r.Proto != "" && !ok:
		return errs.New(errs.Invalid, "network rule %d: protocol %q: want tcp, udp or icmp", i+1, r.Proto)
	case r.Name != "" && r.Prefix.IsValid():
		return errs.New(errs.Invalid, "network rule %d has both a name and an address", i+1)
	case r.Name == "" && !r.Prefix.IsValid():
		return errs.New(errs.Invalid, "network rule %d has no address", i+1)
	case r.Name == "" && !r.Prefix.Addr().Is4():
		return errIPv6(r.Prefix.String())
	case r.Ports[0] > r.Ports[1]:
		return errs.New(errs.Invalid, "network rule %d: ports %d-%d run backwards", i+1, r.Ports[0], r.Ports[1])
	case r.Ports[1] != 0 && (r.Ports[0] == 0 || proto != 0 && !HasPorts(proto)):
		return errs.New(errs.Invalid, "network rule %d: ports %d-%d are not valid for protocol %q", i+1, r.Ports[0],
			r.Ports[1], r.Proto)
	}
	when, err := compileRequests(r.Requests)
	switch {
	case err != nil:
		return errs.New(errs.Invalid, "network rule %d: requests: %s", i+1, err)
	case when != nil && (r.Name == "" || host):
		return errs.New(errs.Invalid, "network rule %d is about requests: such a rule needs a name, and is not for a whole host", i+1)
	case when != nil && r.Proto != "" && proto != unix.IPPROTO_TCP:
		return errs.New(errs.Invalid, "network rule %d is about requests, and protocol %q: requests come by tcp", i+1, r.Proto)
	}
	out := rule{allow: r.Allow, host: host, first: r.Ports[0], last: r.Ports[1], proto: proto, when: when, text: r.String()}
	if host {
		out.text = "host: " + out.text
	}
	if r.Name != "" {
		if name, err := NormalName(r.Name); err != nil || name != r.Name {
			return errs.New(errs.Invalid, "network rule %d: %q is not a name in its normal form", i+1, short(r.Name))
		}
		out.name, p.named = r.Name, true
	} else {
		out.prefix = r.Prefix.Masked()
		out.private = r.Allow && within(private, out.prefix)
	}
	p.rules = append(p.rules, out)
	return nil
}

// A Flow is what a policy decides on. If Dst is not valid, no rule by address matches.
type Flow struct {
	Src, Dst netip.Addr
	Proto    uint8
	Port     uint16 // of the destination; 0 if Proto has none
}

// DNSPort is the port that is redirected to the resolver.
const DNSPort = 53

// IsDNS reports whether f goes to the resolver, whatever server it names.
func (f Flow) IsDNS() bool {
	return f.Port == DNSPort && (f.Proto == unix.IPPROTO_UDP || f.Proto == unix.IPPROTO_TCP)
}

// Action is what happens to a flow.
type Action uint8

// The actions.
const (
	Deny  Action = iota
	Allow        // without a proxy
	Proxy        // TCP only: what the client calls the server decides
)

func (a Action) String() string { return [...]string{"deny", "allow", "proxy"}[a] }

// Cause is a kind of reason.
type Cause uint8

// The causes.
const (
	ByRule  Cause = iota // a rule of the policy
	ByMode               // no rule matched: the mode decided
	ByRange              // a private range that no rule names
	ByBlock              // never allowed by a policy: the host, other sandboxes, metadata services, …
	ByName               // the name is missing, or it is not one of the address
	ByLimit              // the sandbox has as many flows as it may
	ByFault              // not a packet that can be decided on, or its sandbox is not registered yet
	Causes               // how many there are
)

// A Reason says why: the cause is counted, the text is for people.
type Reason struct {
	Cause Cause
	Text  string // a rule as written, Default, PrivateRange, …
}

// Texts of reasons that are no rule.
const (
	Default      = "default"       // no rule matches
	PrivateRange = "private range" // and no rule names it
	NoNetwork    = "network none"  // the sandbox's mode
)

// Hidden is why a flow is denied whose protocol hides the name.
const Hidden = "nobody can see the server's name on this port, and a rule denies names"

// NoName is why a flow without a readable name is denied.
const NoName = "no server name was sent, and no rule allows the address"

// NoNameDenied is why such a flow is denied although a rule further on allows the address.
const NoNameDenied = "no server name was sent, and a rule that denies names comes before those about the address"

// covers reports whether the rule is about f's protocol and port.
func (r *rule) covers(f Flow) bool {
	if r.proto != 0 && r.proto != f.Proto {
		return false
	}
	return r.last == 0 || HasPorts(f.Proto) && r.first <= f.Port && f.Port <= r.last
}

// matchesAddr reports whether a rule by address matches f. Only a rule that names a private
// range allows a private address: 0.0.0.0/0 means "the Internet", not "the network of this
// host".
func (r *rule) matchesAddr(f Flow, inside bool) bool {
	return r.name == "" && f.Dst.IsValid() && r.prefix.Contains(f.Dst) && r.covers(f) && (!r.allow || !inside || r.private)
}

// hides reports whether the protocol hides the name or carries others: QUIC, and DNS over
// TLS.
func (f Flow) hides() bool { return f.Proto == unix.IPPROTO_UDP && f.Port == 443 || f.Port == 853 }

// opensByName reports whether a rule by name may allow f at all. It does not where the name
// is hidden, and not to a private address: whoever has the name could point it there.
func opensByName(f Flow) bool {
	return !f.hides() && !(f.Dst.IsValid() && Private(f.Dst))
}

// says reports whether the clients of f say a name that the proxy can read: TCP to 80, 443
// and the ports that a rule by name names.
func (p *Policy) says(f Flow) bool {
	if f.Proto != unix.IPPROTO_TCP {
		return false
	}
	if f.Port == 80 || f.Port == 443 {
		return true
	}
	for i := range p.rules {
		if r := &p.rules[i]; r.name != "" && r.last != 0 && r.covers(f) {
			return true
		}
	}
	return false
}

// Decide answers for the first packet of a flow that no hard block stops. leased are the
// names for which DNS has answered with f.Dst to this sandbox.
func (p *Policy) Decide(f Flow, leased []string) (Action, Reason) {
	if p.named && p.mode != record.NetworkNone && p.says(f) {
		if open, why := p.whatever(f); open {
			return Proxy, why
		}
	}
	allow, why := p.DecideLeased(f, leased)
	if allow {
		return Allow, why
	}
	return Deny, why
}

// whatever reports whether the verdict on f depends on its name, and by which rule. It does
// if the first rule by address that matches, or the default, says other than a rule by name
// before it.
func (p *Policy) whatever(f Flow) (depends bool, why Reason) {
	inside := Private(f.Dst)
	opens := opensByName(f)
	var allows, denies *rule // the first rule by name of each kind
	end := func(allow bool) (bool, Reason) {
		by := allows
		if allow {
			by = denies
		}
		if by == nil {
			return false, Reason{}
		}
		return true, Reason{ByRule, by.text}
	}
	for i := range p.rules {
		r := &p.rules[i]
		switch {
		case r.matchesAddr(f, inside):
			return end(r.allow)
		case r.name == "" || !r.covers(f):
		case !r.allow && denies == nil:
			denies = r
		case r.allow && opens && allows == nil:
			allows = r
		}
	}
	return end(p.mode == record.NetworkOpen && !inside)
}

// DecideLeased answers by the names of f's address alone. If there are several, one that is
// allowed is enough: nobody can see which one the client means. Where the protocol hides the
// name, it may be any, so each rule that denies a name denies it.
func (p *Policy) DecideLeased(f Flow, leased []string) (allow bool, why Reason) {
	if f.hides() {
		unknown := false
		if allow, why = p.first(f, func(r *rule) bool { unknown = !r.allow; return unknown }); unknown {
			why = Reason{ByName, Hidden}
		}
		return allow, why
	}
	if !p.named || len(leased) == 0 {
		return p.first(f, func(*rule) bool { return false })
	}
	for _, name := range leased {
		if allow, why = p.decideAs(f, name); allow {
			return true, why
		}
	}
	return false, why
}

// SomeName reports whether there is a name by which the policy would allow f.
func (p *Policy) SomeName(f Flow) bool {
	opens := opensByName(f)
	allow, _ := p.first(f, func(r *rule) bool { return r.allow && opens && r.when == nil })
	return allow
}

// DecideName answers for a flow whose client says which server it means. The caller makes
// sure that the name is one of f.Dst. An empty name is one that could not be read: no rule
// by name allows it, and each denies it.
func (p *Policy) DecideName(f Flow, name string) (allow bool, why Reason) {
	if name == "" {
		unknown := false
		allow, why = p.first(f, func(r *rule) bool { unknown = !r.allow; return unknown })
		if unknown || !allow && why.Cause == ByMode {
			why = Reason{ByName, NoName}
			if open, by := p.first(f, func(*rule) bool { return false }); open && by.Cause == ByRule {
				why.Text = NoNameDenied
			}
		}
		return allow, why
	}
	return p.decideAs(f, name)
}

func (p *Policy) decideAs(f Flow, name string) (allow bool, why Reason) {
	opens := opensByName(f)
	return p.first(f, func(r *rule) bool { return (!r.allow || opens) && nameMatches(r.name, name) && r.unseen() })
}

// first answers by the first rule that matches f, where named tells which rules by name do.
func (p *Policy) first(f Flow, named func(*rule) bool) (allow bool, why Reason) {
	if p.mode == record.NetworkNone {
		return false, Reason{ByMode, NoNetwork}
	}
	inside := f.Dst.IsValid() && Private(f.Dst)
	for i := range p.rules {
		r := &p.rules[i]
		if r.matchesAddr(f, inside) || r.name != "" && r.covers(f) && named(r) {
			return r.allow, Reason{ByRule, r.text}
		}
	}
	if inside {
		return false, Reason{ByRange, PrivateRange}
	}
	return p.mode == record.NetworkOpen, Reason{ByMode, Default}
}

// Resolves reports whether the sandbox may ask DNS for name. A rule that denies some ports
// only leaves the name to the others.
func (p *Policy) Resolves(name string) (allow bool, why Reason) {
	if p.mode == record.NetworkNone {
		return false, Reason{ByMode, NoNetwork}
	}
	for i := range p.rules {
		r := &p.rules[i]
		if r.name != "" && nameMatches(r.name, name) && (r.allow || r.last == 0 && r.proto == 0 && r.when == nil) {
			return r.allow, Reason{ByRule, r.text}
		}
	}
	return p.mode == record.NetworkOpen, Reason{ByMode, Default}
}

// Wildcard returns the first wildcard rule that lets Resolves allow name, or "" if a rule has the
// whole name, or the default is to allow.
func (p *Policy) Wildcard(name string) (wildcard string) {
	if p.mode == record.NetworkOpen {
		return ""
	}
	for i := range p.rules {
		switch r := &p.rules[i]; {
		case !r.allow || r.name == "" || !nameMatches(r.name, name):
		case r.name == name:
			return ""
		case wildcard == "":
			wildcard = r.name
		}
	}
	return wildcard
}

// Fixed reports whether no rule of the sandbox could open f to name, because a rule of the
// host decides before. A rule for a sandbox with the mode none changes that mode.
func (p *Policy) Fixed(f Flow, name string) bool {
	inside := f.Dst.IsValid() && Private(f.Dst)
	// A name that nobody has seen may be any.
	unseen := name == "" && (p.says(f) || f.hides())
	for i := range p.rules {
		r := &p.rules[i]
		if !r.host {
			return false
		}
		if !r.allow && (r.matchesAddr(f, inside) || r.name != "" && r.covers(f) && (unseen || name != "" && nameMatches(r.name, name))) {
			return true
		}
	}
	return false
}

// Loosens reports whether p certainly allows all that old allows: it is old with more rules
// that allow, or with fewer that deny. False says nothing.
func (p *Policy) Loosens(old *Policy) bool {
	return p.loosens(old, func(*rule) bool { return true })
}

// LoosensFor is Loosens for what is sent to the server name.
func (p *Policy) LoosensFor(old *Policy, name string) bool {
	return p.loosens(old, func(r *rule) bool { return r.name == "" || nameMatches(r.name, name) })
}

// loosens is Loosens by some of the rules.
func (p *Policy) loosens(old *Policy, about func(*rule) bool) bool {
	if p.mode != old.mode && !(p.mode == record.NetworkOpen && old.mode == record.NetworkRules) {
		return false
	}
	mine, theirs := those(p.rules, about), those(old.rules, about)
	for len(theirs) > 0 {
		switch {
		case len(mine) > 0 && mine[0].same(theirs[0]):
			mine, theirs = mine[1:], theirs[1:]
		case len(mine) > 0 && mine[0].allow:
			mine = mine[1:]
		case !theirs[0].allow:
			theirs = theirs[1:]
		default:
			return false
		}
	}
	for i := range mine {
		if !mine[i].allow {
			return false
		}
	}
	return true
}

// those are the rules that are about something.
func those(rules []rule, about func(*rule) bool) (some []*rule) {
	for i := range rules {
		if about(&rules[i]) {
			some = append(some, &rules[i])
		}
	}
	return some
}

// Open reports whether what no rule matches is allowed.
func (p *Policy) Open() bool { return p.mode == record.NetworkOpen }

// Names reports whether an allow rule that names a private range contains a.
func (p *Policy) Names(a netip.Addr) bool {
	for i := range p.rules {
		if r := &p.rules[i]; r.private && r.prefix.Contains(a) {
			return true
		}
	}
	return false
}
