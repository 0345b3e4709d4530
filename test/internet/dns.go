package internet

import (
	"encoding/base64"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// A Record is what the zone has about a name. The zero Record has no address.
type Record struct {
	A     []netip.Addr
	CNAME string        // then the rest is the record of that name
	TTL   uint32        // 60 if 0
	TXT   []string      // each at most 255 bytes
	Delay time.Duration // before the answer
	Then  []netip.Addr  // instead of A, in all answers but the first
	// Also are addresses of other names that the answer has beside its own: a server that
	// lies about names which are not its business.
	Also map[string]netip.Addr
	// HTTPS is whether there is a record of type 65 with a key of ECH and an address.
	HTTPS bool
}

// A Query is one that came to a server of the zone.
type Query struct {
	Name string // in lower case, without the last dot
	Type uint16
	TCP  bool
}

type zone struct {
	mu      sync.Mutex
	names   map[string]Record
	queries []Query
	asked   map[string]bool // for the address, of names with Then
}

// Set gives a name its record. "*.example" is the record of all names below that have none.
func (in *Internet) Set(name string, r Record) {
	in.zone.mu.Lock()
	defer in.zone.mu.Unlock()
	if in.zone.names == nil {
		in.zone.names, in.zone.asked = map[string]Record{}, map[string]bool{}
	}
	in.zone.names[name] = r
}

// Queries are those for a name and for names below it, so far.
func (in *Internet) Queries(name string) (all []Query) {
	in.zone.mu.Lock()
	defer in.zone.mu.Unlock()
	for _, q := range in.zone.queries {
		if q.Name == name || strings.HasSuffix(q.Name, "."+name) {
			all = append(all, q)
		}
	}
	return all
}

// find returns the record of a name.
func (z *zone) find(name string) (Record, bool) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if r, ok := z.names[name]; ok {
		if r.Then != nil && z.asked[name] {
			r.A = r.Then
		}
		z.asked[name] = true
		return r, true
	}
	for rest := name; ; {
		_, after, ok := strings.Cut(rest, ".")
		if !ok {
			return Record{}, false
		}
		if r, ok := z.names["*."+after]; ok {
			return r, true
		}
		rest = after
	}
}

// serveDNS opens the servers: one that answers by UDP and TCP, and a slow one.
func (in *Internet) serveDNS() error {
	udp := func(late time.Duration) func([]byte, func([]byte)) {
		return func(b []byte, reply func([]byte)) {
			asked := append([]byte(nil), b...)
			go func() {
				a, delay := in.answer(asked, false)
				after(delay+late, func() { reply(a) })
			}()
		}
	}
	if err := in.packets(DNS, 53, udp(0)); err != nil {
		return err
	}
	if err := in.packets(Slow, 53, udp(10*time.Second)); err != nil {
		return err
	}
	l, err := net.Listen("tcp4", netip.AddrPortFrom(DNS, 53).String())
	if err != nil {
		return err
	}
	in.open = append(in.open, l)
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			go in.stream(c)
		}
	}()
	return nil
}

// after calls f, at once if the delay is 0.
func after(delay time.Duration, f func()) {
	if delay == 0 {
		f()
		return
	}
	time.AfterFunc(delay, f)
}

// stream answers the queries of one TCP connection.
func (in *Internet) stream(c net.Conn) {
	defer c.Close()
	for {
		var size [2]byte
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return
		}
		q := make([]byte, binary.BigEndian.Uint16(size[:]))
		if _, err := io.ReadFull(c, q); err != nil {
			return
		}
		a, delay := in.answer(q, true)
		time.Sleep(delay) // the record says so
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(a))), a...)); err != nil {
			return
		}
	}
}

// overHTTPS answers a query as RFC 8484 has it.
func (in *Internet) overHTTPS(rw http.ResponseWriter, r *http.Request) {
	q, err := base64.RawURLEncoding.DecodeString(r.URL.Query().Get("dns"))
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	a, _ := in.answer(q, true)
	rw.Header().Set("Content-Type", "application/dns-message")
	rw.Write(a) //nolint:errcheck // the client sees what is missing
}

// answer is the answer to one query, and how long it takes. It has the question as it was
// asked, upper case and all. By UDP it is cut to what the asker takes.
func (in *Internet) answer(asked []byte, tcp bool) ([]byte, time.Duration) {
	var q dnsmessage.Message
	if err := q.Unpack(asked); err != nil || len(q.Questions) != 1 {
		return nil, 0
	}
	name := strings.ToLower(strings.TrimSuffix(q.Questions[0].Name.String(), "."))
	in.zone.mu.Lock()
	in.zone.queries = append(in.zone.queries, Query{name, uint16(q.Questions[0].Type), tcp})
	in.zone.mu.Unlock()
	m := dnsmessage.Message{
		Header: dnsmessage.Header{
			ID: q.ID, Response: true, RecursionDesired: q.RecursionDesired, RecursionAvailable: true,
		},
		Questions: q.Questions,
	}
	r, ok := in.zone.find(name)
	if !ok {
		m.RCode = dnsmessage.RCodeNameError
	}
	at := q.Questions[0].Name
	for r.CNAME != "" && len(m.Answers) < 20 {
		m.Answers = append(m.Answers, resource(at, r, &dnsmessage.CNAMEResource{CNAME: dnsName(r.CNAME)}))
		at = dnsName(r.CNAME)
		r, _ = in.zone.find(r.CNAME)
	}
	m.Answers = append(m.Answers, r.answers(at, q.Questions[0].Type)...)
	b, err := m.Pack()
	if limit := payload(q); err == nil && !tcp && len(b) > limit {
		m.Truncated, m.Answers = true, nil
		b, err = m.Pack()
	}
	if err != nil {
		return nil, 0
	}
	return b, r.Delay
}

// answers are those of one type.
func (r Record) answers(at dnsmessage.Name, of dnsmessage.Type) (all []dnsmessage.Resource) {
	switch of {
	case dnsmessage.TypeA:
		for _, a := range r.A {
			all = append(all, resource(at, r, &dnsmessage.AResource{A: a.As4()}))
		}
		for name, a := range r.Also {
			all = append(all, resource(dnsName(name), r, &dnsmessage.AResource{A: a.As4()}))
		}
	case dnsmessage.TypeTXT:
		for _, text := range r.TXT {
			all = append(all, resource(at, r, &dnsmessage.TXTResource{TXT: []string{text}}))
		}
	case dnsmessage.TypeHTTPS:
		if r.HTTPS {
			// RFC 9460: priority 1, the name itself, an IPv4 hint (4), and a key of ECH (5).
			b := append([]byte{0, 1, 0, 0, 4, 0, 4}, Other.AsSlice()...)
			b = append(b, 0, 5, 0, 4, 1, 2, 3, 4)
			all = append(all, resource(at, r, &dnsmessage.UnknownResource{Type: dnsmessage.TypeHTTPS, Data: b}))
		}
	}
	return all
}

func resource(at dnsmessage.Name, r Record, body dnsmessage.ResourceBody) dnsmessage.Resource {
	ttl := r.TTL
	if ttl == 0 {
		ttl = 60
	}
	return dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: at, Class: dnsmessage.ClassINET, TTL: ttl}, Body: body}
}

func dnsName(s string) dnsmessage.Name { return dnsmessage.MustNewName(s + ".") }

// payload is how large an answer by UDP the asker takes.
func payload(q dnsmessage.Message) int {
	for _, r := range q.Additionals {
		if r.Header.Type == dnsmessage.TypeOPT {
			return max(512, int(r.Header.Class))
		}
	}
	return 512
}
