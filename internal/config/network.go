package config

import (
	"net/netip"
	"path/filepath"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/egress"
)

// Network is the addresses of sandboxes, their resolvers, and how many flows one sandbox
// may have.
type Network struct {
	AddressPool  string   `toml:"address_pool"`
	Upstreams    []string `toml:"upstreams"`
	Roots        string   `toml:"roots"`
	MaxOpenFlows int      `toml:"max_open_flows"`
	MaxFlows     int      `toml:"max_flows"`

	Pool      netip.Prefix      `toml:"-"` // AddressPool, checked
	Resolvers []egress.Upstream `toml:"-"` // Upstreams, checked
}

// The smallest and the largest value of network.max_flows. The resolver may use 64 of
// them. The kernel's own table has 262,144 entries on most hosts.
const (
	leastFlows = 256
	mostFlows  = 65536
)

func (c *Config) validateNetwork(bad func(string, ...any)) {
	n := &c.Network
	if n.MaxFlows < leastFlows || n.MaxFlows > mostFlows {
		bad("network.max_flows = %d: want %d to %d", n.MaxFlows, leastFlows, mostFlows)
	}
	if n.MaxOpenFlows < 1 || n.MaxOpenFlows > n.MaxFlows {
		bad("network.max_open_flows = %d: want 1 to network.max_flows, which is %d", n.MaxOpenFlows, n.MaxFlows)
	}
	n.Pool = c.Instance.Pool()
	if n.AddressPool != "" {
		p, err := netip.ParsePrefix(n.AddressPool)
		if err != nil || !p.Addr().Is4() || p.Bits() > 20 {
			bad("network.address_pool = %q: want an IPv4 prefix of at most /20", n.AddressPool)
		}
		n.Pool = p.Masked()
	}
	if n.Roots != "" && !filepath.IsAbs(n.Roots) {
		bad("network.roots = %q: want an absolute path", n.Roots)
	}
	for _, s := range n.Upstreams {
		u, ok := parseUpstream(s)
		if !ok {
			bad("network.upstreams: %q: want an address, address:port or tls://address#name, with the name in the server's certificate", s)
		}
		n.Resolvers = append(n.Resolvers, u)
	}
}

// parseUpstream reads a DNS server: 192.0.2.1, 192.0.2.1:5353 or tls://192.0.2.1#dns.example.
func parseUpstream(s string) (u egress.Upstream, ok bool) {
	port := uint16(53)
	if rest, isTLS := strings.CutPrefix(s, "tls://"); isTLS {
		if s, u.TLS, ok = strings.Cut(rest, "#"); !ok || u.TLS == "" {
			return u, false
		}
		port = 853 // RFC 7858
	}
	if a, err := netip.ParseAddr(s); err == nil {
		u.Addr = netip.AddrPortFrom(a, port)
		return u, true
	}
	var err error
	u.Addr, err = netip.ParseAddrPort(s)
	return u, err == nil
}

// Addr is the address of the sandbox in slot. It leaves out the pool's first two
// addresses, so that no sandbox has the address of the pool itself.
func (c *Config) Addr(slot int) netip.Addr {
	a := c.Network.Pool.Addr().As4()
	n := uint32(a[0])<<24 | uint32(a[1])<<16 | uint32(a[2])<<8 | uint32(a[3])
	n += uint32(slot) + 2
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}
