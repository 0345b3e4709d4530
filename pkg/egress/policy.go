package egress

import (
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// maxRules is how many rules a policy may have.
const maxRules = 4096

// A policy is a record.Network compiled for fast decisions. It is immutable.
type policy struct {
	mode  record.NetworkMode
	rules []rule
}

type rule struct {
	allow       bool
	prefix      netip.Prefix
	first, last uint16 // ports; 0, 0: all
	proto       uint8  // 0: all
	private     bool   // an allow rule that names a private range, or part of one
	text        string
}

// protocols are the protocols that a rule may name.
var protocols = map[string]uint8{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "icmp": unix.IPPROTO_ICMP}

func protoName(p uint8) string {
	for name, n := range protocols {
		if n == p {
			return name
		}
	}
	return strconv.Itoa(int(p))
}

func hasPorts(proto uint8) bool {
	switch proto {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE, unix.IPPROTO_SCTP, unix.IPPROTO_DCCP:
		return true
	}
	return false
}

// compile checks n. Its errors are for the client.
func compile(n record.Network) (*policy, error) {
	switch n.Mode {
	case record.NetworkNone, record.NetworkRules, record.NetworkOpen:
	default:
		return nil, errs.New(errs.Invalid, "network mode %q: want none, rules or open", n.Mode)
	}
	if len(n.Rules) > maxRules {
		return nil, errs.New(errs.Invalid, "%d network rules: at most %d are allowed; join ranges into one CIDR", len(n.Rules), maxRules)
	}
	p := &policy{mode: n.Mode, rules: make([]rule, 0, len(n.Rules))}
	for i, r := range n.Rules {
		proto, ok := protocols[r.Proto]
		switch {
		case r.Proto != "" && !ok:
			return nil, errs.New(errs.Invalid, "network rule %d: protocol %q: want tcp, udp or icmp", i+1, r.Proto)
		case !r.Prefix.IsValid():
			return nil, errs.New(errs.Invalid, "network rule %d has no address", i+1)
		case !r.Prefix.Addr().Is4():
			return nil, errIPv6(r.Prefix.String())
		case r.Ports[0] > r.Ports[1]:
			return nil, errs.New(errs.Invalid, "network rule %d: ports %d-%d run backwards", i+1, r.Ports[0], r.Ports[1])
		case r.Ports[1] != 0 && (r.Ports[0] == 0 || proto != 0 && !hasPorts(proto)):
			return nil, errs.New(errs.Invalid, "network rule %d: ports %d-%d are not valid for protocol %q", i+1, r.Ports[0],
				r.Ports[1], r.Proto)
		}
		prefix := r.Prefix.Masked()
		p.rules = append(p.rules, rule{
			allow: r.Allow, prefix: prefix, first: r.Ports[0], last: r.Ports[1], proto: proto,
			private: r.Allow && within(private, prefix), text: r.String(),
		})
	}
	return p, nil
}

// A flow is what a policy decides on.
type flow struct {
	src, dst netip.Addr
	proto    uint8
	port     uint16 // of the destination; 0 if proto has none
}

// dnsPort is the port that is redirected to the resolver.
const dnsPort = 53

// isDNS reports whether f goes to the resolver, whatever server it names.
func (f flow) isDNS() bool {
	return f.port == dnsPort && (f.proto == unix.IPPROTO_UDP || f.proto == unix.IPPROTO_TCP)
}

func (r *rule) matches(f flow) bool {
	switch {
	case !r.prefix.Contains(f.dst):
		return false
	case r.proto != 0 && r.proto != f.proto:
		return false
	case r.last != 0:
		return hasPorts(f.proto) && r.first <= f.port && f.port <= r.last
	}
	return true
}

// decide answers for a flow that no hard block stops: the first rule that matches
// decides, else the mode. Only a rule that names a private range allows a private
// address: 0.0.0.0/0 means "the Internet", not "the network of this host".
func (p *policy) decide(f flow) (allow bool, why reason) {
	if p.mode == record.NetworkNone {
		return false, reason{byMode, "network none"}
	}
	inside := containing(private, f.dst) != ""
	for i := range p.rules {
		r := &p.rules[i]
		if r.matches(f) && (!r.allow || !inside || r.private) {
			return r.allow, reason{byRule, r.text}
		}
	}
	if inside {
		return false, reason{byRange, "private range"}
	}
	return p.mode == record.NetworkOpen, reason{byMode, "default"}
}

// names reports whether a rule with private set contains a.
func (p *policy) names(a netip.Addr) bool {
	for i := range p.rules {
		if r := &p.rules[i]; r.private && r.prefix.Contains(a) {
			return true
		}
	}
	return false
}

type namedRange struct {
	prefix netip.Prefix
	name   string
}

func ranges(name string, prefixes ...string) []namedRange {
	out := make([]namedRange, 0, len(prefixes))
	for _, p := range prefixes {
		out = append(out, namedRange{netip.MustParsePrefix(p), name})
	}
	return out
}

func concat(lists ...[]namedRange) (out []namedRange) {
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}

var (
	// blocked ranges are closed under every policy. The metadata services of clouds
	// hand out credentials of the host. Listed here are those with an address outside
	// link-local: Alibaba's, Oracle's old one, and Azure's host agent.
	blocked = concat(
		ranges("metadata service", "169.254.169.254/32", "100.100.100.200/32", "192.0.0.192/32", "168.63.129.16/32"),
		ranges("link-local", "169.254.0.0/16"),
		ranges("this network", "0.0.0.0/8"),
		ranges("loopback", "127.0.0.0/8"),
		ranges("multicast", "224.0.0.0/4"),
		ranges("reserved", "240.0.0.0/4"),
	)
	// private ranges may be networks of the host: RFC 1918, 6598 (CGNAT), 2544
	// (benchmarks), 6890 (protocol assignments).
	private = ranges("private range",
		"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "198.18.0.0/15", "192.0.0.0/24")
)

// containing returns the name of the first range that contains a, or "".
func containing(list []namedRange, a netip.Addr) string {
	for i := range list {
		if list[i].prefix.Contains(a) {
			return list[i].name
		}
	}
	return ""
}

// within reports whether p lies inside a prefix of list, or equals it.
func within(list []namedRange, p netip.Prefix) bool {
	for i := range list {
		if l := list[i].prefix; p.Bits() >= l.Bits() && l.Contains(p.Addr()) {
			return true
		}
	}
	return false
}

// decide answers for a flow: allowed or not, and why.
func (e *Engine) decide(s *sandbox, f flow) (allow bool, why reason) {
	if weak.Off(weak.Policy) {
		return true, reason{byMode, "default"}
	}
	if name := e.blocks(f.dst); name != "" {
		return false, reason{byBlock, name}
	}
	return s.policy.Load().decide(f)
}

// blocks says why dst is closed under every policy, or "".
func (e *Engine) blocks(dst netip.Addr) string {
	if name := containing(blocked, dst); name != "" {
		return name
	}
	if e.cfg.Pool.Contains(dst) {
		return "another sandbox"
	}
	if _, closed := (*e.hosts.Load())[dst]; closed {
		return "host address"
	}
	return ""
}

// HostAddress reports whether a is an address of this host. Addresses that the host got
// in the last ten seconds may be missing.
func (e *Engine) HostAddress(a netip.Addr) bool { return (*e.hosts.Load())[a] }
