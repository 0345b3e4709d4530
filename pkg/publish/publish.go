// Package publish forwards TCP ports of host addresses into sandboxes, by
// connections that the daemon accepts and makes itself.
//
//	Reserve ─▶ the port is ours; clients that connect must wait
//	Open    ─▶ clients, including those that wait, reach the sandbox
//	Close   ─▶ the port is free, every connection is cut
//
// What surprises: all of this ends with the daemon, connections too. The next daemon
// opens the ports that the records name. A killed daemon leaves nothing behind.
package publish

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

const (
	// maxConns is how many connections the ports of one sandbox may have. Each takes
	// two descriptors of the daemon, and 2 KiB while idle.
	maxConns    = 512
	dialTimeout = 5 * time.Second
)

// Ports are the published ports of all sandboxes. Its methods may be called
// concurrently.
type Ports struct {
	log *slog.Logger
	// Use, if not nil, is called for each connection of a client, and leave when it has ended. If
	// it fails, the connection breaks. Set it before the first Open.
	Use func(ctx context.Context, id string) (leave func(), err error)

	mu    sync.Mutex
	holds map[string]*holding // by ID
}

// A holding is the ports and connections of one sandbox.
type holding struct {
	ctx       context.Context // ends with Close
	cancel    context.CancelFunc
	listeners map[netip.AddrPort]*net.TCPListener
	open      map[netip.AddrPort]bool // ports that accept connections
	conns     map[*net.TCPConn]bool   // from clients, and to the sandbox: true
	clients   int
	cuts      int  // calls of Cut
	dropped   bool // the warning about too many connections was logged
}

// New returns an empty Ports.
func New(log *slog.Logger) *Ports { return &Ports{log: log, holds: map[string]*holding{}} }

// Reserve reserves ports for a sandbox that is about to be made, all or none. A port in
// use is errs.Exists; an address that this host does not have is errs.Invalid.
func (p *Ports) Reserve(_ context.Context, id string, ports []record.Publish) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.take(id, ports)
}

// Open forwards connections to ports to the sandbox at addr. Ports that are open
// already stay as they are.
func (p *Ports) Open(_ context.Context, id string, addr netip.Addr, ports []record.Publish) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.take(id, ports); err != nil {
		return err
	}
	h := p.holds[id]
	for _, port := range ports {
		if !h.open[port.Host] {
			h.open[port.Host] = true
			go p.accept(id, h, h.listeners[port.Host], netip.AddrPortFrom(addr, port.Port))
		}
	}
	return nil
}

// Close frees all ports of a sandbox, and cuts its connections.
func (p *Ports) Close(_ context.Context, id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop(id)
	return nil
}

// Cut cuts the connections to a sandbox, whose ports stay open: its network is about to go without a
// packet. Clients whose connections wait for the sandbox (Use) wait on.
func (p *Ports) Cut(_ context.Context, id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if h := p.holds[id]; h != nil {
		h.cuts++
		for c, reaches := range h.conns {
			if reaches {
				reset(c)
			}
		}
	}
	return nil
}

// List returns the sandboxes for which Reserve or Open was called, including those
// without ports.
func (p *Ports) List(context.Context) (ids []string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id := range p.holds {
		ids = append(ids, id)
	}
	return ids, nil
}

// CloseAll closes every sandbox.
func (p *Ports) CloseAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id := range p.holds {
		p.drop(id)
	}
}

// take listens on those of ports that id does not have yet. Preconditions: mu is held.
func (p *Ports) take(id string, ports []record.Publish) error {
	h := p.holds[id]
	fresh := h == nil
	if fresh {
		h = &holding{listeners: map[netip.AddrPort]*net.TCPListener{}, open: map[netip.AddrPort]bool{}, conns: map[*net.TCPConn]bool{}}
		h.ctx, h.cancel = context.WithCancel(context.Background())
		p.holds[id] = h
	}
	var made []netip.AddrPort
	for _, port := range ports {
		if h.listeners[port.Host] != nil {
			continue
		}
		l, err := net.ListenTCP(family(port.Host), net.TCPAddrFromAddrPort(port.Host))
		if err == nil {
			h.listeners[port.Host], made = l, append(made, port.Host)
			continue
		}
		for _, a := range made {
			h.listeners[a].Close()
			delete(h.listeners, a)
		}
		if fresh {
			p.drop(id)
		}
		return p.explain(port.Host, err)
	}
	return nil
}

// family is the network of an address: with "tcp", 0.0.0.0 would also mean all of IPv6.
func family(a netip.AddrPort) string {
	if a.Addr().Is4() {
		return "tcp4"
	}
	return "tcp6"
}

// explain says why a port is not available. Preconditions: mu is held.
func (p *Ports) explain(host netip.AddrPort, err error) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		for id, h := range p.holds {
			for a := range h.listeners {
				if record.Overlap(a, host) {
					return errs.Wrap(err, errs.Exists, "publish %s: sandbox %s uses that port; choose another port, or stop that sandbox",
						host, id)
				}
			}
		}
		return errs.Wrap(err, errs.Exists, "publish %s: another program on this host uses that port; choose another port, or find the "+
			"program with: ss -ltnp 'sport = :%d'", host, host.Port())
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return errs.Wrap(err, errs.Invalid, "publish %s: this host does not have the address; use one that `ip address` lists, "+
			"127.0.0.1, or 0.0.0.0 for all IPv4 addresses", host)
	}
	return errs.Wrap(err, errs.Unavailable, "publish %s: %s; choose another port, or try again", host, err)
}

// drop closes a sandbox. Preconditions: mu is held.
func (p *Ports) drop(id string) {
	h := p.holds[id]
	if h == nil {
		return
	}
	delete(p.holds, id)
	h.cancel()
	for _, l := range h.listeners {
		l.Close()
	}
	for c := range h.conns {
		reset(c)
	}
}

// accept serves one port until the port is closed.
func (p *Ports) accept(id string, h *holding, l *net.TCPListener, to netip.AddrPort) {
	var pause time.Duration
	for {
		c, err := l.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptors, or a client that left: neither lasts
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			p.log.Warn("cannot accept a connection to a published port", "sandbox", id, "port", l.Addr().String(), "err", err)
			select {
			case <-time.After(pause):
			case <-h.ctx.Done():
			}
			continue
		}
		pause = 0
		if p.enter(id, h, c) {
			go p.serve(id, h, c, to)
		}
	}
}

// enter counts a client's connection, unless there are too many or h is closed.
func (p *Ports) enter(id string, h *holding, c *net.TCPConn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if h.ctx.Err() != nil || h.clients >= maxConns {
		if !h.dropped && h.ctx.Err() == nil {
			h.dropped = true
			p.log.Warn("the published ports of a sandbox have too many connections; new connections are refused", "sandbox", id, "most",
				maxConns)
		}
		reset(c)
		return false
	}
	h.clients++
	h.conns[c] = false
	return true
}

// serve copies both ways until both have ended, or either breaks. It passes on the end
// of one direction alone: a side that has finished sending may still read.
func (p *Ports) serve(id string, h *holding, client *net.TCPConn, to netip.AddrPort) {
	defer p.leave(h, client)
	if p.Use != nil {
		leave, err := p.Use(h.ctx, id)
		if err != nil {
			p.log.Debug("a connection to a published port is refused: its sandbox cannot be used", "sandbox", id, "err", err)
			reset(client)
			return
		}
		defer leave()
	}
	p.mu.Lock()
	cuts := h.cuts
	p.mu.Unlock()
	d := net.Dialer{Timeout: dialTimeout, Control: breaks}
	c, err := d.DialContext(h.ctx, "tcp4", to.String())
	if err != nil {
		reset(client) // as the guest refuses a connection
		return
	}
	guest := c.(*net.TCPConn)
	guest.SetLinger(-1) //nolint:errcheck // already cut is fine
	p.mu.Lock()
	h.conns[guest] = true
	cut := h.ctx.Err() != nil || h.cuts != cuts
	p.mu.Unlock()
	defer p.forget(h, guest)
	if cut { // before guest was in conns
		reset(guest)
		reset(client)
		return
	}
	in, out := &way{src: client, dst: guest}, &way{src: guest, dst: client}
	in.back, out.back = out, in
	var both sync.WaitGroup
	both.Go(in.run)
	both.Go(out.run)
	both.Wait()
}

// A way is one direction of a connection.
type way struct {
	src, dst *net.TCPConn
	back     *way
	ended    atomic.Bool // the end was passed on to dst
}

// run copies until src ends or either side breaks; then it breaks both.
func (w *way) run() {
	if _, err := relay.Copy(relay.New(w.dst), relay.New(w.src)); err == nil && !w.broken() {
		w.ended.Store(true)
		if w.dst.CloseWrite() == nil {
			return
		}
	}
	reset(w.dst)
	reset(w.src)
}

// broken reports whether the end of file read from src was not a real end. A socket
// reports to only one caller that its peer broke the connection, and that caller may
// have been the writer. A broken socket is in state closed; an intact one gets there
// only after both sides have ended (tcp(7), TCP_INFO).
func (w *way) broken() bool {
	raw, err := w.src.SyscallConn()
	if err != nil {
		return true
	}
	const stateClosed = 7 // TCP_CLOSE of include/net/tcp_states.h
	closed := true
	if err := raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		closed = err != nil || info.State == stateClosed
	}); err != nil {
		return true
	}
	return closed && !w.back.ended.Load()
}

func (p *Ports) leave(h *holding, client *net.TCPConn) {
	p.forget(h, client)
	p.mu.Lock()
	defer p.mu.Unlock()
	h.clients--
}

func (p *Ports) forget(h *holding, c *net.TCPConn) {
	c.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(h.conns, c)
}

// breaks makes a connection that is given up during the dial break, too: the guest may
// have accepted it before the daemon knows (socket(7), SO_LINGER).
func breaks(_, _ string, c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) {
		err = syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
	}); e != nil {
		return e
	}
	return err
}

// reset closes a connection so that the other side sees it break, not end.
func reset(c *net.TCPConn) {
	c.SetLinger(0) //nolint:errcheck // already closed is fine
	c.Close()
}
