// Package names reads DNS: queries of guests, and answers of the servers that are asked for
// them. It runs in a child of internal/confine, which has no privilege, no network and no
// file. The daemon decides.
//
//	guest ── query ──▶ child    reads it, looks into its cache
//	                   child ── Ask ────────▶ daemon   policy, budgets
//	                   child ◀─ Verdict ───── daemon   with a socket, connected to a server
//	                   child    asks the server, reads its answer
//	                   child ── Lease ──────▶ daemon   records which addresses the guest may have,
//	guest ◀────────────────────────── answer ─ daemon   and only then sends the answer
//
// With a cached answer the first message is enough: it carries the answer, and the daemon
// sends it if it allows the name and all its addresses.
//
// What surprises: the child never sends to guests. It receives by the socket for UDP, and
// the daemon sends. A socket for UDP can send to any address of its network, so a child that
// was taken over must not have one that it can send by: the filter of system calls leaves it
// write(2), which reaches only what a socket is connected to.
package names

import (
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
)

const (
	// Timeout is how long a query may take, over all servers.
	Timeout = 2 * time.Second
	// EDNSSize is told to servers, and the most that a guest gets by UDP: no fragments (DNS
	// flag day 2020).
	EDNSSize = 1232
	// MaxQuery is the longest query that is read.
	MaxQuery = 4096

	// maxPending is how many queries of all sandboxes may wait for servers; more are
	// dropped. The daemon has a limit for each sandbox.
	maxPending = 8192
	// maxRecent is how many answers the daemon may send back: it must do that before that
	// many others came.
	maxRecent = 4096
)

// Config tells the child which servers there are.
type Config struct {
	Upstreams []Upstream `json:"upstreams"`
}

// Upstream is a DNS server. The child does not know its address.
type Upstream struct {
	// TLS is the name in the server's certificate; empty: UDP and TCP without TLS.
	TLS string `json:"tls,omitempty"`
}

// server is the child.
type server struct {
	line  *child.Conn
	cache cache
	setup atomic.Pointer[setup]
	udp   *os.File // receives queries once there is a setup
	began sync.Once
	roots *x509.CertPool // nil: no server is asked by TLS
	last  atomic.Uint64  // the number of the last query

	mu      sync.Mutex
	waiting map[uint64]chan verdict // queries that ask servers
	recent  [maxRecent]*query       // answers that the daemon sends, or sends back
}

// setup is a Config in use.
type setup struct {
	Config
	health []atomic.Int64 // for each server, until when it is asked last, in Unix nanoseconds
	tls    []*pool        // for each server that is asked by TLS
}

type verdict struct {
	Message
	file *os.File
}

// query is a question on its way.
type query struct {
	Message          // as it was asked
	msg     *dns.Msg // the guest's
	limit   int      // bytes of the answer
	found   *entry   // what the daemon may send back
}

// ServeVerb is the child's verb. The program that starts it passes [Serve] to confine.Main
// under this name.
const ServeVerb = "names"

// Serve answers queries until the daemon is gone. Its files are the socket for UDP and, if a
// server is asked by TLS, the certificates of authorities.
func Serve([]string) error {
	// A query passes from one goroutine to the next. With more processors Go wakes another
	// thread for each step: 8 switches of threads for an answer that is not cached, not 4.
	runtime.GOMAXPROCS(1)
	return child.Serve(MaxMessage, func(c *child.Conn, files []*os.File) (func(child.Message), error) {
		return Open(c, files)
	})
}

// Open is Serve in this process: what it returns takes the messages of line. Tests have the
// two ends beside one another.
func Open(line *child.Conn, files []*os.File) (handle func(child.Message), err error) {
	s, err := newServer(line, files)
	if err != nil {
		return nil, err
	}
	return s.handle, nil
}

func newServer(line *child.Conn, files []*os.File) (*server, error) {
	if len(files) == 0 || len(files) > 2 {
		return nil, fmt.Errorf("%d files, want the socket and the certificates", len(files))
	}
	s := &server{line: line, waiting: map[uint64]chan verdict{}}
	s.setup.Store(&setup{})
	s.last.Store(rand.Uint64())
	// Whoever started this process has made the socket blocking, on the way.
	fd, err := unix.FcntlInt(files[0].Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	s.udp = os.NewFile(uintptr(fd), "queries")
	if len(files) == 2 {
		if s.roots, err = readRoots(files[1]); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// handle takes a message of the daemon. It does not wait for the daemon, which may wait for
// this.
func (s *server) handle(in child.Message) {
	m, err := Parse(Kind(in.Kind), in.Body)
	if err != nil || in.File != nil && m.Kind != Verdict {
		panic(fmt.Sprintf("a message of kind %d from the daemon: %v", in.Kind, err))
	}
	switch m.Kind {
	case Setup:
		s.configure(m.Body)
		s.began.Do(func() { go s.receive() })
	case Query:
		go s.read(m.Source, m.Via, m.Body, dns.MaxMsgSize)
	case Lookup:
		q := new(dns.Msg).SetQuestion(dns.Fqdn(m.Name), dns.TypeA)
		go s.answer(m.Source, m.Via, q, dns.MaxMsgSize)
	case Verdict:
		s.deliver(verdict{m, in.File})
	}
}

func (s *server) configure(body []byte) {
	next := &setup{}
	if err := json.Unmarshal(body, &next.Config); err != nil {
		panic(fmt.Sprintf("the configuration of the resolver: %v", err))
	}
	next.health = make([]atomic.Int64, len(next.Upstreams))
	next.openPools(s.roots)
	s.setup.Store(next)
}

// receive reads queries that come by UDP.
func (s *server) receive() {
	raw, err := s.udp.SyscallConn()
	if err != nil {
		return
	}
	b := make([]byte, MaxQuery)
	for {
		var n int
		var from unix.Sockaddr
		rerr := raw.Read(func(fd uintptr) bool {
			n, from, err = unix.Recvfrom(int(fd), b, unix.MSG_DONTWAIT)
			return !errors.Is(err, syscall.EAGAIN)
		})
		if rerr != nil {
			return // it is closed
		}
		if sa, ok := from.(*unix.SockaddrInet4); ok && err == nil {
			s.read(netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)), 0, b[:n], 0)
		}
	}
}

// read reads one query. A limit of 0 is that of UDP.
func (s *server) read(source netip.AddrPort, via uint32, b []byte, limit int) {
	q := new(dns.Msg)
	if err := q.Unpack(b); err != nil {
		// Whoever sends no query gets no answer: two servers could talk for ever.
		if len(b) < 12 || b[2]&0x80 != 0 {
			s.drop(source, via)
			return
		}
		*q = dns.Msg{MsgHdr: dns.MsgHdr{Id: uint16(b[0])<<8 | uint16(b[1])}}
		s.refuse(source, via, q, dns.RcodeFormatError)
		return
	}
	switch {
	case q.Response:
		s.drop(source, via)
		return
	case q.Opcode != dns.OpcodeQuery:
		s.refuse(source, via, q, dns.RcodeNotImplemented)
		return
	case len(q.Question) != 1:
		s.refuse(source, via, q, dns.RcodeFormatError)
		return
	}
	if limit == 0 {
		limit = dns.MinMsgSize
		if opt := q.IsEdns0(); opt != nil {
			limit = min(max(int(opt.UDPSize()), dns.MinMsgSize), EDNSSize)
		}
	}
	s.answer(source, via, q, limit)
}

// drop ends a query without an answer. The daemon must know it of one that came by TCP.
func (s *server) drop(source netip.AddrPort, via uint32) {
	if via != 0 {
		s.send(Message{Kind: Reply, Source: source, Via: via})
	}
}

// refuse answers a query that no policy need be asked about.
func (s *server) refuse(source netip.AddrPort, via uint32, q *dns.Msg, rcode int) {
	m := query{msg: q, limit: dns.MinMsgSize}
	s.send(Message{Kind: Reply, Source: source, Via: via, Rcode: uint8(rcode), Body: m.reply(rcode, nil, nil, "")})
}

// send sends a message. If that fails, the daemon is gone, and Serve ends too.
func (s *server) send(m Message) {
	b := buffers.Get().(*[]byte)
	*b = m.Append((*b)[:0])
	_ = s.line.Tell(uint8(m.Kind), *b, nil)
	buffers.Put(b)
}

var buffers = sync.Pool{New: func() any { return new([]byte) }}

// answer answers a query that is well formed. If servers must be asked, it returns before
// that has ended.
func (s *server) answer(source netip.AddrPort, via uint32, msg *dns.Msg, limit int) {
	question := msg.Question[0]
	q := &query{
		Message: Message{
			Kind: Ask, ID: s.last.Add(1), Source: source, Via: via, Name: plain(question.Name), Type: question.Qtype,
		},
		msg: msg, limit: limit,
	}
	if question.Qclass != dns.ClassINET {
		q.Type = dns.TypeNone // the daemon serves no such type
	}
	now := time.Now()
	switch q.Type {
	case dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB:
		// No data: IPv6 is blocked, and the other two types carry addresses and keys of ECH.
		q.found = &entry{}
	default:
		q.found = s.cache.get(q.Name, q.Type, now)
	}
	if q.found != nil {
		ttl := q.found.left(now)
		m := q.Message
		m.Hit, m.Addrs, m.TTL, m.Rcode = true, q.found.addrs, ttl, uint8(q.found.rcode)
		m.Body = q.reply(q.found.rcode, q.found, nil, "")
		s.hold(q)
		s.send(m)
		return
	}
	got := make(chan verdict, 1)
	s.mu.Lock()
	if len(s.waiting) >= maxPending {
		s.mu.Unlock()
		s.drop(source, via)
		return
	}
	s.waiting[q.ID] = got
	s.mu.Unlock()
	go s.forward(q, got)
}

// hold keeps a query that the daemon may send back.
func (s *server) hold(q *query) {
	s.mu.Lock()
	s.recent[q.ID%maxRecent] = q
	s.mu.Unlock()
}

// deliver hands a verdict to the query that waits for it.
func (s *server) deliver(v verdict) {
	s.mu.Lock()
	got, waits := s.waiting[v.ID]
	q := s.recent[v.ID%maxRecent]
	if !waits && q != nil && q.ID == v.ID {
		s.recent[v.ID%maxRecent] = nil
	} else {
		q = nil
	}
	s.mu.Unlock()
	switch {
	case waits:
		select {
		case got <- v:
			return
		default:
		}
	case q != nil:
		go s.conclude(q, v)
	}
	if v.file != nil {
		v.file.Close()
	}
}

// conclude answers as the daemon said.
func (s *server) conclude(q *query, v verdict) {
	m := Message{Kind: Reply, ID: q.ID, Source: q.Source, Via: q.Via, Rcode: dns.RcodeRefused}
	switch v.Do {
	case Keep:
		m.Rcode = uint8(q.found.rcode)
		m.Body = q.reply(q.found.rcode, q.found, append([]netip.Addr{}, v.Addrs...), "")
	case Point:
		m.Rcode = dns.RcodeSuccess
		m.Body = q.reply(dns.RcodeSuccess, pointers(q.Name, string(v.Body), v.TTL), nil, "")
	case Refuse:
		m.Body = q.reply(dns.RcodeRefused, nil, nil, v.Text)
	case NoName:
		m.Rcode = dns.RcodeNameError
		m.Body = q.reply(dns.RcodeNameError, &entry{soa: []dns.RR{denies}}, nil, v.Text)
	default:
		m.Rcode = dns.RcodeServerFailure
		m.Body = q.reply(dns.RcodeServerFailure, nil, nil, v.Text)
	}
	s.send(m)
}

// forward asks the servers, if the daemon allows that.
func (s *server) forward(q *query, got chan verdict) {
	defer s.forget(q.ID, got)
	x := &exchange{s: s, q: q, setup: s.setup.Load(), got: got, deadline: time.Now().Add(Timeout)}
	order := x.setup.order(time.Now())
	m := q.Message
	m.Upstream = NoSocket
	if len(order) > 0 {
		if p := x.setup.tls[order[0]]; p == nil || !p.ready(time.Now()) {
			m.Upstream, m.TCP = uint8(order[0]), p != nil
		}
		if !m.TCP {
			x.first, m.Body = x.message() // the daemon sends it, which saves a turn
		}
	}
	s.send(m)
	v, err := x.wait()
	if err != nil {
		return // the daemon has given up too
	}
	if v.Do != Forward {
		s.conclude(q, v)
		return
	}
	x.sent = v.Hit
	e, err := x.ask(order, v.file)
	if err != nil {
		m := Message{Kind: Reply, ID: q.ID, Source: q.Source, Via: q.Via, Rcode: dns.RcodeServerFailure, Text: err.Error()}
		m.Body = q.reply(dns.RcodeServerFailure, nil, nil, "no name server answered")
		s.send(m)
		return
	}
	now := time.Now()
	s.cache.put(q.Name, q.Type, e, now)
	m = Message{
		Kind: Lease, ID: q.ID, Source: q.Source, Via: q.Via, Name: q.Name, Type: q.Type, Rcode: uint8(e.rcode),
		Addrs: e.addrs, TTL: e.left(now), Body: q.reply(e.rcode, e, nil, ""),
	}
	// The daemon sends back an answer with addresses alone. Others may be large, and would
	// stay until as many came again.
	if q.found = e; len(e.addrs) > 0 {
		s.hold(q)
	}
	s.forget(q.ID, got) // from now on a verdict is for conclude
	s.send(m)
}

func (s *server) forget(id uint64, got chan verdict) {
	s.mu.Lock()
	if s.waiting[id] == got {
		delete(s.waiting, id)
	}
	s.mu.Unlock()
	select {
	case v := <-got:
		if v.file != nil {
			v.file.Close()
		}
	default:
	}
}
