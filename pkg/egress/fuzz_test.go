package egress

import (
	"log/slog"
	"net/netip"
	"testing"

	"golang.org/x/net/ipv4"

	"github.com/sandboxd/sandboxd/pkg/egress/leases"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// fuzzEngine is an Engine without a kernel below it, with one sandbox in each mode.
func fuzzEngine(f testing.TB) (e *Engine) {
	f.Helper()
	e = &Engine{
		judge: judge{pool: netip.MustParsePrefix("10.99.0.0/16")},
		cfg:   Config{Pool: netip.MustParsePrefix("10.99.0.0/16"), Gateway: netip.MustParseAddr("10.99.0.1")},
		log:   slog.New(slog.DiscardHandler),
		byID:  map[string]*sandbox{}, byAddr: map[netip.Addr]*sandbox{},
	}
	e.hosts.Store(&map[netip.Addr]bool{netip.MustParseAddr("192.0.2.99"): true})
	for i, n := range []record.Network{
		{Mode: record.NetworkNone},
		{Mode: record.NetworkRules, Rules: []record.Rule{{Allow: true, Prefix: netip.MustParsePrefix("203.0.113.0/24")}}},
		{Mode: record.NetworkOpen, Rules: []record.Rule{{Allow: true, Prefix: netip.MustParsePrefix("10.98.0.0/16")}}},
	} {
		p, err := policy.Compile(policy.Host{}, n)
		if err != nil {
			f.Fatal(err)
		}
		s := &sandbox{id: string(n.Mode), addr: netip.AddrFrom4([4]byte{10, 99, 1, byte(i)}), leases: new(leases.Table)}
		s.policy.Store(p)
		e.byID[s.id], e.byAddr[s.addr] = s, s
	}
	return e
}

// FuzzParseFlow: of the first packet of a flow is read what another reader finds, and a
// later fragment, which has no ports, is no first packet.
func FuzzParseFlow(f *testing.F) {
	f.Add([]byte{0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 1, 1, 1, 1, 0, 80, 1, 187})
	f.Add([]byte{0x46, 0, 0, 40, 0, 0, 0x20, 0, 64, 17, 0, 0, 10, 0, 0, 1, 1, 1, 1, 1, 7, 4, 0, 0, 0, 80, 1, 187})
	f.Add([]byte{0x44, 0, 0, 40, 0, 0, 0x20, 1, 64, 1, 0, 0, 10, 0, 0, 1, 1, 1, 1, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		got, ok := parseFlow(b)
		h, err := ipv4.ParseHeader(b)
		first := err == nil && h.Version == 4 && h.Len >= ipv4.HeaderLen && h.FragOff == 0
		if first && policy.HasPorts(uint8(h.Protocol)) {
			first = len(b) >= h.Len+4
		}
		if ok != first {
			t.Fatalf("%v: %+v, %v; another reader: %v, %v", b, got, ok, h, err)
		}
		if !ok {
			return
		}
		port := uint16(0)
		if policy.HasPorts(got.Proto) {
			port = uint16(b[h.Len+2])<<8 | uint16(b[h.Len+3])
		}
		if got.Src.String() != h.Src.String() || got.Dst.String() != h.Dst.String() || int(got.Proto) != h.Protocol || got.Port != port {
			t.Fatalf("%v: %+v; another reader: %v", b, got, h)
		}
	})
}
