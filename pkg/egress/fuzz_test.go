package egress

import (
	"log/slog"
	"net"
	"net/netip"
	"testing"

	"github.com/miekg/dns"
	"golang.org/x/net/ipv4"

	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// fuzzEngine is an Engine without a kernel below it, with one sandbox in each mode.
func fuzzEngine(f *testing.F) (e *Engine, r *resolver) {
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
		s := &sandbox{id: string(n.Mode), addr: netip.AddrFrom4([4]byte{10, 99, 1, byte(i)})}
		s.policy.Store(p)
		e.byID[s.id], e.byAddr[s.addr] = s, s
	}
	r = &resolver{e: e, log: e.log}
	r.upstreams.Store(&[]netip.AddrPort{})
	return e, r
}

// heard is a dns.ResponseWriter that keeps the answer, as it is on the wire.
type heard struct {
	dns.ResponseWriter
	from net.Addr
	sent [][]byte
	err  error
}

func (h *heard) RemoteAddr() net.Addr { return h.from }

func (h *heard) WriteMsg(m *dns.Msg) error {
	b, err := m.Pack()
	h.sent, h.err = append(h.sent, b), err
	return err
}

func packed(f *testing.F, m *dns.Msg) []byte {
	f.Helper()
	b, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	return b
}

// FuzzQuery: every query that is read is answered once, with its own number and question,
// in no more bytes than its client takes, and with nothing that no upstream has said.
func FuzzQuery(f *testing.F) {
	q := new(dns.Msg).SetQuestion("one.test.", dns.TypeA)
	f.Add(packed(f, q), uint8(2), true)
	f.Add(packed(f, q.SetEdns0(65535, true)), uint8(1), true)
	f.Add(packed(f, new(dns.Msg).SetQuestion("\\000\\255.x.", dns.TypeANY)), uint8(0), false)
	f.Add([]byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\xc0\x0c\x00\x01\x00\x01"), uint8(9), true)
	_, r := fuzzEngine(f)
	f.Fuzz(func(t *testing.T, b []byte, who uint8, udp bool) {
		var q dns.Msg
		if len(b) < 12 || q.Unpack(b) != nil {
			return // the library answers it, or nobody
		}
		var from net.Addr = &net.TCPAddr{IP: net.IPv4(10, 99, 1, who), Port: 1}
		limit := dns.MaxMsgSize
		if udp {
			from = &net.UDPAddr{IP: net.IPv4(10, 99, 1, who), Port: 1}
			limit = dns.MinMsgSize
			if opt := q.IsEdns0(); opt != nil {
				limit = dnsUDPSize
			}
		}
		w := &heard{from: from}
		r.ServeDNS(w, &q)
		if len(w.sent) != 1 || w.err != nil {
			t.Fatalf("%d answers, %v", len(w.sent), w.err)
		}
		var a dns.Msg
		if err := a.Unpack(w.sent[0]); err != nil || len(w.sent[0]) > limit {
			t.Fatalf("an answer of %d bytes: %v", len(w.sent[0]), err)
		}
		if a.Id != q.Id || !a.Response || len(a.Answer)+len(a.Ns) > 0 || len(a.Question) > 1 ||
			len(a.Question) == 1 && a.Question[0] != q.Question[0] || a.Rcode == dns.RcodeSuccess && who != 2 {
			t.Fatalf("%v is answered with %v", &q, &a)
		}
	})
}

// FuzzUpstream: of what an upstream answers nothing reaches a guest that names the host,
// its networks without a rule, or IPv6, and what is left can be sent.
func FuzzUpstream(f *testing.F) {
	rr := func(s string) dns.RR {
		r, err := dns.NewRR(s)
		if err != nil {
			f.Fatal(err)
		}
		return r
	}
	m := new(dns.Msg).SetQuestion("x.test.", dns.TypeA)
	m.Answer = []dns.RR{
		rr("x.test. A 203.0.113.1"), rr("x.test. A 127.0.0.1"), rr("x.test. A 192.0.2.99"), rr("x.test. AAAA ::1"),
		rr("x.test. CNAME y.test."),
		rr("x.test. A 10.98.0.1"), rr("x.test. A 10.97.0.1"), rr(`x.test. HTTPS 1 . ipv4hint="127.0.0.1"`), rr(`x.test. TXT "a\"b"`),
	}
	f.Add(packed(f, m))
	m.Compress = true
	f.Add(packed(f, m))
	e, r := fuzzEngine(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		var a dns.Msg
		if a.Unpack(b) != nil {
			return
		}
		for _, s := range e.byID {
			m := new(dns.Msg).SetReply(new(dns.Msg).SetQuestion("x.test.", dns.TypeA))
			m.Answer, m.Ns = r.filter(s, a.Answer), r.filter(s, a.Ns)
			m.Truncate(dnsUDPSize)
			sent, err := m.Pack()
			if err != nil {
				continue // the guest's resolver asks again
			}
			var got dns.Msg
			if err := got.Unpack(sent); err != nil || len(sent) > dnsUDPSize {
				t.Fatalf("%d bytes: %v", len(sent), err)
			}
			for _, rr := range append(got.Answer, got.Ns...) {
				switch rr := rr.(type) {
				case *dns.AAAA, *dns.HTTPS, *dns.SVCB:
					t.Fatalf("the guest gets %v", rr)
				case *dns.A:
					addr, ok := netip.AddrFromSlice(rr.A.To4())
					if !ok || e.blocks(addr) != "" || policy.Private(addr) &&
						!(s.id == "open" && netip.MustParsePrefix("10.98.0.0/16").Contains(addr)) {
						t.Fatalf("a guest with network %s gets %v", s.id, rr)
					}
				}
			}
		}
	})
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
