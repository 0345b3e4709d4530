package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

const (
	dnsInFlight = 64              // queries of one sandbox under way; more get SERVFAIL
	dnsConns    = 16              // TCP connections of one sandbox; more are closed
	dnsTimeout  = 2 * time.Second // for an answer, over all upstreams
	dnsIdle     = 5 * time.Second // a TCP connection may be idle this long
	dnsUDPSize  = 1232            // told to upstreams, and the most that is sent: no fragments (DNS flag day 2020)

	// dnsBuffer holds the queries by UDP of a burst of all sandboxes, at some 800 bytes each.
	// Connections do not have it: each of a sandbox could fill its own.
	dnsBuffer = 8 << 20

	resolvConf = "/etc/resolv.conf"
)

// dnsBudget is what a sandbox uses of the resolver.
type dnsBudget struct {
	queries, conns atomic.Int32
}

func take(n *atomic.Int32, limit int32) bool {
	if n.Add(1) > limit {
		n.Add(-1)
		return false
	}
	return true
}

// The resolver answers all queries that sandboxes send to port 53, to whatever server:
// DNAT brings them here. For a sandbox with an open network it asks the upstreams. For
// any other sandbox it refuses at once, since in this release rules cannot contain
// names. It has no cache: the upstream has one.
type resolver struct {
	e         *Engine
	log       *slog.Logger
	fixed     bool // upstreams are configured, not those of resolv.conf
	upstreams atomic.Pointer[[]netip.AddrPort]
	servers   []*dns.Server
	closing   atomic.Bool
	done      sync.WaitGroup
}

func newResolver(e *Engine) (*resolver, error) {
	r := &resolver{e: e, log: e.log, fixed: len(e.cfg.Upstreams) > 0}
	r.upstreams.Store(&e.cfg.Upstreams)
	r.refresh()
	addr := netip.AddrPortFrom(e.cfg.Gateway, ResolverPort).String()
	lc := net.ListenConfig{Control: func(network, _ string, c syscall.RawConn) error {
		var err error
		cerr := c.Control(func(fd uintptr) {
			// The gateway's address may be added to lo after this.
			err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1)
			if err == nil && network == "udp4" {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, dnsBuffer)
			}
		})
		return cmp.Or(cerr, err)
	}}
	ctx := context.Background() // only a name would take time
	pc, err := lc.ListenPacket(ctx, "udp4", addr)
	if err != nil {
		return nil, fmt.Errorf("start the resolver: %w (does another daemon use this gateway?)", err)
	}
	l, err := lc.Listen(ctx, "tcp4", addr)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the resolver: %w", err), pc.Close())
	}
	idle := func() time.Duration { return dnsIdle }
	r.servers = []*dns.Server{
		{PacketConn: pc, Handler: r, UDPSize: 4096},
		{Listener: &budgetListener{Listener: l, e: e}, Handler: r, ReadTimeout: dnsTimeout, WriteTimeout: dnsTimeout, IdleTimeout: idle},
	}
	return r, nil
}

func (r *resolver) serve() {
	for _, s := range r.servers {
		r.done.Go(func() {
			if err := s.ActivateAndServe(); !r.closing.Load() {
				err = cmp.Or(err, io.EOF)
				r.e.health.fail(fmt.Errorf("the resolver ended: %w", err))
				r.log.Error("the resolver ended: sandboxes resolve no names until the daemon is restarted", "err", err)
			}
		})
	}
}

func (r *resolver) close() error {
	r.closing.Store(true)
	for _, s := range r.servers {
		if s.PacketConn != nil {
			s.PacketConn.Close()
		}
		if s.Listener != nil {
			s.Listener.Close()
		}
	}
	r.done.Wait()
	return nil
}

// refresh reads resolv.conf again, unless the upstreams are configured.
func (r *resolver) refresh() {
	if r.fixed {
		return
	}
	conf, err := dns.ClientConfigFromFile(resolvConf)
	if err != nil {
		if !errors.Is(err, os.ErrNotExist) {
			r.log.Warn("cannot read the nameservers; those that were read before, if any, stay in use", "err", err)
		}
		return
	}
	var list []netip.AddrPort
	for _, s := range conf.Servers {
		if a, err := netip.ParseAddr(s); err == nil {
			list = append(list, netip.AddrPortFrom(a, 53))
		}
	}
	if len(list) > 0 {
		r.upstreams.Store(&list)
	}
}

// ServeDNS answers one query.
func (r *resolver) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	from, err := netip.ParseAddrPort(w.RemoteAddr().String())
	if err != nil {
		return
	}
	s := r.e.lookup(from.Addr().Unmap())
	start := time.Now()
	m := r.respond(s, q)
	_, isUDP := w.RemoteAddr().(*net.UDPAddr)
	limit := dns.MaxMsgSize
	if isUDP {
		limit = dns.MinMsgSize
		if opt := q.IsEdns0(); opt != nil {
			limit = min(max(int(opt.UDPSize()), dns.MinMsgSize), dnsUDPSize)
		}
	}
	m.Truncate(limit)
	if err := w.WriteMsg(m); err != nil {
		r.log.Debug("cannot send dns answer", "err", err)
	}
	if s != nil && len(q.Question) == 1 && r.log.Enabled(context.Background(), slog.LevelDebug) {
		r.log.Debug("dns", "sandbox", s.id, "name", q.Question[0].Name, "type", dns.TypeToString[q.Question[0].Qtype],
			"rcode", dns.RcodeToString[m.Rcode], "answers", len(m.Answer), "dur", time.Since(start))
	}
}

// respond makes the answer to q.
func (r *resolver) respond(s *sandbox, q *dns.Msg) *dns.Msg {
	m := new(dns.Msg)
	m.SetReply(q)
	m.RecursionAvailable = true
	if opt := q.IsEdns0(); opt != nil {
		m.SetEdns0(dnsUDPSize, false) // without options: no cookies, no client subnet
	}
	fail := func(rcode int) *dns.Msg {
		m.Rcode = rcode
		return m
	}
	if q.Opcode != dns.OpcodeQuery || q.Response {
		return fail(dns.RcodeNotImplemented)
	}
	if len(q.Question) != 1 {
		return fail(dns.RcodeFormatError)
	}
	if s == nil || !s.policy.Load().Open() && !weak.Off(weak.Names) {
		return fail(dns.RcodeRefused)
	}
	question := q.Question[0]
	switch {
	case question.Qclass != dns.ClassINET:
		return fail(dns.RcodeRefused)
	case question.Qtype == dns.TypeANY, question.Qtype == dns.TypeAXFR, question.Qtype == dns.TypeIXFR:
		return fail(dns.RcodeRefused)
	case question.Qtype == dns.TypeAAAA, question.Qtype == dns.TypeHTTPS, question.Qtype == dns.TypeSVCB:
		return m // no data: IPv6 is blocked, and the other two types carry addresses
	}
	if !take(&s.dns.queries, dnsInFlight) {
		return fail(dns.RcodeServerFailure)
	}
	defer s.dns.queries.Add(-1)
	a, err := r.forward(question)
	if err != nil {
		r.log.Debug("dns upstream", "sandbox", s.id, "err", err)
		return fail(dns.RcodeServerFailure)
	}
	m.Rcode = a.Rcode
	m.AuthenticatedData = false
	m.Answer = r.filter(s, a.Answer)
	m.Ns = r.filter(s, a.Ns)
	return m
}

// forward asks the upstreams in turn: by UDP, then by TCP if the answer is truncated.
func (r *resolver) forward(question dns.Question) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dnsTimeout)
	defer cancel()
	upstreams := *r.upstreams.Load()
	if len(upstreams) == 0 {
		return nil, fmt.Errorf("no nameserver is known: %s lists none and none is configured", resolvConf)
	}
	var errs []error
	for i, u := range upstreams {
		left := time.Duration(len(upstreams) - i)
		deadline, _ := ctx.Deadline()
		try, stop := context.WithTimeout(ctx, time.Until(deadline)/left)
		a, err := ask(try, u, question, r.forget(u))
		stop()
		if err == nil {
			return a, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", u, err))
	}
	return nil, errors.Join(errs...)
}

// ask sends a query that takes only the name and type from the guest: its id and port
// are fresh, and the letters of the name are in random case. It calls closed with the
// local address of each connection after its end, also of one that did not come about.
func ask(
	ctx context.Context, upstream netip.AddrPort, question dns.Question, closed func(network string, local netip.AddrPort),
) (*dns.Msg, error) {
	q := new(dns.Msg)
	q.SetQuestion(randomCase(question.Name), question.Qtype)
	q.SetEdns0(dnsUDPSize, false)
	var source netip.Addr // of the connection by UDP; that by TCP has it, too
	for _, network := range []string{"udp", "tcp"} {
		a, local, err := exchange(ctx, network, source, upstream, q)
		if local.IsValid() {
			closed(network, local)
		}
		if err != nil {
			return nil, err
		}
		if source = local.Addr(); source.Zone() != "" {
			source = netip.Addr{} // bind would want the number of the link
		}
		if len(a.Question) != 1 || a.Question[0].Qtype != question.Qtype || !strings.EqualFold(a.Question[0].Name, question.Name) {
			return nil, errors.New("the answer is for another question")
		}
		// Other letters: the answer is forged, or the server changes case. TCP settles
		// it.
		if network == "udp" && (a.Truncated || a.Question[0].Name != q.Question[0].Name) {
			continue
		}
		for _, section := range [][]dns.RR{a.Answer, a.Ns} {
			for _, rr := range section {
				if h := rr.Header(); strings.EqualFold(h.Name, question.Name) {
					h.Name = question.Name // in the guest's spelling again
				}
			}
		}
		return a, nil
	}
	return nil, errors.New("the answer is truncated even over TCP")
}

// exchange sends q over a connection of its own, and returns the address that it had. A
// connection from source is bound before it is made, so that its address is known if it
// fails: what was sent by then has an entry in conntrack's table.
func exchange(
	ctx context.Context, network string, source netip.Addr, upstream netip.AddrPort, q *dns.Msg,
) (a *dns.Msg, local netip.AddrPort, err error) {
	c := dns.Client{Net: network, UDPSize: dnsUDPSize, Timeout: dnsTimeout, Dialer: &net.Dialer{Timeout: dnsTimeout}}
	if source.IsValid() {
		c.Dialer.Control = func(_, _ string, raw syscall.RawConn) error {
			return raw.Control(func(fd uintptr) { local, _ = bind(int(fd), source) }) // not bound, it is only not known
		}
	}
	conn, err := c.DialContext(ctx, upstream.String())
	if err != nil {
		return nil, local, err
	}
	defer reset(conn.Conn)
	if local, err = netip.ParseAddrPort(conn.LocalAddr().String()); err != nil {
		return nil, local, err
	}
	a, _, err = c.ExchangeWithConnContext(ctx, q, conn)
	return a, local, err
}

// bind binds a socket to any free port of an address, and returns both.
func bind(fd int, source netip.Addr) (netip.AddrPort, error) {
	var sa unix.Sockaddr
	if source.Is4() {
		sa = &unix.SockaddrInet4{Addr: source.As4()}
	} else {
		sa = &unix.SockaddrInet6{Addr: source.As16()}
	}
	if err := unix.Bind(fd, sa); err != nil {
		return netip.AddrPort{}, os.NewSyscallError("bind", err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}, os.NewSyscallError("getsockname", err)
	}
	port := 0
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		port = sa.Port
	case *unix.SockaddrInet6:
		port = sa.Port
	}
	return netip.AddrPortFrom(source, uint16(port)), nil
}

// forget deletes the conntrack entry of a query to an upstream. The kernel would keep it
// for half a minute or two, and a guest may ask 200 times a second.
func (r *resolver) forget(upstream netip.AddrPort) func(network string, local netip.AddrPort) {
	to := plain(upstream)
	return func(network string, local netip.AddrPort) {
		if err := r.e.table.send(appendForget(nil, policy.Proto(network), plain(local), to)); err != nil {
			r.log.Debug("cannot delete the conntrack entry of a dns query", "err", err)
		}
	}
}

// plain is an address as it is in packets.
func plain(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}

// randomCase makes an answer harder to forge (0x20 encoding).
func randomCase(name string) string {
	b := []byte(name)
	for i, c := range b {
		if ('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z') && rand.IntN(2) == 0 {
			b[i] = c ^ 0x20
		}
	}
	return string(b)
}

// filter removes answers that a public name must not have: addresses of the host and
// its networks (rebinding), and IPv6. A private address stays if a rule names it.
func (r *resolver) filter(s *sandbox, rrs []dns.RR) []dns.RR {
	p := s.policy.Load()
	var out []dns.RR
	for _, rr := range rrs {
		switch rr := rr.(type) {
		case *dns.AAAA, *dns.HTTPS, *dns.SVCB:
			continue
		case *dns.A:
			a, ok := netip.AddrFromSlice(rr.A.To4())
			if !ok || r.e.blocks(a) != "" || policy.Private(a) && !p.Names(a) {
				continue
			}
		}
		out = append(out, rr)
	}
	return out
}

// budgetListener resets connections beyond a sandbox's budget. A reset leaves nothing
// behind; after an orderly end, the kernel would keep the connection for minutes.
type budgetListener struct {
	net.Listener
	e *Engine
}

// Accept returns the next connection that is within budget.
func (l *budgetListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from, err := netip.ParseAddrPort(c.RemoteAddr().String())
		if err == nil {
			if s := l.e.lookup(from.Addr().Unmap()); s != nil && take(&s.dns.conns, dnsConns) {
				return &budgetConn{Conn: c, give: sync.OnceFunc(func() { s.dns.conns.Add(-1) })}, nil
			}
		}
		reset(c)
	}
}

// reset ends a connection without the goodbyes of TCP.
func reset(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		t.SetLinger(0) //nolint:errcheck // it ends slowly then
	}
	c.Close()
}

type budgetConn struct {
	net.Conn
	give func()
}

// Close closes the connection and frees its place in the budget.
func (c *budgetConn) Close() error {
	c.give()
	return c.Conn.Close()
}
