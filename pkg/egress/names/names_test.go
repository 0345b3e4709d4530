package names

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/egress/child"
)

// guest is where queries come from.
var guest = netip.MustParseAddrPort("10.9.0.2:4000")

// daemon is the other side of a child's line: it allows the names below test., has servers
// on this host, and takes addresses of 10.0.0.0/8 out.
type daemon struct {
	t       testing.TB
	line    *child.Conn
	udp     *net.UDPConn // that the child receives by
	servers []netip.AddrPort
	child   *server

	mu      sync.Mutex
	sockets int // that it gave
	leased  map[string][]netip.Addr
	errors  []string
	asked   string // the last name
	answers chan []byte
}

func newDaemon(t testing.TB, certs *os.File, config Config, servers ...netip.AddrPort) *daemon {
	t.Helper()
	a, b, err := child.Pair()
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := child.NewConn(b, MaxMessage, true)
	if err != nil {
		t.Fatal(err)
	}
	d := &daemon{t: t, servers: servers, leased: map[string][]netip.Addr{}, answers: make(chan []byte, 64)}
	if d.line, err = child.NewConn(a, MaxMessage, false); err != nil {
		t.Fatal(err)
	}
	if d.udp, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}); err != nil {
		t.Fatal(err)
	}
	f, err := d.udp.File()
	if err != nil {
		t.Fatal(err)
	}
	files := []*os.File{f}
	if certs != nil {
		files = append(files, certs)
	}
	s, err := newServer(theirs, files)
	if err != nil {
		t.Fatal(err)
	}
	d.child = s
	var done sync.WaitGroup
	done.Go(func() { theirs.Run(s.handle) }) //nolint:errcheck // ends with the test
	done.Go(func() { d.line.Run(d.handle) }) //nolint:errcheck // likewise
	t.Cleanup(func() {
		d.line.Close()
		done.Wait()
		d.udp.Close()
		s.udp.Close()
		f.Close()
	})
	if config.Upstreams == nil {
		config.Upstreams = make([]Upstream, len(servers))
	}
	body, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	d.tell(Message{Kind: Setup, Body: body}, nil)
	return d
}

func (d *daemon) tell(m Message, f *os.File) {
	if err := d.line.Tell(uint8(m.Kind), m.Append(nil), f); err != nil {
		d.t.Log(err)
	}
}

func (d *daemon) handle(in child.Message) {
	m, err := Parse(Kind(in.Kind), in.Body)
	if err != nil {
		d.t.Error(err)
		return
	}
	v := Message{Kind: Verdict, ID: m.ID}
	switch m.Kind {
	case Ask:
		d.mu.Lock()
		d.asked = m.Name
		d.mu.Unlock()
		switch {
		case m.Name == "denied.example":
			v.Do, v.Text = NoName, "no rule allows "+m.Name
			d.tell(v, nil)
		case m.Name != "test" && !strings.HasSuffix(m.Name, ".test"), m.Type == dns.TypeNone:
			v.Do, v.Text = Refuse, "no rule allows "+m.Name
			d.tell(v, nil)
		case m.Hit:
			d.lease(m)
		default:
			d.socket(m)
		}
	case Socket:
		d.socket(m)
	case Lease:
		d.lease(m)
	case Reply:
		d.mu.Lock()
		d.errors = append(d.errors, m.Text)
		d.mu.Unlock()
		d.answers <- m.Body
	}
}

func (d *daemon) lastName() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.asked
}

// socket gives a socket to a server.
func (d *daemon) socket(m Message) {
	v := Message{Kind: Verdict, ID: m.ID, Do: Forward}
	if m.Upstream == NoSocket {
		d.tell(v, nil)
		return
	}
	typ := unix.SOCK_DGRAM
	if m.TCP {
		typ = unix.SOCK_STREAM
	}
	fd, err := unix.Socket(unix.AF_INET, typ|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		d.t.Error(err)
		return
	}
	to := d.servers[m.Upstream]
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); err != nil && err != unix.EINPROGRESS {
		d.t.Error(err)
	}
	f := os.NewFile(uintptr(fd), "server")
	defer f.Close()
	d.mu.Lock()
	d.sockets++
	d.mu.Unlock()
	d.tell(v, f)
}

func (d *daemon) lease(m Message) {
	kept := slices.DeleteFunc(slices.Clone(m.Addrs), func(a netip.Addr) bool { return a.IsPrivate() })
	d.mu.Lock()
	d.leased[m.Name] = kept
	d.mu.Unlock()
	if len(kept) == len(m.Addrs) {
		d.answers <- slices.Clone(m.Body)
		return
	}
	d.tell(Message{Kind: Verdict, ID: m.ID, Do: Keep, Addrs: kept}, nil)
}

// ask sends a query as TCP brings it, or by UDP.
func (d *daemon) ask(q *dns.Msg, tcp bool) *dns.Msg {
	d.t.Helper()
	b, err := q.Pack()
	if err != nil {
		d.t.Fatal(err)
	}
	if tcp {
		d.tell(Message{Kind: Query, Source: guest, Via: 7, Body: b}, nil)
	} else {
		c, err := net.Dial("udp4", d.udp.LocalAddr().String())
		if err != nil {
			d.t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write(b); err != nil {
			d.t.Fatal(err)
		}
	}
	return d.answer()
}

func (d *daemon) answer() *dns.Msg {
	d.t.Helper()
	select {
	case b := <-d.answers:
		a := new(dns.Msg)
		if err := a.Unpack(b); err != nil {
			d.t.Fatalf("%x: %v", b, err)
		}
		return a
	case <-time.After(30 * time.Second):
		d.t.Fatal("no answer")
		return nil
	}
}

// fake is a server on this host: UDP and TCP on one port.
func fake(t testing.TB, h dns.HandlerFunc) netip.AddrPort {
	t.Helper()
	l, pc := listen(t)
	go (&dns.Server{PacketConn: pc, Handler: h}).ActivateAndServe() //nolint:errcheck // ends with the test
	go (&dns.Server{Listener: l, Handler: h}).ActivateAndServe()    //nolint:errcheck // likewise
	return netip.MustParseAddrPort(l.Addr().String())
}

// listen opens a port by TCP and by UDP.
func listen(t testing.TB) (net.Listener, net.PacketConn) {
	t.Helper()
	for range 100 { // the same port of UDP may be taken
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		pc, err := net.ListenPacket("udp4", l.Addr().String())
		if err != nil {
			l.Close()
			continue
		}
		t.Cleanup(func() { l.Close(); pc.Close() })
		return l, pc
	}
	t.Fatal("no port is free for both UDP and TCP")
	return nil, nil
}

func records(t testing.TB, lines ...string) (rrs []dns.RR) {
	t.Helper()
	for _, l := range lines {
		rr, err := dns.NewRR(l)
		if err != nil {
			t.Fatal(err)
		}
		rrs = append(rrs, rr)
	}
	return rrs
}

// zone answers with the records of a name, whatever their owners are.
func zone(t testing.TB, names map[string][]string) dns.HandlerFunc {
	return func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		name := strings.ToLower(q.Question[0].Name)
		lines, ok := names[name]
		if !ok {
			m.Rcode = dns.RcodeNameError
			m.Ns = records(t, "test. 30 IN SOA ns.test. root.test. 1 1 1 1 20")
		}
		m.Answer = records(t, lines...)
		if _, isUDP := w.RemoteAddr().(*net.UDPAddr); isUDP {
			m.Truncate(EDNSSize)
		}
		w.WriteMsg(m) //nolint:errcheck // the other side says
	}
}

func datas(a *dns.Msg) string {
	var out []string
	for _, rr := range a.Answer {
		out = append(out, strings.TrimPrefix(rr.String(), rr.Header().String()))
	}
	return strings.Join(out, " ")
}

func question(name string, typ uint16) *dns.Msg { return new(dns.Msg).SetQuestion(name, typ) }

func TestAnswers(t *testing.T) {
	many := make([]string, 100)
	for i := range many {
		many[i] = fmt.Sprintf("many.test. 60 IN A 203.0.113.%d", i)
	}
	server := fake(t, zone(t, map[string][]string{
		"one.test.":    {"one.test. 60 IN A 203.0.113.1"},
		"cdn.test.":    {"cdn.test. 60 IN CNAME a.cdn.example.", "a.cdn.example. 30 IN CNAME b.example.", "b.example. 90 IN A 203.0.113.2"},
		"loop.test.":   {"loop.test. 60 IN CNAME a.test.", "a.test. 60 IN CNAME loop.test."},
		"poison.test.": {"poison.test. 60 IN A 203.0.113.3", "bank.example. 60 IN A 203.0.113.66", "x.poison.test. 60 IN A 203.0.113.67"},
		"steer.test.":  {"bank.example. 60 IN CNAME steer.test.", "bank.example. 60 IN A 203.0.113.66"},
		"rebind.test.": {"rebind.test. 60 IN CNAME in.example.", "in.example. 60 IN A 10.0.0.1", "in.example. 60 IN A 203.0.113.4"},
		"inside.test.": {"inside.test. 60 IN A 10.0.0.1"},
		"text.test.":   {`text.test. 60 IN TXT "word"`, "text.test. 60 IN A 10.0.0.1"},
		"srv.test.":    {"srv.test. 60 IN SRV 1 1 443 one.test."},
		"many.test.":   many,
		"ever.test.":   {"ever.test. 2147483647 IN A 203.0.113.5"},
	}))
	d := newDaemon(t, nil, Config{}, server)
	for _, c := range []struct {
		name  string
		typ   uint16
		rcode int
		want  string
	}{
		{"one.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.1"},
		{"oNE.tEst.", dns.TypeA, dns.RcodeSuccess, "203.0.113.1"},
		{"one.test.", dns.TypeAAAA, dns.RcodeSuccess, ""},
		{"one.test.", dns.TypeHTTPS, dns.RcodeSuccess, ""},
		{"one.test.", dns.TypeSVCB, dns.RcodeSuccess, ""},
		{"cdn.test.", dns.TypeA, dns.RcodeSuccess, "a.cdn.example. b.example. 203.0.113.2"},
		{"loop.test.", dns.TypeA, dns.RcodeSuccess, "a.test. loop.test."},
		{"absent.test.", dns.TypeA, dns.RcodeNameError, ""},
		{"poison.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.3"},
		{"steer.test.", dns.TypeA, dns.RcodeSuccess, ""},
		{"rebind.test.", dns.TypeA, dns.RcodeSuccess, "in.example. 203.0.113.4"},
		{"inside.test.", dns.TypeA, dns.RcodeSuccess, ""},
		{"text.test.", dns.TypeTXT, dns.RcodeSuccess, `"word"`},
		{"srv.test.", dns.TypeSRV, dns.RcodeSuccess, "1 1 443 one.test."},
		{"ever.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.5"},
		{"example.com.", dns.TypeA, dns.RcodeRefused, ""},
		{"example.com.", dns.TypeAAAA, dns.RcodeRefused, ""},
		{"test.example.", dns.TypeA, dns.RcodeRefused, ""},
	} {
		for _, cached := range []bool{false, true} { // the second time
			for _, tcp := range []bool{false, true} {
				q := question(c.name, c.typ)
				a := d.ask(q, tcp)
				if a.Id != q.Id || a.Question[0] != q.Question[0] || a.Rcode != c.rcode || datas(a) != c.want {
					t.Errorf("cached %t: %s %s: %v, want %s %q", cached, c.name, dns.TypeToString[c.typ], a, dns.RcodeToString[c.rcode],
						c.want)
				}
				for _, rr := range a.Answer {
					if rr.Header().Ttl > maxTTL {
						t.Errorf("%v lives longer than %d s", rr, maxTTL)
					}
				}
			}
		}
	}
	d.mu.Lock()
	sockets := d.sockets
	got := fmt.Sprint(d.leased["cdn.test"], d.leased["rebind.test"], d.leased["a.cdn.example"])
	if got != "[203.0.113.2] [203.0.113.4] []" {
		t.Errorf("leased: %s", got)
	}
	d.mu.Unlock()
	// One for each of 11 questions, none for what is cached, refused or without data. Two are
	// asked four times: their answers do not say how long it holds that there is no data.
	if n := 11 + 2*3; sockets != n {
		t.Errorf("%d sockets, want %d", sockets, n)
	}
	// More than a datagram holds: asked again by TCP, on both sides.
	if a := d.ask(question("many.test.", dns.TypeA), true); len(a.Answer) != len(many) {
		t.Errorf("%d of %d addresses", len(a.Answer), len(many))
	}
	if a := d.ask(question("many.test.", dns.TypeA), false); !a.Truncated || len(a.Answer) > dns.MinMsgSize/16 {
		t.Errorf("%d addresses, truncated %t", len(a.Answer), a.Truncated)
	}
}

// TestRefusalsSayWhy: a guest that understands Extended DNS Errors is told why, another gets
// no option that it has not asked for.
func TestRefusalsSayWhy(t *testing.T) {
	d := newDaemon(t, nil, Config{}, netip.MustParseAddrPort("127.0.0.1:9"))
	q := question("example.com.", dns.TypeA)
	if a := d.ask(q, false); a.Rcode != dns.RcodeRefused || a.IsEdns0() != nil {
		t.Error(a)
	}
	q.SetEdns0(4096, true)
	q.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0123456789abcdef"}}
	a := d.ask(q, false)
	opt := a.IsEdns0()
	if a.Rcode != dns.RcodeRefused || opt == nil || len(opt.Option) != 1 {
		t.Fatal(a)
	}
	if e, ok := opt.Option[0].(*dns.EDNS0_EDE); !ok || e.InfoCode != 15 || e.ExtraText != "no rule allows example.com" {
		t.Error(opt)
	}
	// A server that refuses TCP and UDP.
	q = question("one.test.", dns.TypeA).SetEdns0(1232, false)
	if a := d.ask(q, false); a.Rcode != dns.RcodeServerFailure || len(a.IsEdns0().Option) != 1 {
		t.Error(a)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if last := d.errors[len(d.errors)-1]; !strings.Contains(last, "connection refused") {
		t.Errorf("the daemon is told %q", last)
	}
}

// TestDeniedName: a name that the policy denies does not exist, for no time.
func TestDeniedName(t *testing.T) {
	d := newDaemon(t, nil, Config{}, netip.MustParseAddrPort("127.0.0.1:9"))
	for _, typ := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypePTR} {
		a := d.ask(question("denied.example.", typ).SetEdns0(1232, false), false)
		if a.Rcode != dns.RcodeNameError || len(a.Answer) != 0 || len(a.Ns) != 1 || a.IsEdns0() == nil || len(a.IsEdns0().Option) != 1 {
			t.Fatal(a)
		}
		if soa, ok := a.Ns[0].(*dns.SOA); !ok || soa.Hdr.Ttl != 0 || soa.Minttl != 0 || !dns.IsSubDomain(soa.Hdr.Name, "denied.example.") {
			t.Errorf("%v would be kept", a.Ns[0])
		}
		if e, ok := a.IsEdns0().Option[0].(*dns.EDNS0_EDE); !ok || e.InfoCode != 15 || e.ExtraText != "no rule allows denied.example" {
			t.Error(a)
		}
	}
}

// TestNoQueries: what is no query is answered as RFC 1035 says, or not at all.
func TestNoQueries(t *testing.T) {
	d := newDaemon(t, nil, Config{})
	notify := question("one.test.", dns.TypeA)
	notify.Opcode = dns.OpcodeNotify
	two := question("one.test.", dns.TypeA)
	two.Question = append(two.Question, two.Question[0])
	chaos := question("version.test.", dns.TypeTXT)
	chaos.Question[0].Qclass = dns.ClassCHAOS
	for q, rcode := range map[*dns.Msg]int{
		notify: dns.RcodeNotImplemented, two: dns.RcodeFormatError, {}: dns.RcodeFormatError, chaos: dns.RcodeRefused,
	} {
		if a := d.ask(q, true); a.Rcode != rcode || a.Id != q.Id {
			t.Errorf("%v\n%v", q, a)
		}
	}
	d.tell(Message{Kind: Query, Source: guest, Via: 1, Body: []byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x09a")}, nil)
	if a := d.answer(); a.Id != 0x1234 || a.Rcode != dns.RcodeFormatError {
		t.Error(a)
	}
	answer := question("one.test.", dns.TypeA)
	answer.Response = true
	b, err := answer.Pack()
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range [][]byte{b, b[:5], b[:14]} {
		d.tell(Message{Kind: Query, Source: guest, Via: 1, Body: b}, nil)
		if got := <-d.answers; len(got) > 0 {
			t.Errorf("%x is answered with %x", b, got)
		}
	}
}

// TestForged: an answer counts only with number, question and letters of the query. Those
// that somebody guesses are passed over, and too many of them lead to TCP, where nobody can.
func TestForged(t *testing.T) {
	real := func(q *dns.Msg, addr string) *dns.Msg {
		m := new(dns.Msg).SetReply(q)
		m.Answer = records(t, q.Question[0].Name+" 0 IN A "+addr)
		return m
	}
	swap := func(q *dns.Msg) {
		b := []byte(q.Question[0].Name)
		b[0] ^= 0x20
		q.Question[0].Name = string(b)
	}
	forge := map[string]func(m *dns.Msg){
		"id":       func(m *dns.Msg) { m.Id++ },
		"name":     func(m *dns.Msg) { m.Question[0].Name = "two.test." },
		"type":     func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeMX },
		"none":     func(m *dns.Msg) { m.Question = nil },
		"query":    func(m *dns.Msg) { m.Response = false },
		"letters":  swap,
		"guesses":  func(m *dns.Msg) { m.Id++ },
		"no match": func(m *dns.Msg) { m.Answer[0].Header().Name = "two.test." },
	}
	for what, change := range forge {
		t.Run(what, func(t *testing.T) {
			server := fake(t, func(w dns.ResponseWriter, q *dns.Msg) {
				if _, isTCP := w.RemoteAddr().(*net.TCPAddr); isTCP {
					w.WriteMsg(real(q, "203.0.113.1")) //nolint:errcheck // the other side says
					return
				}
				n := 1
				if what == "guesses" {
					n = maxStrays + 1
				}
				for range n {
					m := real(q, "203.0.113.66")
					change(m)
					w.WriteMsg(m) //nolint:errcheck // likewise
				}
				if what != "guesses" && what != "letters" {
					w.WriteMsg(real(q, "203.0.113.1")) //nolint:errcheck // likewise
				}
			})
			d := newDaemon(t, nil, Config{}, server)
			want := "203.0.113.1"
			if what == "no match" {
				want = "" // an answer to the question, without the name
			}
			if a := d.ask(question("one.test.", dns.TypeA), false); datas(a) != want || a.Rcode != dns.RcodeSuccess {
				t.Error(a)
			}
		})
	}
}

// TestFailOver: a server that is silent, refuses or fails gives way to the next, and is
// asked last for a while.
func TestFailOver(t *testing.T) {
	t.Parallel()
	well := fake(t, zone(t, map[string][]string{"one.test.": {"one.test. 0 IN A 203.0.113.1"}}))
	rcode := func(n int) dns.HandlerFunc {
		return func(w dns.ResponseWriter, q *dns.Msg) { w.WriteMsg(new(dns.Msg).SetRcode(q, n)) } //nolint:errcheck // likewise
	}
	silent := fake(t, func(dns.ResponseWriter, *dns.Msg) {})
	for what, ill := range map[string]netip.AddrPort{
		"silent": silent, "closed": netip.MustParseAddrPort("127.0.0.1:9"),
		"SERVFAIL": fake(t, rcode(dns.RcodeServerFailure)), "REFUSED": fake(t, rcode(dns.RcodeRefused)),
	} {
		d := newDaemon(t, nil, Config{}, ill, well)
		ask := func() error {
			if a := d.ask(question("one.test.", dns.TypeA), false); datas(a) != "203.0.113.1" {
				return fmt.Errorf("%s: %v", what, a)
			}
			return nil
		}
		if err := ask(); err != nil {
			t.Error(err)
		}
		took, err := hosttest.Soonest(Timeout/4, ask)
		if err != nil {
			t.Error(err)
		}
		if took > Timeout/4 {
			t.Errorf("%s: it took %v after that", what, took)
		}
	}
	d := newDaemon(t, nil, Config{}, fake(t, rcode(dns.RcodeServerFailure)), silent)
	if a := d.ask(question("one.test.", dns.TypeA), false); a.Rcode != dns.RcodeServerFailure {
		t.Error(a)
	}
	d = newDaemon(t, nil, Config{})
	if a := d.ask(question("one.test.", dns.TypeA), false); a.Rcode != dns.RcodeServerFailure {
		t.Error(a)
	}
}

// TestLostDatagram: a query is sent a second time.
func TestLostDatagram(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	lost := false
	h := zone(t, map[string][]string{"one.test.": {"one.test. 60 IN A 203.0.113.1"}})
	d := newDaemon(t, nil, Config{}, fake(t, func(w dns.ResponseWriter, q *dns.Msg) {
		mu.Lock()
		first := !lost
		lost = true
		mu.Unlock()
		if !first {
			h(w, q)
		}
	}))
	if a := d.ask(question("one.test.", dns.TypeA), false); datas(a) != "203.0.113.1" {
		t.Error(a)
	}
}

// TestLookup: the daemon asks for itself.
func TestLookup(t *testing.T) {
	d := newDaemon(t, nil, Config{}, fake(t, zone(t, map[string][]string{
		"one.test.": {"one.test. 60 IN A 203.0.113.1", "one.test. 60 IN A 203.0.113.2"},
	})))
	for range 2 {
		d.tell(Message{Kind: Lookup, Name: "one.test", Source: guest, Via: 9}, nil)
		if a := d.answer(); len(a.Answer) != 2 {
			t.Error(a)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.leased["one.test"]) != 2 || d.sockets != 1 {
		t.Errorf("leased %v with %d sockets", d.leased, d.sockets)
	}
}

// TestCache: answers expire, TTLs run down, and no answer fills the memory.
func TestCache(t *testing.T) {
	var c cache
	now := time.Now()
	c.put("one.test", dns.TypeA, pick("one.test", dns.TypeA, &dns.Msg{Answer: records(t, "one.test. 60 IN A 203.0.113.1")}), now)
	if e := c.get("one.test", dns.TypeA, now.Add(20*time.Second)); e == nil || e.left(now.Add(20*time.Second)) != 40 {
		t.Error(e)
	}
	if c.get("one.test", dns.TypeTXT, now) != nil || c.get("two.test", dns.TypeA, now) != nil {
		t.Error("another question")
	}
	if c.get("one.test", dns.TypeA, now.Add(60*time.Second)) != nil || len(c.m) != 0 {
		t.Error("it is kept for ever")
	}
	negative := &dns.Msg{MsgHdr: dns.MsgHdr{Rcode: dns.RcodeNameError}}
	for _, test := range []struct {
		soa string
		ttl uint32
	}{
		{"", 0},
		{"test. 30 IN SOA ns.test. root.test. 1 1 1 1 20", 20},
		{"test. 10 IN SOA ns.test. root.test. 1 1 1 1 20", 10},
		{"test. 86400 IN SOA ns.test. root.test. 1 1 1 1 86400", maxNegative},
		{"example. 30 IN SOA ns.test. root.test. 1 1 1 1 20", 0}, // of another zone
	} {
		negative.Ns = nil
		if test.soa != "" {
			negative.Ns = records(t, test.soa)
		}
		if e := pick("one.test", dns.TypeA, negative); e.ttl != test.ttl {
			t.Errorf("%q: %d s, want %d", test.soa, e.ttl, test.ttl)
		}
	}
	var large dns.Msg
	for range maxRecords + 1 {
		large.Answer = append(large.Answer, records(t, "large.test. 60 IN A 203.0.113.1")...)
	}
	c.put("large.test", dns.TypeA, pick("large.test", dns.TypeA, &large), now)
	c.put("long.test", dns.TypeTXT, pick("long.test", dns.TypeTXT, &dns.Msg{
		Answer: records(t, "long.test. 60 IN TXT "+strings.Repeat(strings.Repeat("a", 250)+" ", maxData/250+1)),
	}), now)
	c.put("broken.test", dns.TypeA, &entry{rcode: dns.RcodeServerFailure, ttl: 60}, now)
	if len(c.m) != 0 {
		t.Errorf("kept: %v", c.m)
	}
	for i := range maxEntries + 10 {
		c.put(fmt.Sprint(i), dns.TypeA, &entry{ttl: 60}, now)
	}
	if len(c.m) != maxEntries || c.get(fmt.Sprint(maxEntries+9), dns.TypeA, now) == nil {
		t.Errorf("%d entries", len(c.m))
	}
}

// TestSlow: a server that answers a byte at a time gets no more time than another.
func TestSlow(t *testing.T) {
	t.Parallel()
	l, pc := listen(t)
	go (&dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		m.Truncated = true
		w.WriteMsg(m) //nolint:errcheck // the other side says
	})}).ActivateAndServe() //nolint:errcheck // ends with the test
	ended := make(chan struct{}, 1)
	drip := func(c net.Conn) {
		defer c.Close()
		go io.Copy(io.Discard, c)             //nolint:errcheck // the query
		pace := time.NewTicker(Timeout / 100) // an answer of 65,535 bytes would take 22 minutes
		defer pace.Stop()
		var err error
		for _, err = c.Write([]byte{255, 255}); err == nil; _, err = c.Write([]byte{0}) {
			<-pace.C
		}
		ended <- struct{}{} // the child has closed its side
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil { // the test ends
				return
			}
			drip(c)
		}
	}()
	d := newDaemon(t, nil, Config{}, netip.MustParseAddrPort(l.Addr().String()))
	took, err := hosttest.Soonest(Timeout+time.Second, func() error {
		if a := d.ask(question("one.test.", dns.TypeA), false); a.Rcode != dns.RcodeServerFailure {
			return fmt.Errorf("it is answered: %v", a)
		}
		<-ended
		return nil
	})
	if err != nil || took > Timeout+time.Second {
		t.Errorf("it took %v, %v", took, err)
	}
}

// TestHuge: of an answer as large as one can be, the guest gets the addresses that the daemon
// was asked about.
func TestHuge(t *testing.T) {
	d := newDaemon(t, nil, Config{}, fake(t, func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		m.Compress = true
		if _, isUDP := w.RemoteAddr().(*net.UDPAddr); isUDP {
			m.Truncated = true
		} else {
			h := dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}
			for i := range 4000 {
				m.Answer = append(m.Answer, &dns.A{Hdr: h, A: net.IPv4(11, 0, byte(i>>8), byte(i))})
			}
		}
		w.WriteMsg(m) //nolint:errcheck // the other side says
	}))
	a := d.ask(question("one.test.", dns.TypeA), true)
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(a.Answer) != MaxAddrs || len(d.leased["one.test"]) != MaxAddrs {
		t.Errorf("%d addresses, %d leased", len(a.Answer), len(d.leased["one.test"]))
	}
}
