package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A judge decides on flows. It knows what no policy may open.
type judge struct {
	pool  netip.Prefix
	hosts atomic.Pointer[map[netip.Addr]bool] // addresses of this host: true; of broadcasts: false
}

// decide answers for the first packet of a flow.
func (j *judge) decide(s *sandbox, f policy.Flow) (policy.Action, policy.Reason) {
	a, why := j.decideBy(s, f, s.leased)
	return s.withBindings(f, a, why)
}

// decideBy is what the policy says of the first packet of a flow, with the names that leased
// returns for an address.
func (j *judge) decideBy(s *sandbox, f policy.Flow, leased func(netip.Addr) []string) (policy.Action, policy.Reason) {
	if weak.Off(weak.Policy) {
		return policy.Allow, policy.Reason{Cause: policy.ByMode, Text: "default"}
	}
	if name := j.blocks(f.Dst); name != "" {
		return policy.Deny, policy.Reason{Cause: policy.ByBlock, Text: name}
	}
	return s.policy.Load().Decide(f, leased(f.Dst))
}

// allowsAny reports whether a flow passes the proxy for the sake of bindings alone: whatever it is
// called, and speaks, the policy allows it.
func (j *judge) allowsAny(s *sandbox, f policy.Flow) bool {
	if !s.binds() {
		return false
	}
	action, _ := j.decideBy(s, f, s.leased)
	return action == policy.Allow
}

// leased returns the names by which the sandbox may mean dst now.
func (s *sandbox) leased(dst netip.Addr) []string { return s.leases.Of(dst, time.Now(), false) }

// blocks says why dst is closed under every policy, or "".
func (j *judge) blocks(dst netip.Addr) string {
	if name := policy.Blocked(dst); name != "" {
		return name
	}
	if j.pool.Contains(dst) {
		return "another sandbox"
	}
	if _, closed := (*j.hosts.Load())[dst]; closed {
		return "host address"
	}
	return ""
}

// HostAddress reports whether a is an address of this host. Addresses that the host got
// in the last ten seconds may be missing.
func (j *judge) HostAddress(a netip.Addr) bool { return (*j.hosts.Load())[a] }

// Target is what somebody wants to reach: a name in normal form or an address, and a port.
type Target struct {
	Name  string
	Addr  netip.Addr
	Port  uint16
	Proto string // "tcp", "udp" or "icmp"; "": tcp
}

// Explanation says what the policy of a sandbox does with a Target.
type Explanation struct {
	Allowed bool
	Rule    string // that decides: a rule as written, "default", "host address", …
	// Resolves says whether DNS answers for a name, and by which rule.
	Resolves     bool
	ResolvesRule string
	// ByName says that Addr does not decide, but the name that the client sends. The rest
	// is what holds if it sends none.
	ByName bool
	// Leased are the names that DNS has answered with an address lately.
	Leased []string
	// Fixed says that no rule of the sandbox can change the answer.
	Fixed bool
	// Stored says that the sandbox does not run. Its stored policy answers.
	Stored bool
	// Block says that no policy can change the answer: Rule is a hard block.
	Block bool
	// Resolver says that the target is port 53: no rule decides, sandboxd's resolver answers.
	Resolver bool
	// Judged says that rules about requests decide on each request to Name: some may be refused
	// although Allowed says that a connection may be opened. Bound says that a credential is
	// bound to Name. If either holds, requests to Name are decrypted.
	Judged, Bound bool
}

// Explain says what the policy of the sandbox id does with t. If the sandbox is not
// registered, because it does not run, stored is the policy, and there are no leases.
func (e *Engine) Explain(id string, stored record.Network, t Target) (x Explanation, err error) {
	e.mu.RLock()
	s := e.byID[id]
	e.mu.RUnlock()
	leased := func(netip.Addr) []string { return nil }
	if s != nil {
		leased = s.leased
	} else {
		p, err := policy.Compile(e.cfg.Host, stored)
		if err != nil {
			return x, err
		}
		s, x.Stored = &sandbox{id: id}, true
		s.policy.Store(p)
		s.plan.Store(&plan{Inspection: &Inspection{}}) // else no rule is about requests
	}
	p := s.policy.Load()
	f := policy.Flow{Dst: t.Addr, Proto: policy.Proto(cmp.Or(t.Proto, "tcp")), Port: t.Port}
	if f.IsDNS() {
		x.Allowed, x.Resolver = true, true
		return x, nil
	}
	var why policy.Reason
	if t.Name != "" {
		x.Resolves, why = p.Resolves(t.Name)
		x.ResolvesRule = why.Text
		for _, k := range []heads.Kind{heads.TLS, heads.HTTP} {
			judged, bound := s.marksBy(f, k, t.Name)
			x.Judged, x.Bound = x.Judged || judged, x.Bound || bound
		}
		if x.Allowed, why = p.DecideName(f, t.Name); x.Judged || x.Bound {
			x.Allowed, why = p.DecideSome(f, t.Name)
		} else if bound, by := s.withBindings(f, policy.Allow, why); x.Allowed && bound == policy.Deny {
			x.Allowed, why = false, by
		}
		if x.Allowed && !x.Resolves {
			x.Allowed, why.Text = false, x.ResolvesRule
		}
		x.Rule, x.Fixed = why.Text, !x.Allowed && p.Fixed(f, t.Name)
		return x, nil
	}
	x.Leased = leased(t.Addr)
	action, why := e.decideBy(s, f, leased)
	x.Allowed = action == policy.Allow
	if action == policy.Proxy {
		x.ByName = true
		x.Allowed, why = p.DecideName(f, "")
	} else if bound, by := s.withBindings(f, action, why); bound == policy.Deny { // the proxy would allow each name
		x.Allowed, why = false, by
	}
	x.Rule = why.Text
	x.Block = !x.Allowed && why.Cause == policy.ByBlock
	x.Fixed = x.Block || !x.Allowed && p.Fixed(f, "")
	return x, nil
}

// judge decides whether the child gets a socket. The error says why it cannot.
func (p *proxy) judge(ctx context.Context, s *sandbox, f policy.Flow, o question) (bool, policy.Reason, error) {
	if weak.Off(weak.Proxy) {
		return true, policy.Reason{Cause: policy.ByMode, Text: "default"}, nil
	}
	allow, why := p.decide(s, f, o)
	if !allow || o.Name == "" || slices.Contains(s.leased(f.Dst), o.Name) {
		return allow, why, nil
	}
	if o.free {
		return true, why, nil
	}
	// DNS has not answered the sandbox so: it may know the address from elsewhere, which is
	// no harm if it is one of the name.
	addrs, err := p.e.Resolve(ctx, s, o.Name)
	if errors.Is(err, errRefused) {
		text := fmt.Sprintf("DNS refuses %s to this sandbox, so nobody can tell whether %s is one of its addresses", o.Name, f.Dst)
		return false, policy.Reason{Cause: policy.ByName, Text: text}, nil
	}
	if err != nil {
		return false, why, fmt.Errorf("sandboxd cannot find out whether %s is an address of %s, so it does not connect; try again: %w",
			f.Dst, o.Name, err)
	}
	if slices.Contains(addrs, f.Dst) {
		return true, why, nil
	}
	return false, policy.Reason{Cause: policy.ByName, Text: fmt.Sprintf("%s is not an address of %s", f.Dst, o.Name)}, nil
}

// decide is judge without the check that the name has the address.
func (p *proxy) decide(s *sandbox, f policy.Flow, o question) (bool, policy.Reason) {
	if name := p.e.blocks(f.Dst); name != "" {
		return false, policy.Reason{Cause: policy.ByBlock, Text: name}
	}
	pol := s.policy.Load()
	switch {
	case !o.dial && p.e.allowsAny(s, f):
		return pol.DecideLeased(f, s.leased(f.Dst))
	case o.Kind == heads.H2C:
		return false, policy.Reason{Cause: policy.ByName, Text: "HTTP/2 without TLS is not read; use HTTP/1.1, or TLS"}
	case !says(f, o.Kind):
		return pol.DecideLeased(f, s.leased(f.Dst))
	case o.dial:
		return pol.DecideSome(f, o.Name) // the child judges each request
	}
	return pol.DecideName(f, o.Name)
}

// doubts reports whether the name of a flow wants a look at its address now, which it has had none
// of: see question.free. DNS may have answered the sandbox so meanwhile, or before.
func (j *judge) doubts(s *sandbox, f policy.Flow, name string, free bool) bool {
	return free && name != "" && !j.allowsAny(s, f) && !slices.Contains(s.leases.Of(f.Dst, time.Now(), true), name)
}

// says reports whether the client of a flow that began so says a name, or none where it should.
func says(f policy.Flow, k heads.Kind) bool {
	return k != heads.First && (k != heads.Other || f.Port == 80 || f.Port == 443)
}

// refusalOf is the sentence that a guest reads.
func refusalOf(s *sandbox, f policy.Flow, name string, why policy.Reason) string {
	target := fmt.Sprintf("%s:%d", cmp.Or(name, f.Dst.String()), f.Port)
	help := fmt.Sprintf("A rule that allows %s would open it.", target)
	p := s.policy.Load()
	resolves, _ := p.Resolves(name)
	switch {
	case why.Cause == policy.ByBlock, p.Fixed(f, name):
		help = "No rule of the sandbox can open it."
	case why.Cause == policy.ByName && name != "" && resolves:
		help = "Ask DNS for the name, and connect to what it answers."
	}
	text := why.Text
	if why.Cause == policy.ByMode {
		text = Denial{Rule: why.Text}.Reason()
	}
	return fmt.Sprintf("sandboxd does not let this sandbox reach %s (%s). %s", target, text, help)
}

// tellName reports a denial of a flow whose name is known.
func (e *Engine) tellName(s *sandbox, f policy.Flow, name string, why policy.Reason) {
	e.ledger.mu.Lock()
	defer e.ledger.mu.Unlock()
	e.denials.tellAs(s, f, name, why, ByProxy)
}

// opened decides on what the child asks, and dials.
func (p *proxy) opened(ctx context.Context, x *proxied, o question) (heads.Opened, syscall.Conn) {
	f := x.flow
	if !o.dial && x.s.marks(f, o.Kind, o.Name) {
		some := o
		some.dial = true
		allow, why := p.decide(x.s, f, some) // and verified when the child dials
		if !allow {
			return x.denied(p.e, o, why), nil
		}
		p.mu.Lock()
		x.mark(o.Name)
		p.mu.Unlock()
		return heads.Opened{Result: heads.Inspect}, nil
	}
	o.free = !o.dial && p.e.allowsAny(x.s, f)
	allow, why, err := p.judge(ctx, x.s, f, o)
	if err != nil {
		p.log.Debug("a connection by name", "sandbox", x.s.id, "err", err)
		return heads.Opened{Result: heads.Failed, Text: err.Error()}, nil
	}
	if allow && o.Kind == heads.Check {
		allow, why = p.checked(x, o, why)
	}
	if !allow {
		return x.denied(p.e, o, why), nil
	}
	if o.Kind != heads.First { // as in endOutward
		p.e.count(x.s, f, o.Name, true)
	}
	if o.Kind == heads.Check {
		p.e.flowCounts.add(passed, why.Cause)
		return heads.Opened{Result: heads.Granted}, nil
	}
	c, number, err := p.connect(ctx, x, o)
	if err != nil {
		return heads.Opened{Result: heads.Failed, Text: err.Error()}, nil
	}
	if o.Kind != heads.First { // which is counted by what follows, if anything does
		p.e.flowCounts.add(passed, why.Cause)
	}
	return heads.Opened{Result: heads.Granted, Socket: number}, c
}

// denied answers a question, and reports the denial.
func (x *proxied) denied(e *Engine, o question, why policy.Reason) heads.Opened {
	if o.Kind != heads.First && why.Text != "" { // a name may come; or the flow has ended
		e.count(x.s, x.flow, o.Name, false)
		e.flowCounts.add(refused, why.Cause)
		e.tellName(x.s, x.flow, o.Name, why)
	}
	return heads.Opened{Result: heads.Denied, Text: refusalOf(x.s, x.flow, o.Name, why)}
}

// mark notes that the child hears that a name of the flow is to be decrypted.
//
// Preconditions: proxy.mu is held.
func (x *proxied) mark(name string) {
	switch {
	case x.marked[name]:
	case len(x.marked) >= mostDecrypted:
		x.many = true
	case x.marked == nil:
		x.marked = map[string]bool{name: true}
	default:
		x.marked[name] = true
	}
}

// checked gives the socket of a flow whose server could have spoken first the name that the
// guest has said meanwhile, if the policy of the moment allows it: it may have changed since
// judge read it, and closeForbidden has not seen this name. The reason is empty if the flow
// has ended.
func (p *proxy) checked(x *proxied, o question, why policy.Reason) (bool, policy.Reason) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.alive(x) {
		return false, policy.Reason{}
	}
	if !weak.Off(weak.Proxy) {
		if allow, now := p.decide(x.s, x.flow, o); !allow {
			return false, now
		}
		if x.s.marks(x.flow, o.Kind, o.Name) || p.e.doubts(x.s, x.flow, o.Name, o.free) {
			return false, policy.Reason{Cause: policy.ByRule, Text: "the rules for this name have just changed"}
		}
	}
	for number, out := range x.to {
		out.kind, out.name, out.free = o.Kind, o.Name, o.free
		if err := p.hands[x.line].set(x, number, out); err != nil {
			p.log.Error("cannot write down a flow by name; sandboxd ends it", "sandbox", x.s.id, "err", err)
			p.cut(x)
			return false, policy.Reason{}
		}
	}
	return true, why
}

var (
	errGone    = errors.New("the connection has ended")
	errSockets = errors.New("the connection, or all of the sandbox, have too many sockets")
)

// connect dials for a flow, and counts and registers the socket.
func (p *proxy) connect(ctx context.Context, x *proxied, o question) (*net.TCPConn, uint32, error) {
	p.mu.Lock()
	full := p.outs[x.s] >= proxyConns
	if !full {
		p.outs[x.s]++
	}
	p.mu.Unlock()
	if full {
		return nil, 0, errSockets
	}
	to := netip.AddrPortFrom(x.flow.Dst, x.flow.Port)
	c, copied, err := p.dial(ctx, x, to)
	out := &outward{Socket: copied, tuple: tupleOfTCP{sentFrom(copied), to}, kind: o.Kind, name: o.Name, dial: o.dial, free: o.free}
	if err != nil {
		err = fmt.Errorf("the server does not answer: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		if err = p.add(x, o, out); err == nil {
			return c, x.next, nil
		}
		c.Close()
		copied.Reset()
	}
	if copied >= 0 {
		copied.Close() //nolint:errcheck // nothing was written
	}
	p.closed(x.s, out.tuple)
	return nil, 0, err
}

// add registers a socket, if the policy of the moment allows it: it may have changed since
// judge read it, and closeForbidden has not seen this socket.
//
// Preconditions: p.mu is held.
func (p *proxy) add(x *proxied, o question, out *outward) error {
	switch {
	case !p.alive(x):
		return errGone
	case len(x.to) >= proxySockets:
		return errSockets
	}
	allow, _ := p.decide(x.s, x.flow, o)
	if !allow && !weak.Off(weak.Proxy) || !o.dial && x.s.marks(x.flow, o.Kind, o.Name) || p.e.doubts(x.s, x.flow, o.Name, o.free) {
		return errors.New("the policy has changed")
	}
	if err := p.hands[x.line].put(p.log, x, x.next+1, out); err != nil {
		return fmt.Errorf("write it down: %w", err)
	}
	x.next++
	x.to[x.next] = out
	return nil
}

// sentFrom is the address from which a socket has sent, even if that failed; not valid: it
// has not.
func sentFrom(c child.Socket) netip.AddrPort {
	if c < 0 {
		return netip.AddrPort{}
	}
	sa, err := unix.Getsockname(int(c))
	in, ok := sa.(*unix.SockaddrInet4)
	if err != nil || !ok || in.Port == 0 {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(netip.AddrFrom4(in.Addr), uint16(in.Port))
}

// dial connects to the destination of a flow. It checks the address at the last moment once
// more: what the daemon dials passes none of the chains. It returns a copy of the socket
// also if it fails, by which the caller knows what was sent; -1: there is none.
func (p *proxy) dial(ctx context.Context, x *proxied, to netip.AddrPort) (_ *net.TCPConn, copied child.Socket, _ error) {
	copied = -1
	d := net.Dialer{Control: func(_, address string, c syscall.RawConn) error {
		if err := p.mayDial(x, to, address); err != nil {
			return err
		}
		if copied >= 0 { // of the last try, which has sent nothing
			copied.Close() //nolint:errcheck // likewise
		}
		var err error
		if copied, err = child.CopyOf(c); err != nil {
			return err
		}
		if err := leaves(int(copied), to.Addr()); err != nil {
			return err
		}
		return unix.SetsockoptInt(int(copied), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}}
	c, err := d.DialContext(ctx, "tcp4", to.String())
	// Each port has a closed connection to this destination, for a minute. The kernel lets a
	// new one follow it if the port is bound, and both ends have timestamps.
	for try := 0; errors.Is(err, unix.EADDRNOTAVAIL) && try < reuseTries; try++ {
		d.LocalAddr = &net.TCPAddr{Port: firstPort + rand.IntN(lastPort-firstPort+1)}
		c, err = d.DialContext(ctx, "tcp4", to.String())
	}
	if err != nil {
		return nil, copied, err
	}
	return c.(*net.TCPConn), copied, nil
}

// mayDial is asked before the first packet is sent.
func (p *proxy) mayDial(x *proxied, to netip.AddrPort, address string) error {
	at, err := netip.ParseAddrPort(address)
	switch {
	case err != nil:
		return err
	case at != to:
		return fmt.Errorf("%s is another address", at)
	}
	if why := p.e.blocks(at.Addr()); why != "" {
		return errors.New(why)
	}
	if policy.Private(at.Addr()) && !x.s.policy.Load().Names(at.Addr()) {
		return errors.New("private range")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.alive(x) {
		return errGone
	}
	return nil
}

// The ports that the kernel gives to connections by default (ip(7)), and how many of them
// are tried.
const (
	firstPort, lastPort = 32768, 60999
	reuseTries          = 16
)
