package spec

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// maxPublish is how many ports one sandbox may publish.
const maxPublish = 64

// parsePublish reads [HOSTIP:]HOSTPORT:PORT[/tcp], docker's form, several
// separated by commas. Without an address it is this host's loopback, unlike
// docker's: a port is served to other hosts only if the request says so.
func parsePublish(v string) (all []record.Publish, err error) {
	for item := range strings.SplitSeq(v, ",") {
		bad := func(why string) error {
			return httperr.Invalid("extension %s: %q: %s; want [HOSTIP:]HOSTPORT:PORT, such as 8080:80 or 0.0.0.0:8080:80",
				wire.ExtPublish, httperr.Clip(item, 80), why)
		}
		text, proto, hasProto := strings.Cut(strings.TrimSpace(item), "/")
		if hasProto && proto != "tcp" {
			return nil, bad("only tcp ports can be published")
		}
		rest, port, ok := cutLast(text, ":")
		if !ok {
			return nil, bad("the host port is missing")
		}
		address, hostPort, ok := cutLast(rest, ":")
		if !ok {
			address, hostPort = "127.0.0.1", rest
		}
		if inner, six := strings.CutPrefix(address, "["); six {
			address, six = strings.CutSuffix(inner, "]")
			if a, err := netip.ParseAddr(address); !six || err != nil || !a.Is6() {
				return nil, bad("the address is not a valid IPv6 address")
			}
		} else if a, err := netip.ParseAddr(address); err != nil || !a.Is4() {
			return nil, bad("the address is not a valid IPv4 address; put an IPv6 address in brackets")
		}
		p := record.Publish{}
		from, err := ParsePort(hostPort)
		if err != nil {
			return nil, bad("the host port is not a number from 1 to 65535")
		}
		if p.Port, err = ParsePort(port); err != nil {
			return nil, bad("the sandbox port is not a number from 1 to 65535")
		}
		p.Host = netip.AddrPortFrom(netip.MustParseAddr(address).Unmap(), from)
		switch {
		case p.Host.Addr().Zone() != "":
			return nil, bad("an address with a zone is not supported")
		case p.Port == wire.AgentPort || p.Port == wire.EgressPort:
			return nil, bad("that port belongs to sandboxd and is reached through the API")
		case len(all) == maxPublish:
			return nil, httperr.Invalid("extension %s names more than %d ports", wire.ExtPublish, maxPublish)
		case slices.ContainsFunc(all, func(o record.Publish) bool { return record.Overlap(o.Host, p.Host) }):
			return nil, bad("that host port is given twice")
		}
		all = append(all, p)
	}
	return all, nil
}

func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

func showPublish(all []record.Publish) (out []wire.PublishedPort) {
	for _, p := range all {
		out = append(out, wire.PublishedPort{HostIP: p.Host.Addr().String(), HostPort: p.Host.Port(), Port: p.Port, Protocol: "tcp"})
	}
	return out
}

// ParsePort reads the number of a TCP port, in the one way to write it.
func ParsePort(v string) (uint16, error) {
	n, err := strconv.ParseUint(v, 10, 16)
	if err != nil || n == 0 || v[0] == '+' || v[0] == '0' {
		return 0, errs.Wire(httperr.Invalid("port %q: want a number from 1 to 65535", httperr.Clip(v, 20)), "DOCKER::INVALID_PORT")
	}
	return uint16(n), nil
}
