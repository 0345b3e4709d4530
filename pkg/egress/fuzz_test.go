package egress

import (
	"encoding/binary"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink/nl"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// fuzzEngine is an Engine without a kernel below it, with one sandbox in each mode.
func fuzzEngine(f *testing.F) (e *Engine, r *resolver) {
	f.Helper()
	e = &Engine{
		cfg:  Config{Pool: netip.MustParsePrefix("10.99.0.0/16"), Gateway: netip.MustParseAddr("10.99.0.1")},
		log:  slog.New(slog.DiscardHandler),
		byID: map[string]*sandbox{}, byAddr: map[netip.Addr]*sandbox{},
	}
	e.hosts.Store(&map[netip.Addr]bool{netip.MustParseAddr("192.0.2.99"): true})
	for i, n := range []record.Network{
		{Mode: record.NetworkNone},
		{Mode: record.NetworkRules, Rules: []record.Rule{{Allow: true, Prefix: netip.MustParsePrefix("203.0.113.0/24")}}},
		{Mode: record.NetworkOpen, Rules: []record.Rule{{Allow: true, Prefix: netip.MustParsePrefix("10.98.0.0/16")}}},
	} {
		p, err := compile(n)
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
					if !ok || e.blocks(addr) != "" || containing(private, addr) != "" &&
						!(s.id == "open" && netip.MustParsePrefix("10.98.0.0/16").Contains(addr)) {
						t.Fatalf("a guest with network %s gets %v", s.id, rr)
					}
				}
			}
		}
	})
}

// FuzzDecide: a policy of a client decides on every flow as its rules read one by one,
// and never opens what is closed for all.
func FuzzDecide(f *testing.F) {
	f.Add([]byte(`{"defaultAction":"allow","egress":[{"action":"deny","target":"203.0.113.0/24","ports":["1-1023"],"protocol":"tcp"}]}`),
		uint32(0xcb007105), uint8(6), uint16(443))
	f.Add([]byte(`{"egress":[{"action":"allow","target":"0.0.0.0/0"},{"action":"allow","target":"10.1.0.0/16","ports":[53]}]}`),
		uint32(0x0a010203), uint8(17), uint16(53))
	f.Add([]byte(`{"egress":[{"action":"allow","target":"169.254.169.254"}]}`), uint32(0xa9fea9fe), uint8(6), uint16(80))
	e, _ := fuzzEngine(f)
	f.Fuzz(func(t *testing.T, b []byte, to uint32, proto uint8, port uint16) {
		n, err := FromPolicy(b)
		if err != nil {
			return
		}
		p, err := compile(n)
		if err != nil {
			t.Fatalf("%q is a policy, but %v", b, err)
		}
		fl := flow{dst: netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, to))), proto: proto, port: port}
		if !hasPorts(proto) {
			fl.port = 0
		}
		s := &sandbox{}
		s.policy.Store(p)
		got, _ := e.decide(s, fl)
		if want := e.blocks(fl.dst) == "" && readOneByOne(n, fl); got != want {
			t.Fatalf("%q on %+v: %v, want %v", b, fl, got, want)
		}
		if got && (fl.dst.IsLoopback() || fl.dst.IsMulticast() || fl.dst.IsLinkLocalUnicast() || fl.dst.IsUnspecified()) {
			t.Fatalf("%q opens %v", b, fl.dst)
		}
	})
}

// readOneByOne is what the documents say of rules.
func readOneByOne(n record.Network, f flow) bool {
	inside := f.dst.IsPrivate()
	for _, p := range []string{"100.64.0.0/10", "198.18.0.0/15", "192.0.0.0/24"} {
		inside = inside || netip.MustParsePrefix(p).Contains(f.dst)
	}
	for _, r := range n.Rules {
		ports := r.Ports[1] == 0 || hasPorts(f.proto) && r.Ports[0] <= f.port && f.port <= r.Ports[1]
		if !r.Prefix.Contains(f.dst) || !ports || r.Proto != "" && protocols[r.Proto] != f.proto {
			continue
		}
		if r.Allow && inside && !within(private, r.Prefix) {
			continue // it means the Internet
		}
		return r.Allow
	}
	return !inside && n.Mode == record.NetworkOpen
}

// FuzzTracked: an entry of conntrack's table is read as far as it goes, and is IPv4.
func FuzzTracked(f *testing.F) {
	addr := func(typ uint16, a string) []byte {
		return appendAttr(nil, typ, netip.MustParseAddr(a).AsSlice())
	}
	ip := append(addr(ctaIPSrc, "10.99.1.1"), addr(ctaIPDst, "203.0.113.1")...)
	proto := appendAttr(appendAttr(nil, ctaProtoNum, []byte{6}), ctaDstPort, []byte{1, 187})
	tuple := appendAttr(appendAttr(nil, ctaTupleIP, ip), ctaTupleProto, proto)
	msg := appendAttr(make([]byte, nl.SizeofNfgenmsg), ctaTupleOrig, tuple)
	f.Add(appendAttr(msg, ctaProtoinfo, appendAttr(nil, ctaProtoinfoTCP, appendAttr(nil, ctaTCPState, []byte{tcpClose}))))
	f.Add(appendAttr(msg, ctaTimeout, []byte{0, 0, 0, 9}))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, ok := parseTracked(b)
		if ok && (!got.src.Is4() || !got.dst.Is4()) || len(got.tuple) > len(b) {
			t.Fatalf("%+v", got)
		}
		if !ok {
			return
		}
		again, ok := parseTuple(got.tuple)
		if !ok || again != got.flow {
			t.Fatalf("%+v comes back as %+v", got.flow, again)
		}
	})
}

// FuzzQueueCounts: the kernel's file is read whole, or refused.
func FuzzQueueCounts(f *testing.F) {
	f.Add([]byte("    0  12345     3 2 65531     7     9      100  1\n    5  1 1 1 1 1 1 1 1\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := parseQueueCounts(b, 0)
		if err != nil {
			return
		}
		none, err := parseQueueCounts(b)
		if err != nil || none != (QueueCounts{}) {
			t.Fatalf("%q: %+v without a queue, %v", b, none, err)
		}
		if strings.TrimSpace(string(b)) == "" && c != (QueueCounts{}) {
			t.Fatalf("%+v of nothing", c)
		}
	})
}
