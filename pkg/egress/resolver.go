package egress

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/names"
	"github.com/sandboxd/sandboxd/pkg/egress/tunnel"
)

const (
	dnsInFlight  = 64              // queries of one sandbox that wait for servers; more get SERVFAIL
	dnsConns     = 16              // TCP connections of one sandbox; more are closed
	dnsIdle      = 5 * time.Second // a TCP connection may be idle this long
	dnsPerSecond = 200             // queries of one sandbox, as the chains have it for UDP
	dnsBurst     = 400
	dnsMemory    = 512 << 20 // data of the child: the cache has at most 100 MiB
	dnsLines     = 10        // lines of the log for each sandbox and second

	// dnsBuffer holds the queries by UDP of a burst of all sandboxes, at some 800 bytes each.
	// Connections do not have it: each of a sandbox could fill its own.
	dnsBuffer = 8 << 20

	resolvConf = "/etc/resolv.conf"
)

// authorities are where distributions keep the certificates of authorities, as crypto/x509
// looks for them.
var authorities = []string{
	"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem",
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
}

// Upstream is a DNS server. With TLS, the name in its certificate, it is asked by DNS over
// TLS only.
type Upstream struct {
	Addr netip.AddrPort
	TLS  string
}

// dnsBudget is what a sandbox uses of the resolver. Whoever handles the messages of the child
// alone uses what follows conns.
type dnsBudget struct {
	queries, conns atomic.Int32

	left   float64 // of the rate
	at     time.Time
	watch  tunnel.Watch
	denied rate
	lines  rate
	quiet  int // queries without a line since the last one

	byTCP rate // messages, guarded by resolver.mu: the child says nothing of those that are no queries
}

func take(n *atomic.Int32, limit int32) bool {
	if n.Add(1) > limit {
		n.Add(-1)
		return false
	}
	return true
}

// within counts a query, unless there were too many.
func (b *dnsBudget) within(now time.Time) bool {
	b.left = min(b.left+now.Sub(b.at).Seconds()*dnsPerSecond, dnsBurst)
	b.at = now
	if b.left < 1 {
		return false
	}
	b.left--
	return true
}

// The resolver answers all queries that sandboxes send to port 53, to whatever server: DNAT
// brings them here. A child reads DNS (pkg/egress/names). The resolver decides about names,
// types and addresses, makes the sockets to servers, keeps the limits, records the leases,
// and sends the answers.
type resolver struct {
	e     *Engine
	log   *slog.Logger
	fixed bool // upstreams are configured, not those of resolv.conf
	udp   int  // the child receives by it, the resolver sends
	tcp   net.Listener
	files []*os.File // of the child
	child *child.Supervisor

	closing atomic.Bool
	done    sync.WaitGroup
	servers servers

	mu        sync.Mutex
	upstreams []Upstream
	line      *child.Conn // to the child that runs, or nil
	asking    map[uint64]*asking
	requests  map[uint32]*request
	last      uint32       // the number of the last request
	streams   []*dnsSocket // for DNS over TLS: the child uses them again
}

// asking is a query that waits for servers.
type asking struct {
	names.Message // Ask
	s             *sandbox
	why           string
	sockets       []*dnsSocket
	late          *time.Timer
}

// request is what the daemon asked the child for: to read a query that came by TCP, or for
// the addresses of a name.
type request struct {
	source netip.Addr
	kept   []netip.Addr
	denied bool // the policy denies the name
	answer chan []byte
}

func newResolver(ctx context.Context, e *Engine) (*resolver, error) {
	r := &resolver{
		e: e, log: e.log, fixed: len(e.cfg.Upstreams) > 0, udp: -1, upstreams: e.cfg.Upstreams,
		asking: map[uint64]*asking{}, requests: map[uint32]*request{},
	}
	r.refresh()
	err := r.listen(ctx, netip.AddrPortFrom(e.cfg.Gateway, ResolverPort))
	if err == nil {
		r.child, err = child.Start(ctx, child.Config{
			Verb: names.ServeVerb, Files: r.files, Memory: dnsMemory, Max: names.MaxMessage, Logger: e.log,
			Handle: r.handle, Begin: r.begin, End: r.end,
		})
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the resolver: %w", err), r.close())
	}
	return r, nil
}

// listen makes the sockets at the gateway's address, which may be added to lo after this.
func (r *resolver) listen(ctx context.Context, at netip.AddrPort) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	r.udp = fd
	err = cmp.Or(unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_FREEBIND, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, dnsBuffer),
		unix.Bind(fd, &unix.SockaddrInet4{Addr: at.Addr().As4(), Port: int(at.Port())}))
	if err != nil {
		return fmt.Errorf("listen on %s by UDP: %w (does another daemon, or another program, use the gateway's port? `ss -lnp` shows it)",
			at, err)
	}
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	r.files = []*os.File{os.NewFile(uintptr(dup), "queries by UDP")}
	for _, u := range r.upstreams {
		if u.TLS == "" {
			continue
		}
		roots, err := openAuthorities()
		if err != nil {
			return fmt.Errorf("ask %s by TLS: %w", u.Addr, err)
		}
		r.files = append(r.files, roots)
		break
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1) })
		return cmp.Or(cerr, err)
	}}
	r.tcp, err = lc.Listen(ctx, "tcp4", at.String())
	return err
}

func openAuthorities() (*os.File, error) {
	for _, p := range authorities {
		if f, err := os.Open(p); err == nil {
			return f, nil
		}
	}
	return nil, fmt.Errorf("this host has no certificates of authorities in %s; install the package ca-certificates",
		strings.Join(authorities, ", "))
}

func (r *resolver) serve() {
	r.done.Go(func() {
		if err := r.accept(); !r.closing.Load() {
			err = cmp.Or(err, io.EOF)
			r.e.health.fail(fmt.Errorf("the resolver ended: %w", err))
			r.log.Error("the resolver ended: sandboxes resolve no names by TCP until the daemon is restarted", "err", err)
		}
	})
}

func (r *resolver) close() error {
	r.closing.Store(true)
	if r.child != nil {
		r.child.Close() //nolint:errcheck // it has no error
	}
	if r.tcp != nil {
		r.tcp.Close()
	}
	r.done.Wait()
	for _, f := range r.files {
		f.Close()
	}
	if r.udp >= 0 {
		unix.Close(r.udp)
	}
	r.udp = -1
	return nil
}

// refresh reads resolv.conf again, unless the upstreams are configured.
func (r *resolver) refresh() {
	if r.fixed {
		return
	}
	b, err := os.ReadFile(resolvConf)
	if err != nil {
		if !errors.Is(err, os.ErrNotExist) {
			r.log.Warn("cannot read the nameservers; those that were read before, if any, stay in use", "err", err)
		}
		return
	}
	var list []Upstream
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "nameserver" {
			if a, err := netip.ParseAddr(f[1]); err == nil {
				list = append(list, Upstream{Addr: netip.AddrPortFrom(a, 53)})
			}
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(list) == 0 || slices.Equal(list, r.upstreams) {
		return
	}
	r.upstreams = list
	if r.line != nil {
		go r.tell(r.line, r.setup(), nil) // a child that does not read holds up nobody
	}
}

// setup says which servers there are.
//
// Preconditions: r.mu is held.
func (r *resolver) setup() names.Message {
	var c names.Config
	for _, u := range r.upstreams[:min(len(r.upstreams), names.NoSocket)] {
		c.Upstreams = append(c.Upstreams, names.Upstream{TLS: u.TLS})
	}
	body, _ := json.Marshal(c) // strings: it cannot fail
	return names.Message{Kind: names.Setup, Body: body}
}

// tell sends a message to the child. If that fails, it is gone, and the next one begins anew.
func (r *resolver) tell(line *child.Conn, m names.Message, f *os.File) {
	if err := line.Tell(uint8(m.Kind), m.Append(nil), f); err != nil {
		r.log.Debug("the resolver's child", "err", err)
	}
}

func (r *resolver) begin(line *child.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.line = line
	r.tell(line, r.setup(), nil)
}

// end forgets what the child had to do: guests ask again.
func (r *resolver) end(*child.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.line = nil
	for id := range r.asking {
		r.finish(id)
	}
	for via, q := range r.requests {
		close(q.answer)
		delete(r.requests, via)
	}
	for _, s := range r.streams {
		r.release(s)
	}
	r.streams = nil
}

// newRequest notes that the child is asked for something for source.
func (r *resolver) newRequest(source netip.Addr) (q *request, via uint32, line *child.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.line == nil {
		return nil, 0, nil
	}
	for r.last++; r.last == 0 || r.requests[r.last] != nil; {
		r.last++
	}
	q = &request{source: source, answer: make(chan []byte, 1)}
	r.requests[r.last] = q
	return q, r.last, r.line
}

// accept serves connections by TCP. Those beyond a sandbox's budget are reset: that leaves
// nothing behind; after an orderly end, the kernel would keep the connection for minutes.
func (r *resolver) accept() error {
	for {
		c, err := r.tcp.Accept()
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
			time.Sleep(10 * time.Millisecond) // there is no event when a descriptor is free
			continue
		}
		if err != nil {
			return err
		}
		from, err := netip.ParseAddrPort(c.RemoteAddr().String())
		if err == nil {
			if s := r.e.lookup(from.Addr().Unmap()); s != nil && take(&s.dns.conns, dnsConns) {
				go func() {
					defer s.dns.conns.Add(-1)
					r.converse(c, netip.AddrPortFrom(from.Addr().Unmap(), from.Port()))
				}()
				continue
			}
		}
		reset(c)
	}
}

// converse reads queries from a connection, and writes their answers. It reads only how long
// they are.
func (r *resolver) converse(c net.Conn, from netip.AddrPort) {
	defer c.Close()
	b := make([]byte, 2+names.MaxQuery)
	for wait := names.Timeout; ; wait = dnsIdle {
		c.SetDeadline(time.Now().Add(wait)) //nolint:errcheck // shows in the read
		if _, err := io.ReadFull(c, b[:2]); err != nil {
			return
		}
		n := int(b[0])<<8 | int(b[1])
		if n > names.MaxQuery {
			return
		}
		c.SetDeadline(time.Now().Add(names.Timeout)) //nolint:errcheck // likewise
		if _, err := io.ReadFull(c, b[:n]); err != nil {
			return
		}
		if !r.spare(from.Addr()) {
			return
		}
		q, via, line := r.newRequest(from.Addr())
		if q == nil {
			return // the guest asks again
		}
		r.tell(line, names.Message{Kind: names.Query, Source: from, Via: via, Body: b[:n]}, nil)
		ctx, cancel := context.WithTimeout(context.Background(), names.Timeout+dnsLate)
		answer, err := r.await(ctx, q, via)
		cancel()
		if err != nil || len(answer) == 0 {
			return
		}
		c.SetDeadline(time.Now().Add(names.Timeout)) //nolint:errcheck // shows in the write
		if _, err := c.Write(append([]byte{byte(len(answer) >> 8), byte(len(answer))}, answer...)); err != nil {
			return
		}
	}
}

// spare counts a message by TCP, unless the sandbox had too many in this second.
func (r *resolver) spare(from netip.Addr) bool {
	s := r.e.lookup(from)
	r.mu.Lock()
	defer r.mu.Unlock()
	return s != nil && s.dns.byTCP.allow(time.Now(), dnsBurst)
}

// await waits for the answer to a request.
func (r *resolver) await(ctx context.Context, q *request, via uint32) ([]byte, error) {
	select {
	case b, ok := <-q.answer:
		if !ok {
			return nil, child.ErrGone
		}
		return b, nil
	case <-ctx.Done():
		r.mu.Lock()
		if r.requests[via] == q {
			delete(r.requests, via)
		}
		r.mu.Unlock()
		return nil, ctx.Err()
	}
}

// reset ends a connection without the goodbyes of TCP.
func reset(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		t.SetLinger(0) //nolint:errcheck // it ends slowly then
	}
	c.Close()
}
