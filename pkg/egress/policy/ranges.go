package policy

import "net/netip"

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

// Blocked returns the name of the range that closes a under every policy, or "".
func Blocked(a netip.Addr) string { return containing(blocked, a) }

// Private reports whether a is in a range that may be a network of the host: only a rule
// that names the range, or part of it, opens it.
func Private(a netip.Addr) bool { return containing(private, a) != "" }

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
