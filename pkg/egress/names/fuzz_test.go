package names

import (
	"bytes"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// packed is m as it is on the wire.
func packed(f *testing.F, m *dns.Msg) []byte {
	b, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	return b
}

// FuzzMessage: what one side writes the other reads, and what it reads it would write.
func FuzzMessage(f *testing.F) {
	f.Add(uint8(Ask), (&Message{
		Hit: true, Type: 1, ID: 1 << 40, Source: guest, Name: "one.test", Text: "why", Body: []byte("body"),
		Addrs: []netip.Addr{netip.MustParseAddr("203.0.113.1")},
	}).Append(nil))
	f.Add(uint8(0), make([]byte, headSize))
	f.Add(uint8(Verdict), bytes.Repeat([]byte{255}, headSize+10))
	f.Fuzz(func(t *testing.T, kind uint8, b []byte) {
		m, err := Parse(Kind(kind), b)
		if err != nil {
			return
		}
		if len(m.Name) > maxName || len(m.Text) > maxText || len(m.Addrs) > MaxAddrs || len(m.Body) > maxBody {
			t.Fatalf("%d bytes become %+v", len(b), m)
		}
		again := m.Append(nil)
		if !bytes.Equal(again, b) {
			t.Fatalf("%x comes back as %x", b, again)
		}
		if m2, err := Parse(Kind(kind), again); err != nil || !reflect.DeepEqual(m, m2) {
			t.Fatalf("%+v comes back as %+v, %v", m, m2, err)
		}
	})
}

// FuzzQuery: every query that can be read is answered once, with its own number and question,
// and in no more bytes than its client takes. The daemon is asked for the name that a second
// reader of the packet finds.
func FuzzQuery(f *testing.F) {
	q := new(dns.Msg).SetQuestion("one.test.", dns.TypeAAAA)
	f.Add(packed(f, q))
	f.Add(packed(f, q.SetEdns0(65535, true)))
	f.Add(packed(f, new(dns.Msg).SetQuestion("\\000\\255.x.", dns.TypeANY)))
	f.Add(packed(f, new(dns.Msg).SetQuestion("x\\.one.test.", dns.TypeHTTPS)))
	f.Add([]byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\xc0\x0c\x00\x01\x00\x01"))
	d := newDaemon(f, nil, Config{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > MaxQuery {
			return
		}
		d.tell(Message{Kind: Query, Source: guest, Via: 1, Body: b}, nil)
		got := <-d.answers
		if len(b) < 12 || b[2]&0x80 != 0 {
			if len(got) > 0 {
				t.Fatalf("%x is answered with %x", b, got)
			}
			return
		}
		var a dns.Msg
		if err := a.Unpack(got); err != nil || !a.Response || a.Id != uint16(b[0])<<8|uint16(b[1]) || len(a.Answer)+len(a.Ns) > 0 {
			t.Fatalf("%x is answered with %x: %v", b, got, err)
		}
		if len(a.Question) == 1 && a.Rcode != dns.RcodeFormatError && a.Rcode != dns.RcodeNotImplemented {
			if name := rawName(b[12:]); name != d.lastName() {
				t.Fatalf("%x: the daemon was asked for %q, and its name is %q", b, d.lastName(), name)
			}
		}
	})
}

// rawName is the name at the beginning of b, which has no pointers: labels in lower case, and
// each byte that is no letter of a host name as the library writes it.
func rawName(b []byte) string {
	var labels []string
	for len(b) > 0 && b[0] > 0 {
		if b[0] > 63 || int(b[0]) >= len(b) {
			return "not a plain name"
		}
		var label strings.Builder
		for _, c := range b[1 : 1+b[0]] {
			switch {
			case strings.IndexByte("\"\\.()@;' ", c) >= 0:
				label.WriteByte('\\')
				label.WriteByte(c)
			case c < ' ' || c > '~':
				label.WriteString("\\" + string([]byte{'0' + c/100, '0' + c/10%10, '0' + c%10}))
			default:
				label.WriteByte(c)
			}
		}
		labels, b = append(labels, label.String()), b[1+b[0]:]
	}
	return strings.ToLower(strings.Join(labels, "."))
}

// FuzzAnswer: of what a server answers, only records on the chain from the name that was asked
// for are taken, and what a guest gets of them has no address that the daemon did not keep.
func FuzzAnswer(f *testing.F) {
	rr := func(s string) dns.RR {
		r, err := dns.NewRR(s)
		if err != nil {
			f.Fatal(err)
		}
		return r
	}
	m := new(dns.Msg).SetQuestion("x.test.", dns.TypeA)
	m.Answer = []dns.RR{
		rr("x.test. CNAME y.test."), rr("y.test. A 203.0.113.1"), rr("y.test. A 10.0.0.1"), rr("z.test. A 203.0.113.66"),
		rr("x.test. AAAA ::1"), rr(`x.test. HTTPS 1 . ipv4hint="127.0.0.1"`), rr(`x.test. TXT "a\"b"`),
	}
	f.Add(packed(f, m), dns.TypeA)
	m.Compress = true
	f.Add(packed(f, m), dns.TypeTXT)
	m.Answer = []dns.RR{rr("x.test. CNAME y.test."), rr("y.test. CNAME x.test."), rr("y.test. CNAME z.test.")}
	f.Add(packed(f, m), dns.TypeA)
	kept := netip.MustParseAddr("203.0.113.1")
	f.Fuzz(func(t *testing.T, b []byte, typ uint16) {
		var a dns.Msg
		if a.Unpack(b) != nil {
			return
		}
		e := pick("x.test", typ, &a)
		// The names that x.test may stand for, by any of the CNAMEs.
		chain := map[string]bool{"x.test": true}
		for range a.Answer {
			for _, rr := range a.Answer {
				if c, ok := rr.(*dns.CNAME); ok && chain[plain(c.Hdr.Name)] {
					chain[plain(c.Target)] = true
				}
			}
		}
		for _, rr := range e.answer {
			h := rr.Header()
			if !chain[plain(h.Name)] || h.Rrtype != typ && h.Rrtype != dns.TypeCNAME || h.Ttl < e.ttl {
				t.Fatalf("%v is taken from\n%v", rr, &a)
			}
			if a, ok := rr.(*dns.A); ok {
				if addr, _ := netip.AddrFromSlice(a.A.To4()); !slices.Contains(e.addrs, addr) {
					t.Fatalf("the daemon is not asked about %v", rr)
				}
			}
		}
		if len(e.answer) > len(a.Answer) || len(e.addrs) > MaxAddrs || e.ttl > maxTTL {
			t.Fatalf("%d records of %d, %d addresses, %d s", len(e.answer), len(a.Answer), len(e.addrs), e.ttl)
		}
		q := &query{Message: Message{Name: "x.test", Type: typ}, msg: new(dns.Msg).SetQuestion("X.test.", typ), limit: EDNSSize}
		sent := q.reply(e.rcode&15, e, []netip.Addr{kept}, "")
		var got dns.Msg
		if err := got.Unpack(sent); err != nil || len(sent) > EDNSSize {
			t.Fatalf("%d bytes: %v", len(sent), err)
		}
		for _, rr := range got.Answer {
			if a, ok := rr.(*dns.A); ok && !a.A.Equal(kept.AsSlice()) {
				t.Fatalf("a guest gets %v", rr)
			}
		}
	})
}
