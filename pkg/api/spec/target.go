package spec

import (
	"cmp"
	"net/netip"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
)

// A Target is what a sandbox may want to reach: a server and a port.
type Target struct {
	Name  string     // in normal form; empty: Addr is given
	Addr  netip.Addr // IPv4
	Port  uint16     // 0 for icmp only
	Proto string     // tcp, udp or icmp
}

// Host is the name or the address.
func (t Target) Host() string {
	if t.Name != "" {
		return t.Name
	}
	return t.Addr.String()
}

func (t Target) String() string {
	if t.Port == 0 {
		return t.Host() + "/" + t.Proto
	}
	return t.Host() + ":" + strconv.Itoa(int(t.Port)) + "/" + t.Proto
}

// Rule is a rule that is about t alone, as sandboxctl takes it.
func (t Target) Rule() string {
	return strings.TrimSuffix(t.String(), "/tcp")
}

// ParseTarget reads HOST:PORT[/PROTO], or HOST/icmp.
func (o *Offer) ParseTarget(text string) (t Target, err error) {
	bad := func(format string, args ...any) (Target, error) {
		return Target{}, httperr.Invalid("target %q: "+format+"; want HOST:PORT[/PROTO], such as pypi.org:443 or 203.0.113.7:123/udp",
			append([]any{httperr.Clip(text, 80)}, args...)...)
	}
	rest, proto, _ := strings.Cut(text, "/")
	t.Proto = cmp.Or(proto, "tcp")
	if t.Proto != "tcp" && t.Proto != "udp" && t.Proto != "icmp" {
		return bad("protocol %q is not tcp, udp or icmp", httperr.Clip(t.Proto, 20))
	}
	if strings.Count(rest, ":") > 1 {
		return bad("IPv6 is blocked in this release")
	}
	host, port, hasPort := strings.Cut(rest, ":")
	switch n, err := strconv.ParseUint(port, 10, 16); {
	case hasPort && t.Proto == "icmp":
		return bad("icmp has no ports")
	case t.Proto == "icmp":
	case !hasPort:
		return bad("the port is missing")
	case err != nil || n == 0:
		return bad("port %q is not a number from 1 to 65535", httperr.Clip(port, 20))
	default:
		t.Port = uint16(n)
	}
	if a, err := netip.ParseAddr(host); err == nil {
		t.Addr = a
		return t, nil
	}
	if t.Name, err = o.NormalName(host); err != nil || t.Name == "" || strings.HasPrefix(t.Name, "*") {
		return bad("%q is neither a name nor an IPv4 address", httperr.Clip(host, 80))
	}
	return t, nil
}
