package names

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

const (
	// maxTTL bounds how long an answer is kept, here and by the guest: no server decides
	// that an address is leased for ever.
	maxTTL = 3600
	// maxNegative bounds how long it is kept that a name does not exist.
	maxNegative = 60
	// maxReason is how long the reason of a refusal may be, in bytes: it fits into 512.
	maxReason = 160
	// maxChain is how many names may stand for one another.
	maxChain = 16
)

// entry is what servers answered to a question, without everything that was not asked.
type entry struct {
	rcode   int
	answer  []dns.RR // the chain of CNAMEs from the question's name, then the data
	soa     []dns.RR // of an answer without data
	addrs   []netip.Addr
	ttl     uint32
	expires time.Time // zero: never
}

// left is the TTL that an answer has at that time.
func (e *entry) left(now time.Time) uint32 {
	if e.expires.IsZero() {
		return e.ttl
	}
	return uint32(max(e.expires.Sub(now), 0) / time.Second)
}

// plain is a name as the daemon knows it: in lower case, without the last dot.
func plain(name string) string {
	return strings.TrimSuffix(strings.ToLower(name), ".")
}

// pick takes from an answer what was asked for: the chain of CNAMEs that begins at name, and
// the records of the type at its end. Records of other names are what an attacker adds.
func pick(name string, typ uint16, a *dns.Msg) *entry {
	e := &entry{rcode: a.Rcode, ttl: maxTTL}
	at := name
	seen := map[string]bool{}
	for len(seen) < maxChain && !seen[at] {
		seen[at] = true
		var data []dns.RR
		var next *dns.CNAME
		for _, rr := range a.Answer {
			h := rr.Header()
			if h.Class != dns.ClassINET || plain(h.Name) != at {
				continue
			}
			if h.Rrtype == typ {
				data = append(data, rr)
			} else if c, ok := rr.(*dns.CNAME); ok && next == nil {
				next = c
			}
		}
		if len(data) > 0 {
			e.answer = append(e.answer, data...)
			break
		}
		if next == nil {
			break
		}
		e.answer = append(e.answer, next)
		at = plain(next.Target)
	}
	for i, rr := range e.answer {
		e.ttl = min(e.ttl, rr.Header().Ttl)
		if r, ok := rr.(*dns.A); ok {
			addr, ok := netip.AddrFromSlice(r.A.To4())
			if !ok || len(e.addrs) == MaxAddrs {
				e.answer[i] = nil // no address, or one that the daemon could not be asked about
				continue
			}
			e.addrs = append(e.addrs, addr)
		}
	}
	e.answer = slices.DeleteFunc(e.answer, func(rr dns.RR) bool { return rr == nil })
	if len(e.answer) > 0 && e.answer[len(e.answer)-1].Header().Rrtype == typ {
		return e
	}
	e.ttl = min(e.ttl, maxNegative)
	for _, rr := range a.Ns {
		if soa, ok := rr.(*dns.SOA); ok && dns.IsSubDomain(soa.Hdr.Name, dns.Fqdn(at)) {
			e.soa = []dns.RR{soa}
			e.ttl = min(e.ttl, soa.Hdr.Ttl, soa.Minttl)
			return e
		}
	}
	e.ttl = 0 // nobody said how long it holds (RFC 2308, section 5)
	return e
}

// denies is the authority that says that a name does not exist, and for how long that holds: for no time
// (RFC 2308, section 5), so that a policy that opens the name works at once.
var denies = &dns.SOA{
	Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeSOA, Class: dns.ClassINET},
	Ns:  "policy.invalid.", Mbox: "policy.invalid.", Serial: 1, Refresh: 1, Retry: 1, Expire: 1, Minttl: 0,
}

// pointers is the answer with the names that an address has, one a line.
func pointers(question, lines string, ttl uint32) *entry {
	e := &entry{ttl: ttl}
	h := dns.RR_Header{Name: dns.Fqdn(question), Rrtype: dns.TypePTR, Class: dns.ClassINET, Ttl: ttl}
	for name := range strings.Lines(lines) {
		e.answer = append(e.answer, &dns.PTR{Hdr: h, Ptr: dns.Fqdn(strings.TrimSuffix(name, "\n"))})
	}
	return e
}

// reply is an answer to q. Of e's addresses it has those in keep; nil: all. Text goes to the
// guest as an Extended DNS Error, if it understands these (RFC 8914).
func (q *query) reply(rcode int, e *entry, keep []netip.Addr, text string) []byte {
	m := new(dns.Msg).SetReply(q.msg)
	m.RecursionAvailable = true
	m.Rcode = rcode
	if opt := q.msg.IsEdns0(); opt != nil {
		m.SetEdns0(EDNSSize, false) // without the guest's options: no cookies, no client subnet
		if text != "" {
			code := dns.ExtendedErrorCodeBlocked
			if rcode == dns.RcodeServerFailure {
				code = dns.ExtendedErrorCodeNetworkError
			}
			text = strings.ToValidUTF8(text[:min(len(text), maxReason)], "")
			m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_EDE{InfoCode: code, ExtraText: text}}
		}
	}
	if e != nil {
		ttl := e.left(time.Now())
		m.Answer = copies(e.answer, ttl, func(rr dns.RR) bool {
			a, ok := rr.(*dns.A)
			if !ok || keep == nil {
				return true
			}
			addr, _ := netip.AddrFromSlice(a.A.To4())
			return slices.Contains(keep, addr)
		})
		m.Ns = copies(e.soa, ttl, func(dns.RR) bool { return true })
		for _, rr := range m.Answer {
			if h := rr.Header(); plain(h.Name) == q.Name {
				h.Name = q.msg.Question[0].Name // in the guest's spelling
			}
		}
	}
	m.Truncate(q.limit)
	b, err := m.Pack()
	if err != nil {
		failed := new(dns.Msg).SetRcode(q.msg, dns.RcodeServerFailure)
		if b, err = failed.Pack(); err != nil {
			return nil // the guest's name cannot be written
		}
	}
	return b
}

func copies(rrs []dns.RR, ttl uint32, want func(dns.RR) bool) (out []dns.RR) {
	for _, rr := range rrs {
		if want(rr) {
			c := dns.Copy(rr)
			c.Header().Ttl = min(c.Header().Ttl, ttl)
			out = append(out, c)
		}
	}
	return out
}
