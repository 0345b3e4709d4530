package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/conntrack"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

// ProxyPort is where the proxy listens, on the gateway.
const ProxyPort = 15080

const (
	proxyConns   = 256  // open connections of a sandbox through the proxy; more are reset
	proxyTotal   = 1024 // of all sandboxes without a child of their own: see proxyMemory
	proxySockets = 8    // to destinations, of one connection
	proxyAsks    = 4    // questions of one connection under way

	// proxyMemory is the child's. Of one connection it holds in the worst case 640 KiB: two
	// buffers of 256 KiB for the bytes that pass (the limit counts them, although nobody
	// fills them), or 250 KiB for a head of 16 KiB that has only short lines, and 128 KiB for
	// the copies of a head that goes on, stacks, and small buffers. For proxyTotal this is
	// 640 MiB. The collector keeps the child below two thirds of the limit, 682 MiB.
	proxyMemory = 1 << 30

	proxyStart = 5 * time.Second // a connection waits so long for a child that is starting
	dialLimit  = 10 * time.Second
)

// A proxy has the flows for which the name decides: DNAT brings them here. It hands each to
// the child heads, which reads the name, asks, and passes on the bytes.
//
// The proxy keeps a descriptor of each socket, outside of Go's poller, by which it cuts a
// flow that a new policy denies. A child that was taken over cannot keep it open. The child
// and its flows outlive the daemon: see outlive.go.
type proxy struct {
	e        *Engine
	log      *slog.Logger
	listener *net.TCPListener
	child    keeper
	where    func(syscall.RawConn) (netip.AddrPort, error) // a connection was to go: conntrack.OriginalDst
	own      ownChildren
	stop     context.CancelFunc
	done     sync.WaitGroup

	mu    sync.Mutex // guards what follows, and the fields of each proxied
	fewer sync.Cond  // of flows and outs: tests wait for that
	last  uint64
	flows map[uint64]*proxied
	of    map[*sandbox]int // how many of them
	heads int              // how many are for the child that all share, or one of an earlier daemon
	outs  map[*sandbox]int // sockets to destinations, those that dial included
	gone  []tupleOfTCP     // closed since the last run of forget
	older []tupleOfTCP     // closed before that

	hands  map[*child.Conn]*hand // the children that outlive the Engine
	aside  map[*sandbox]bool     // not registered yet, that have flows of an earlier daemon
	closes bool                  // no flow is taken any more
}

// A keeper keeps a child running: a child.Supervisor.
type keeper interface {
	Conn(ctx context.Context) (*child.Conn, error)
	Close() error
}

type tupleOfTCP struct{ local, remote netip.AddrPort }

// proxied is one connection of a guest.
type proxied struct {
	s      *sandbox
	own    bool // for the child of s alone
	flow   policy.Flow
	number uint64
	ctx    context.Context // of its questions: ends when the flow, or the proxy, does
	stop   context.CancelFunc
	line   *child.Conn // of the child that has it, or nil
	guest  child.Socket
	slot   int  // in the file of its child
	cut    bool // it gets no socket any more, and ends when its child says so
	asks   int
	next   uint32
	to     map[uint32]*outward
	// marked are the first mostDecrypted names of which the child has heard that they are to be
	// decrypted. many: there are more.
	marked map[string]bool
	many   bool
}

// outward is a socket to the destination.
type outward struct {
	child.Socket
	tuple tupleOfTCP
	kind  heads.Kind
	name  string
	slot  int  // like that of proxied
	dial  bool // for what the child has decrypted
	free  bool // like that of question
}

// A question is what a child asks of a flow.
type question struct {
	heads.Open
	dial bool // by KindDial: for what it has decrypted, and judged
	free bool // allowsAny held, so nobody has looked whether the name has the address
}

func newProxy(ctx context.Context, e *Engine) (*proxy, error) {
	p := &proxy{
		e: e, log: e.log, where: conntrack.OriginalDst, flows: map[uint64]*proxied{}, of: map[*sandbox]int{}, outs: map[*sandbox]int{},
		own: ownChildren{most: e.cfg.MaxInspecting, all: map[*ownChild]bool{}}, hands: map[*child.Conn]*hand{}, aside: map[*sandbox]bool{},
	}
	p.fewer.L = &p.mu
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		cerr := c.Control(func(fd uintptr) {
			// The gateway's address may be added to lo after this.
			err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1)
		})
		return cmp.Or(cerr, err)
	}}
	lc.SetMultipathTCP(false) // splice(2) wants plain TCP
	l, err := lc.Listen(ctx, "tcp4", netip.AddrPortFrom(e.cfg.Gateway, ProxyPort).String())
	if err != nil {
		return nil, fmt.Errorf("start the proxy: %w (does another daemon, or another program, use the gateway's port? "+
			"`ss -lnp` shows it)", err)
	}
	p.listener = l.(*net.TCPListener)
	c := child.Config{Verb: heads.Verb, Memory: proxyMemory, Max: heads.MaxBody, Logger: e.log, Handle: p.handle, End: p.drop}
	if e.cfg.FlowDir != "" {
		if err = p.adopt(ctx); err == nil {
			c.Outlive = &child.Outlive{Dir: e.cfg.FlowDir, Begin: p.begin, Leave: p.leaves}
		}
	}
	var s *child.Supervisor
	if err == nil {
		s, err = child.Start(ctx, c)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the proxy: %w", err), p.close())
	}
	p.child = s
	return p, nil
}

func (p *proxy) serve(ctx context.Context) {
	run, stop := context.WithCancel(ctx)
	p.stop = stop
	p.done.Go(func() {
		for {
			c, err := p.listener.AcceptTCP()
			switch {
			case err == nil:
				p.done.Go(func() { p.take(run, c) })
			case run.Err() != nil:
				return
			default:
				p.log.Debug("accept a connection for the proxy", "err", err)
				select { // no descriptor is free, and there is no event to wait for
				case <-time.After(10 * time.Millisecond):
				case <-run.Done():
				}
			}
		}
	})
}

func (p *proxy) close() error {
	if p.stop != nil {
		p.stop()
	}
	err := p.listener.Close()
	p.leave()
	for _, k := range p.own.end() {
		k.close()
	}
	if p.child != nil {
		err = errors.Join(err, p.child.Close())
	}
	p.done.Wait()
	p.forget() // those that were just closed are older then
	p.forget()
	return err
}

// take hands a connection to the child.
func (p *proxy) take(run context.Context, c *net.TCPConn) {
	defer c.Close() // the copies are left
	x, err := p.admit(run, c)
	if err != nil {
		p.log.Debug("a connection for the proxy", "from", c.RemoteAddr(), "err", err)
		reset(c)
		return
	}
	limit := proxyStart
	if x.s.own.Load() != nil {
		limit = ownStart
	}
	ctx, cancel := context.WithTimeout(x.ctx, limit)
	defer cancel()
	line, err := x.s.line(ctx, p.child)
	if err == nil {
		err = p.entrust(x, line)
	}
	if err == nil {
		f := heads.Flow{
			Number: x.number, Dst: netip.AddrPortFrom(x.flow.Dst, x.flow.Port), First: x.flow.Port != 80 && x.flow.Port != 443,
		}
		err = line.Tell(heads.KindServe, f.Append(nil), c) // if the flow has ended meanwhile, its socket is dead
	}
	if err != nil {
		p.log.Debug("hand a connection to the child", "sandbox", x.s.id, "err", err)
		if own := x.s.own.Load(); own != nil && x.ctx.Err() == nil && !errors.Is(err, errGone) {
			own.tell(&own.notes, InspectEvent{Kind: InspectNoChild, Text: "its connections by name are reset: " + err.Error()})
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.flows[x.number] == x {
			p.end(x, true)
		}
	}
}

// line is the line to the child that gets the flows of a sandbox, which may be the one that
// all share.
func (s *sandbox) line(ctx context.Context, shared keeper) (*child.Conn, error) {
	if own := s.own.Load(); own != nil {
		return own.conn(ctx)
	}
	return shared.Conn(ctx)
}

// admit finds out whose connection c is, and where it was to go, and counts it.
func (p *proxy) admit(ctx context.Context, c *net.TCPConn) (*proxied, error) {
	s := p.e.lookup(c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap())
	if s == nil {
		return nil, errors.New("no sandbox has this address")
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	dst, err := p.where(raw)
	if err != nil {
		return nil, err
	}
	x := &proxied{
		s: s, flow: policy.Flow{Src: s.addr, Dst: dst.Addr(), Proto: unix.IPPROTO_TCP, Port: dst.Port()},
		to: map[uint32]*outward{},
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.e.lookup(s.addr) != s || p.closes {
		return nil, errGone
	}
	// No sandbox gets more than half of what is left, so a few of them do not take all. One with a
	// child of its own takes only descriptors from others: three of the daemon's for each flow while
	// it dials, so mostInspecting sandboxes take 98,304 of the 1,048,576 that sandboxd.service has.
	most := proxyConns
	if x.own = s.own.Load() != nil; !x.own {
		most = min(most, (proxyTotal-p.heads+1)/2)
	}
	if p.of[s] >= most {
		why := policy.Reason{Cause: policy.ByLimit, Text: fmt.Sprintf("limit of %d open connections by name", most)}
		p.e.count(s, x.flow, "", false)
		p.e.tellName(s, x.flow, "", why)
		return nil, errors.New(why.Text)
	}
	if x.guest, err = child.CopyOf(raw); err != nil {
		return nil, err
	}
	x.ctx, x.stop = context.WithCancel(ctx)
	p.last++
	x.number = p.last
	p.flows[x.number] = x
	p.of[s]++
	if !x.own {
		p.heads++
	}
	return x, nil
}

// endOutward ends a socket to a destination.
//
// Preconditions: p.mu is held.
func (p *proxy) endOutward(x *proxied, number uint32) {
	o := x.to[number]
	if o == nil {
		return
	}
	delete(x.to, number)
	if o.kind == heads.First && x.s.log != nil { // the guest never said a name
		p.e.count(x.s, x.flow, "", true)
	}
	finish(o.Socket)
	p.hands[x.line].clear(o.slot)
	p.closed(x.s, o.tuple)
}

// closed counts a socket off that was opened, or was to be. The kernel would keep its entry
// in the table of conntrack for two minutes.
//
// Preconditions: p.mu is held.
func (p *proxy) closed(s *sandbox, t tupleOfTCP) {
	p.fewer.Broadcast()
	if p.outs[s]--; p.outs[s] == 0 {
		delete(p.outs, s)
	}
	if !t.local.IsValid() { // no packet was sent
		return
	}
	if len(p.gone)+len(p.older) == 0 {
		time.AfterFunc(closedFor, p.forget)
	}
	p.gone = append(p.gone, t)
}

// forget deletes the conntrack entries of connections that are closed for a while: their
// last packets are through.
func (p *proxy) forget() {
	p.mu.Lock()
	old := p.older
	p.older, p.gone = p.gone, nil
	if len(p.older) > 0 {
		time.AfterFunc(closedFor, p.forget)
	}
	p.mu.Unlock()
	for some := range slices.Chunk(old, 256) {
		var requests []byte
		for _, t := range some {
			requests = conntrack.AppendForget(requests, unix.IPPROTO_TCP, plain(t.local), plain(t.remote))
		}
		if err := p.e.table.Send(requests); err != nil {
			p.log.Debug("cannot delete the conntrack entries of proxied connections", "err", err)
		}
	}
}

// handle takes what a child that all sandboxes share says. One that says what it must not is
// ended.
func (p *proxy) handle(line *child.Conn, m child.Message) {
	if m.Kind != heads.KindDial && p.said(line, m) {
		return
	}
	p.log.Error("the child that reads TLS and HTTP sent what it must not; sandboxd ends it", "kind", m.Kind)
	line.Close()
}

// said takes what a child says of its flows. False: it must not say that.
func (p *proxy) said(line *child.Conn, m child.Message) bool {
	switch m.Kind {
	case heads.KindOpen, heads.KindDial:
		o, err := heads.ParseOpen(m.Body)
		q := question{Open: o, dial: m.Kind == heads.KindDial}
		if err != nil || q.dial && (o.Name == "" || o.Kind != heads.TLS && o.Kind != heads.HTTP) {
			return false
		}
		p.mu.Lock()
		x := p.flows[o.Flow]
		ok := x != nil && x.line == line && x.asks < proxyAsks && p.alive(x)
		if ok {
			x.asks++
		}
		p.mu.Unlock()
		if !ok {
			gone := heads.Opened{Result: heads.Failed, Text: errGone.Error()}
			line.Answer(m, gone.Append(nil), nil) //nolint:errcheck // nobody waits for it
			return true
		}
		p.done.Go(func() { p.open(line, m, x, q) })
		return true
	case heads.KindClosed:
		c, err := heads.ParseClosed(m.Body)
		if err != nil {
			return false
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if x := p.flows[c.Flow]; x != nil && x.line == line {
			if c.Socket != 0 {
				p.endOutward(x, c.Socket)
			} else {
				p.end(x, false)
			}
		}
		return true
	}
	return false
}

// open answers a question of the child.
func (p *proxy) open(line *child.Conn, m child.Message, x *proxied, q question) {
	ctx, cancel := context.WithTimeout(x.ctx, dialLimit)
	defer cancel()
	a, c := p.opened(ctx, x, q)
	if err := line.Answer(m, a.Append(nil), c); err != nil {
		p.log.Debug("answer the child", "err", err)
	}
	if conn, ok := c.(*net.TCPConn); ok {
		conn.Close() // the copies are left
	}
	p.mu.Lock()
	x.asks--
	p.mu.Unlock()
}

// ownChildren are those that run, or start.
type ownChildren struct {
	most int

	mu    sync.Mutex
	all   map[*ownChild]bool
	ended bool
}

// enter counts a child that starts. If there are as many as may be, one that is idle is to rest
// for it: it is counted no more, and starts again with its next flow.
func (o *ownChildren) enter(k *ownChild, idle func(*ownChild) bool) (rests *ownChild, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended {
		return nil, errGone
	}
	if len(o.all) >= o.most {
		for other := range o.all {
			if idle(other) {
				rests = other
				break
			}
		}
		if rests == nil {
			return nil, fmt.Errorf("%d sandboxes have connections to inspected hosts, which is the limit of this host", len(o.all))
		}
		delete(o.all, rests)
	}
	o.all[k] = true
	return rests, nil
}

func (o *ownChildren) has(k *ownChild) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.all[k]
}

func (o *ownChildren) leave(k *ownChild) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.all, k)
}

// end returns those that are left. No other starts.
func (o *ownChildren) end() []*ownChild {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	return slices.Collect(maps.Keys(o.all))
}
