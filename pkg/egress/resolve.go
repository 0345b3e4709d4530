package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/conntrack"
	"github.com/sandboxd/sandboxd/pkg/egress/leases"
	"github.com/sandboxd/sandboxd/pkg/egress/names"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

// dnsLate is how much longer than the child the daemon waits for servers.
const dnsLate = time.Second

// handle takes a message of the child. It trusts none: what the child may not say changes
// nothing.
func (r *resolver) handle(line *child.Conn, in child.Message) {
	m, err := names.Parse(names.Kind(in.Kind), in.Body)
	if err != nil {
		r.log.Error("the child that reads DNS sent what it must not; sandboxd ends it", "err", err)
		line.Close()
		return
	}
	switch m.Kind {
	case names.Ask:
		r.asked(line, m)
	case names.Socket:
		r.mu.Lock()
		a := r.asking[m.ID]
		r.mu.Unlock()
		if a != nil {
			r.give(line, a, m)
		}
	case names.Lease:
		r.mu.Lock()
		a := r.remove(m.ID)
		r.mu.Unlock()
		if a != nil {
			r.servers.heard(true, time.Now(), r.log)
			m.Name, m.Type, m.Source, m.Via = a.Name, a.Type, a.Source, a.Via
			r.answer(line, a.s, m, a.why)
			r.releaseAll(a) // the guest need not wait for that
		}
	case names.Reply:
		r.mu.Lock()
		a := r.finish(m.ID)
		r.mu.Unlock()
		if a != nil {
			r.servers.heard(false, time.Now(), r.log)
			r.note(a.s, a.Message, "fail", a.why, names.RcodeName(m.Rcode))
			r.log.Debug("no name server answered", "sandbox", a.s.id, "err", m.Text)
		}
		r.send(m)
	}
}

// asked answers whether a sandbox may ask for a name. If the child has the answer, it is sent.
func (r *resolver) asked(line *child.Conn, m names.Message) {
	v := names.Message{Kind: names.Verdict, ID: m.ID, Do: names.Refuse}
	s := r.e.lookup(m.Source.Addr())
	if s == nil {
		v.Text = "this sandbox is not known yet; ask again"
		r.tell(line, v, nil)
		return
	}
	now := time.Now()
	if known := r.pointers(s, m); len(known) > 0 && s.dns.within(now) {
		v.Do, v.TTL, v.Body = names.Point, uint32(leases.Least/time.Second), []byte(strings.Join(known, "\n"))
		r.note(s, m, "allow", "lease", fmt.Sprint(known))
		r.tell(line, v, nil)
		return
	}
	why, do := r.allows(s, m, now)
	switch {
	case do != names.Forward:
		rcode := uint8(rcodeRefused)
		if do == names.NoName {
			v.Do, rcode = do, rcodeNoName
			r.ofRequest(s, m, func(q *request) { q.denied = true })
		}
		v.Text = "refused by the network policy: " + Denial{Rule: why, By: ByDNS}.Reason()
		r.note(s, m, "refuse", why, names.RcodeName(rcode))
		r.tellName(s, m.Name, why)
		// The flow log has what a sandbox wanted to reach, and this is as far as it got.
		query := policy.Flow{Src: s.addr, Proto: unix.IPPROTO_UDP, Port: policy.DNSPort}
		r.e.count(s, query, cmp.Or(m.Name[:min(len(m.Name), 253)], "."), false)
		r.tell(line, v, nil)
	case m.Hit:
		r.answer(line, s, m, why)
	case !take(&s.dns.queries, inFlight()):
		v.Do, v.Text = names.Fail, fmt.Sprintf("%d queries of this sandbox wait for name servers, which is the limit", dnsInFlight)
		r.note(s, m, "fail", "limit", "")
		r.tell(line, v, nil)
	default:
		a := &asking{Message: m, s: s, why: why}
		a.Body, a.Addrs = nil, nil
		r.mu.Lock()
		if r.asking[m.ID] != nil { // the child counts its queries
			r.mu.Unlock()
			s.dns.queries.Add(-1)
			return
		}
		r.asking[m.ID] = a
		a.late = time.AfterFunc(names.Timeout+dnsLate, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.asking[m.ID] == a {
				r.finish(m.ID)
			}
		})
		r.mu.Unlock()
		r.give(line, a, m)
	}
}

// inFlight is how many queries of one sandbox may wait for servers.
func inFlight() int32 {
	if weak.Off(weak.Resolver) {
		return 1 << 16
	}
	return dnsInFlight
}

// RFC 1035, section 4.1.1.
const rcodeNoName, rcodeRefused = 3, 5

// errRefused: the policy of a sandbox, or a limit, refuses a name.
var errRefused = errors.New("DNS refuses this name to the sandbox")

// allows says whether a sandbox may ask for a name, and why, or why not: the answer is Forward, NoName if its policy
// denies the name, or Refuse. That a name does not exist is final to a program; REFUSED is a temporary failure.
func (r *resolver) allows(s *sandbox, m names.Message, now time.Time) (why string, do names.Action) {
	if weak.Off(weak.Resolver) {
		return "default", names.Forward
	}
	if !s.dns.within(now) {
		return fmt.Sprintf("limit of %d DNS queries a second", dnsPerSecond), names.Refuse
	}
	p := s.policy.Load()
	if !names.Served(m.Type) {
		return "DNS type " + names.TypeName(m.Type) + " is not served", names.Refuse
	}
	// Other letters stand for bytes, and a dot among them would not be the end of a label.
	if strings.Trim(m.Name, "abcdefghijklmnopqrstuvwxyz0123456789-_.") != "" {
		return "not a host name", names.Refuse
	}
	ok, because := p.Resolves(m.Name)
	if !ok {
		return because.Text, names.NoName
	}
	if w := p.Wildcard(m.Name); w != "" {
		if names.Text(m.Type) {
			return "DNS type " + names.TypeName(m.Type) + " needs a rule with the whole name, not " + w, names.Refuse
		}
		if over := s.dns.watch.Admit(w, m.Name, now); over != "" {
			return over, names.Refuse
		}
	}
	return because.Text, names.Forward
}

// maxPointers is with how many names of an address the daemon answers.
const maxPointers = 16

// pointers are the names of the address that m asks for, if DNS has answered the sandbox with
// it, and the policy still allows them: then no server is asked.
func (r *resolver) pointers(s *sandbox, m names.Message) []string {
	a, ok := names.Pointed(m.Type, m.Name)
	if !ok {
		return nil
	}
	p := s.policy.Load()
	known := slices.DeleteFunc(s.leased(a), func(name string) bool {
		allow, _ := p.Resolves(name)
		return !allow
	})
	return known[:min(len(known), maxPointers)]
}

// answer records which addresses of an answer a sandbox may have, and sends the answer if it
// may have all. Otherwise the child makes it anew.
func (r *resolver) answer(line *child.Conn, s *sandbox, m names.Message, why string) {
	kept := r.filter(s, m.Addrs)
	if len(kept) > 0 {
		s.leases.Add(m.Name, kept, time.Duration(m.TTL)*time.Second, time.Now())
	}
	r.ofRequest(s, m, func(q *request) { q.kept = kept })
	data := names.RcodeName(m.Rcode)
	if len(kept) > 0 {
		data = fmt.Sprint(kept[:min(len(kept), 8)])
	}
	defer r.note(s, m, "allow", why, data)
	if len(kept) == len(m.Addrs) {
		r.send(m)
		return
	}
	r.tellName(s, m.Name, "its addresses are private or closed: "+fmt.Sprint(m.Addrs[:min(len(m.Addrs), 8)]))
	r.tell(line, names.Message{Kind: names.Verdict, ID: m.ID, Do: names.Keep, Addrs: kept}, nil)
}

// ofRequest does f to the request of s that m belongs to, if it came by one.
func (r *resolver) ofRequest(s *sandbox, m names.Message, f func(q *request)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if q := r.requests[m.Via]; q != nil && q.source == s.addr {
		f(q)
	}
}

// filter takes out what a public name must not have: addresses of the host and its networks
// (rebinding). A private address stays if a rule names it.
func (r *resolver) filter(s *sandbox, addrs []netip.Addr) []netip.Addr {
	if weak.Off(weak.Resolver) {
		return addrs
	}
	p := s.policy.Load()
	return slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool {
		return r.e.blocks(a) != "" || policy.Private(a) && !p.Names(a)
	})
}

// send sends an answer to a sandbox, and to nobody else.
func (r *resolver) send(m names.Message) {
	if m.Via != 0 {
		r.mu.Lock()
		defer r.mu.Unlock()
		if q := r.requests[m.Via]; q != nil && q.source == m.Source.Addr() {
			delete(r.requests, m.Via)
			q.answer <- m.Body
		}
		return
	}
	if len(m.Body) == 0 || r.e.lookup(m.Source.Addr()) == nil {
		return
	}
	to := &unix.SockaddrInet4{Addr: m.Source.Addr().As4(), Port: int(m.Source.Port())}
	if err := unix.Sendto(r.udp, m.Body, unix.MSG_DONTWAIT, to); err != nil {
		r.log.Debug("cannot send dns answer", "err", err)
	}
}

// Resolve returns the addresses of name that the sandbox may have, as its own query would.
func (e *Engine) Resolve(ctx context.Context, s *sandbox, name string) ([]netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, names.Timeout+dnsLate)
	defer cancel()
	q, via, line := e.dns.newRequest(s.addr)
	if q == nil {
		return nil, fmt.Errorf("resolve %s: the child that reads DNS does not run", name)
	}
	e.dns.tell(line, names.Message{Kind: names.Lookup, Name: name, Source: netip.AddrPortFrom(s.addr, 0), Via: via}, nil)
	b, err := e.dns.await(ctx, q, via)
	if err == nil && len(b) < 4 {
		err = errors.New("the answer is none of DNS")
	}
	if err != nil {
		return nil, fmt.Errorf("resolve %s: %w", name, err)
	}
	switch rcode := b[3] & 0xf; { // RFC 1035, section 4.1.1
	case rcode == rcodeRefused, q.denied:
		return nil, errRefused
	case rcode == 0, rcode == rcodeNoName:
		return q.kept, nil // written before the answer was sent, as denied is
	default:
		return nil, fmt.Errorf("resolve %s: DNS answered %s", name, names.RcodeName(rcode))
	}
}

// note logs a query. The lines of one sandbox are bounded.
func (r *resolver) note(s *sandbox, m names.Message, verdict, why, answer string) {
	now := time.Now()
	if !s.dns.lines.allow(now, dnsLines) {
		s.dns.quiet++
		return
	}
	r.log.Info("dns", "sandbox", s.id, "name", m.Name[:min(len(m.Name), 253)], "type", names.TypeName(m.Type), "verdict", verdict,
		"rule", why, "answer", answer, "unlogged", s.dns.quiet)
	s.dns.quiet = 0
}

// tellName reports a refused name.
func (r *resolver) tellName(s *sandbox, name, why string) {
	if r.e.onDeny == nil || !s.dns.denied.allow(time.Now(), deniedPerSecond) {
		return
	}
	r.e.put(Denial{ID: s.id, Proto: "dns", Name: name[:min(len(name), 253)], Rule: why, By: ByDNS})
}

// dnsSocket is a socket to a server, which the child uses. The daemon keeps it too, so that
// its end is the daemon's to say.
type dnsSocket struct {
	f       *os.File
	network string
	local   netip.AddrPort
	to      netip.AddrPort
}

// write sends a datagram. If that fails, the child tries.
func (s *dnsSocket) write(b []byte) (sent bool) {
	raw, err := s.f.SyscallConn()
	if err != nil {
		return false
	}
	cerr := raw.Control(func(fd uintptr) { _, err = unix.Write(int(fd), b) })
	return cerr == nil && err == nil
}

// maxSockets is how many sockets a query may have: two to each server, of three.
const maxSockets = 6

// give answers with a socket to the server that m names.
func (r *resolver) give(line *child.Conn, a *asking, m names.Message) {
	v := names.Message{Kind: names.Verdict, ID: m.ID, Do: names.Forward}
	if m.Kind == names.Ask && m.Upstream == names.NoSocket {
		r.tell(line, v, nil)
		return
	}
	s, err := r.socket(a, m)
	if err == nil && m.Kind == names.Ask && s.network == "udp" && len(m.Body) > 0 {
		v.Hit = s.write(m.Body)
	}
	if err != nil {
		r.log.Debug("dns upstream", "sandbox", a.s.id, "err", err)
		v.Do, v.Text = names.Fail, "no name server can be reached"
		r.tell(line, v, nil)
		return
	}
	r.tell(line, v, s.f)
}

func (r *resolver) socket(a *asking, m names.Message) (*dnsSocket, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if int(m.Upstream) >= len(r.upstreams) || len(a.sockets) >= maxSockets || r.asking[m.ID] != a {
		return nil, errors.New("the child asks for a socket that it may not have")
	}
	u := r.upstreams[m.Upstream]
	network := "udp"
	if m.TCP || u.TLS != "" {
		network = "tcp"
	}
	s, err := connect(network, u.Addr)
	if err != nil {
		return nil, fmt.Errorf("connect to the name server %s by %s: %w", u.Addr, network, err)
	}
	if u.TLS == "" {
		a.sockets = append(a.sockets, s)
		return s, nil
	}
	if len(r.streams) >= names.MaxStreams {
		r.release(r.streams[0])
		r.streams = slices.Delete(r.streams, 0, 1)
	}
	r.streams = append(r.streams, s)
	return s, nil
}

// finish ends a query: its sockets, and its place in the budget.
//
// Preconditions: r.mu is held.
func (r *resolver) finish(id uint64) *asking {
	a := r.remove(id)
	if a != nil {
		r.releaseAll(a)
	}
	return a
}

// remove ends a query but for its sockets.
//
// Preconditions: r.mu is held.
func (r *resolver) remove(id uint64) *asking {
	a := r.asking[id]
	if a == nil {
		return nil
	}
	delete(r.asking, id)
	a.late.Stop()
	a.s.dns.queries.Add(-1)
	return a
}

func (r *resolver) releaseAll(a *asking) {
	for _, s := range a.sockets {
		r.release(s)
	}
}

// release disconnects a socket, whoever has it, and deletes its entry in conntrack's table.
// The kernel would keep that for half a minute or two, and a guest may ask 200 times a second.
func (r *resolver) release(s *dnsSocket) {
	if raw, err := s.f.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { //nolint:errcheck // it is open
			// To AF_UNSPEC: a connection is reset (connect(2)).
			_, _, _ = unix.RawSyscall(unix.SYS_CONNECT, fd, uintptr(unsafe.Pointer(&unspecified)), unsafe.Sizeof(unspecified))
		})
	}
	s.f.Close()
	if err := r.e.table.Send(conntrack.AppendForget(nil, policy.Proto(s.network), plain(s.local), plain(s.to))); err != nil {
		r.log.Debug("cannot delete the conntrack entry of a dns query", "err", err)
	}
}

var unspecified = unix.RawSockaddr{Family: unix.AF_UNSPEC}

// connect begins a connection from a port of its own. It does not wait for it.
func connect(network string, to netip.AddrPort) (s *dnsSocket, err error) {
	typ, family := unix.SOCK_DGRAM, unix.AF_INET
	if network == "tcp" {
		typ = unix.SOCK_STREAM
	}
	var sa unix.Sockaddr = &unix.SockaddrInet4{Port: int(to.Port())}
	if a := to.Addr().Unmap(); a.Is4() {
		sa.(*unix.SockaddrInet4).Addr = a.As4()
	} else {
		six := &unix.SockaddrInet6{Port: int(to.Port()), Addr: a.As16()}
		if zone := a.Zone(); zone != "" {
			link, err := net.InterfaceByName(zone)
			if err != nil {
				return nil, err
			}
			six.ZoneId = uint32(link.Index)
		}
		sa, family = six, unix.AF_INET6
	}
	fd, err := unix.Socket(family, typ|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	// A file of a blocking socket stays out of the daemon's poller. The child has it in its own.
	s = &dnsSocket{f: os.NewFile(uintptr(fd), "name server"), network: network, to: to}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(err, s.f.Close())
	}
	if network == "tcp" {
		// Its end is a reset, which leaves nothing behind.
		err = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	}
	if err == nil {
		if err = unix.Connect(fd, sa); errors.Is(err, unix.EINPROGRESS) {
			err = nil
		}
	}
	if err == nil {
		s.local, err = localAddr(fd)
	}
	if err != nil {
		return nil, errors.Join(err, s.f.Close())
	}
	return s, nil
}

// localAddr is the address that a socket has.
func localAddr(fd int) (netip.AddrPort, error) {
	sa, err := unix.Getsockname(fd)
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)), err
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port)), err
	}
	return netip.AddrPort{}, os.NewSyscallError("getsockname", err)
}

// plain is an address as it is in packets.
func plain(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}
