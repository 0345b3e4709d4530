// Package publish forwards TCP ports of host addresses into sandboxes, by
// connections that the daemon accepts and makes itself.
//
//	Reserve ─▶ the port is ours, and nobody is answered yet
//	Open    ─▶ who connects, or has waited since Reserve, reaches the sandbox
//	Close   ─▶ the port is free, every connection is cut
//
// What surprises: all of this ends with the daemon, connections too. The next one
// opens what the records name. A daemon that is killed leaves nothing behind.
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
	// maxConns is how many connections the ports of one sandbox may have. Each is
	// two descriptors of the daemon, and 2 KiB while nothing flows.
	maxConns    = 512
	dialTimeout = 5 * time.Second
)

// Ports are the published ports of all sandboxes. Its methods may be called
// concurrently.
type Ports struct {
	log   *slog.Logger
	mu    sync.Mutex
	holds map[string]*holding // by ID
}

// A holding is what one sandbox has.
type holding struct {
	ctx       context.Context // until Close
	cancel    context.CancelFunc
	listeners map[netip.AddrPort]*net.TCPListener
	open      map[netip.AddrPort]bool   // whose connections are accepted
	conns     map[*net.TCPConn]struct{} // of clients and to the sandbox
	clients   int
	dropped   bool // that there were too many has been said
}

// New returns an empty Ports.
func New(log *slog.Logger) *Ports { return &Ports{log: log, holds: map[string]*holding{}} }

// Reserve takes ports for a sandbox that is about to be made, all or none. One
// that somebody has is errs.Exists, an address that this host has not errs.Invalid.
func (p *Ports) Reserve(_ context.Context, id string, ports []record.Publish) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.take(id, ports)
}

// Open has everybody who connects to ports reach the sandbox at addr. What is
// open already stays as it is.
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

// Close lets go of all that a sandbox has, and cuts its connections.
func (p *Ports) Close(_ context.Context, id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop(id)
	return nil
}

// List returns the sandboxes that were opened or reserved for, those without
// ports among them.
func (p *Ports) List(context.Context) (ids []string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id := range p.holds {
		ids = append(ids, id)
	}
	return ids, nil
}

// CloseAll is Close of every sandbox.
func (p *Ports) CloseAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id := range p.holds {
		p.drop(id)
	}
}

// take listens on what id does not have yet of ports. Preconditions: mu is held.
func (p *Ports) take(id string, ports []record.Publish) error {
	h := p.holds[id]
	fresh := h == nil
	if fresh {
		h = &holding{listeners: map[netip.AddrPort]*net.TCPListener{}, open: map[netip.AddrPort]bool{}, conns: map[*net.TCPConn]struct{}{}}
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

// family is the network of an address: with "tcp" 0.0.0.0 would mean all of IPv6,
// too, which nobody has asked for.
func family(a netip.AddrPort) string {
	if a.Addr().Is4() {
		return "tcp4"
	}
	return "tcp6"
}

// explain says why a port cannot be had. Preconditions: mu is held.
func (p *Ports) explain(host netip.AddrPort, err error) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		for id, h := range p.holds {
			for a := range h.listeners {
				if record.Overlap(a, host) {
					return errs.Wrap(err, errs.Exists, "publish %s: sandbox %s has that port; choose another, or end that sandbox", host,
						id)
				}
			}
		}
		return errs.Wrap(err, errs.Exists, "publish %s: another program of this host has that port; choose another, or see who has it "+
			"with: ss -ltnp 'sport = :%d'", host, host.Port())
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return errs.Wrap(err, errs.Invalid, "publish %s: this host does not have the address; see `ip address`, or use 127.0.0.1, or "+
			"0.0.0.0 for all of IPv4", host)
	}
	return errs.Wrap(err, errs.Unavailable, "publish %s: %s; choose another port, or try again", host, err)
}

// drop is Close. Preconditions: mu is held.
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

// accept serves one port until it is closed.
func (p *Ports) accept(id string, h *holding, l *net.TCPListener, to netip.AddrPort) {
	var pause time.Duration
	for {
		c, err := l.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptors, or a client that left: both pass
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			p.log.Warn("accept a connection to a published port", "sandbox", id, "port", l.Addr().String(), "err", err)
			select {
			case <-time.After(pause):
			case <-h.ctx.Done():
			}
			continue
		}
		pause = 0
		if p.enter(id, h, c) {
			go p.serve(h, c, to)
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
			p.log.Warn("the published ports of a sandbox have too many connections; others are refused", "sandbox", id, "most", maxConns)
		}
		reset(c)
		return false
	}
	h.clients++
	h.conns[c] = struct{}{}
	return true
}

// serve copies both ways until both have ended, or either breaks. The end of one
// is passed on by itself: who has said all may still listen.
func (p *Ports) serve(h *holding, client *net.TCPConn, to netip.AddrPort) {
	defer p.leave(h, client)
	d := net.Dialer{Timeout: dialTimeout, Control: breaks}
	c, err := d.DialContext(h.ctx, "tcp4", to.String())
	if err != nil {
		reset(client) // refused, as the guest does it
		return
	}
	guest := c.(*net.TCPConn)
	guest.SetLinger(-1) //nolint:errcheck // cut already is as well
	p.mu.Lock()
	h.conns[guest] = struct{}{}
	ended := h.ctx.Err() != nil
	p.mu.Unlock()
	defer p.forget(h, guest)
	if ended { // before it was there to be cut
		reset(guest)
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
	ended    atomic.Bool // and dst has been told so
}

// run copies until src ends or either end breaks, which breaks both.
func (w *way) run() {
	if _, err := relay.Copy(w.dst, w.src); err == nil && !w.broken() {
		w.ended.Store(true)
		if w.dst.CloseWrite() == nil {
			return
		}
	}
	reset(w.dst)
	reset(w.src)
}

// broken reports whether the end that was read from src was none: a socket tells that
// its peer broke to one caller only, which may have been the one who wrote to it. It is
// closed then, which by itself takes an end of both sides (tcp(7), TCP_INFO).
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

// breaks has a connection that is given up while it is dialled break, too: the guest may
// have accepted it before we know (socket(7), SO_LINGER).
func breaks(_, _ string, c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) {
		err = syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
	}); e != nil {
		return e
	}
	return err
}

// reset closes a connection so that the other end sees it break, and not end.
func reset(c *net.TCPConn) {
	c.SetLinger(0) //nolint:errcheck // closed already is as well
	c.Close()
}
