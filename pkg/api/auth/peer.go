package auth

import (
	"container/list"
	"context"
	"fmt"
	"log"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/framing"
	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Listener says what connections of one listening socket may do.
type Listener struct {
	// PublicPorts opens sandbox ports other than the agent's and the egress
	// API's without an endpoint token. Sensible on loopback only.
	PublicPorts bool
	// Gateway: the listener serves ports of sandboxes and nothing else.
	Gateway bool
}

// A Peer is what is known of the other end of a connection.
type Peer struct {
	Unix  bool   // by the Unix socket: whoever may open it may use the API
	Actor string // for the log: an address and port, or user and process
	// Gateway: the listener serves no API, so Guard.Keyless says nothing about it.
	Gateway bool

	user   string        // the part of Actor that is the same for all connections of a client
	public bool          // see Listener.PublicPorts
	free   func()        // takes it out of the count of its address; nil: it is not counted
	conn   *framing.Conn // nil: it was not accepted by Server.Serve
}

type peerKey struct{}

// maxPerPeer is how many connections one TCP address may hold, so that one client
// cannot take the descriptors of all.
const maxPerPeer = 512

// A Server is one that each listener of HTTP has, of any kind.
type Server struct {
	*http.Server
	busy *busy
}

// Drain serves what has come to its end, without new connections, until ctx ends. Call it before
// Shutdown, which drops requests that net/http is just reading. Idle connections are closed.
func (s *Server) Drain(ctx context.Context) {
	s.SetKeepAlivesEnabled(false)
	select {
	case <-s.busy.none():
	case <-ctx.Done():
	}
}

// busy knows the connections on which a request is read or answered, or may be at any moment: on a new
// one the first is expected.
type busy struct {
	mu    sync.Mutex
	conns map[net.Conn]bool // guarded by mu
	over  chan struct{}     // closed when conns becomes empty; nil: nobody waits for that
}

func (b *busy) state(c net.Conn, to http.ConnState) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if to == http.StateNew || to == http.StateActive {
		b.conns[c] = true
		return
	}
	delete(b.conns, c) // a hijacked one is no longer net/http's
	if len(b.conns) == 0 && b.over != nil {
		close(b.over)
		b.over = nil
	}
}

// none returns a channel that is closed when no connection is busy.
func (b *busy) none() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	over := make(chan struct{})
	if len(b.conns) == 0 {
		close(over)
	} else {
		b.over = over
	}
	return over
}

// Serve is that of http.Server. Its connections are read along: see Peer.Clear.
func (s *Server) Serve(l net.Listener) error {
	return s.Server.Serve(framing.Listener(relay.Listener(l), s.ErrorLog))
}

// Server returns a server for the listener; call Serve on it. The handler finds the
// other end of each connection by PeerOf.
//
// There is no write or read timeout, because commands stream for hours: the handler
// moves the deadlines with each write, and bounds the size of bodies.
func (l Listener) Server(h http.Handler, errorLog *log.Logger) *Server {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	conns := &perPeer{held: map[string]*connections{}}
	patience := 10 * time.Second
	if weak.Off(weak.SlowClients) {
		patience = time.Hour
	}
	busy := &busy{conns: map[net.Conn]bool{}}
	return &Server{busy: busy, Server: &http.Server{
		Handler:           h,
		Protocols:         &protocols,
		ReadHeaderTimeout: patience,
		IdleTimeout:       120 * time.Second,
		MaxHeaderBytes:    64 << 10,
		ConnState: func(c net.Conn, to http.ConnState) {
			busy.state(c, to)
			if conn := framing.Of(c); conn != nil {
				conn.State(to)
			}
			if tcp, ok := framing.Socket(c).(*net.TCPConn); ok {
				conns.state(tcp, to)
			}
		},
		ErrorLog: errorLog,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			p := &Peer{Actor: c.RemoteAddr().String(), public: l.PublicPorts, Gateway: l.Gateway, conn: framing.Of(c)}
			switch c := framing.Socket(c).(type) {
			case *net.UnixConn:
				p.Unix = true
				p.user, p.Actor = credentials(c)
			case *net.TCPConn:
				p.user = address(c)
				p.free = sync.OnceFunc(func() { conns.drop(c) })
			}
			return context.WithValue(ctx, peerKey{}, p)
		},
	}}
}

// Clear refuses a request whose end two programs may see at different places. The
// connection must be closed after the refusal, and nothing more be read from it.
func (p *Peer) Clear() error {
	if p.conn == nil || p.conn.Clear() || weak.Off(weak.Framing) {
		return nil
	}
	return errs.New(errs.Invalid, "this request, or one before it on this connection, does not say clearly where it ends: it has "+
		"both Content-Length and Transfer-Encoding, or one of them in a form that programs read differently; send one of them, on one "+
		"line. The connection is closed")
}

// Conn is the connection that requests are read from; nil: it was not accepted by
// Server.Serve.
func (p *Peer) Conn() net.Conn {
	if p.conn == nil {
		return nil
	}
	return p.conn
}

// credentials names the user and the process at the other end of a Unix socket.
func credentials(c *net.UnixConn) (user, process string) {
	user, process = "unix", "unix"
	raw, err := c.SyscallConn()
	if err != nil {
		return user, process
	}
	raw.Control(func(fd uintptr) { //nolint:errcheck // they stay "unix"
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			user = fmt.Sprintf("uid=%d", cred.Uid)
			process = fmt.Sprintf("%s pid=%d", user, cred.Pid)
		}
	})
	return user, process
}

// perPeer counts the connections of each TCP address. Where an address opens more than
// maxPerPeer, its connection that has been idle longest is closed. If none is idle, the
// new one is closed.
type perPeer struct {
	mu   sync.Mutex
	held map[string]*connections // by address
}

// connections are those of one address.
type connections struct {
	all  map[*net.TCPConn]*list.Element // its place in idle; nil: a request is served
	idle list.List                      // of *net.TCPConn, the one that has been idle longest first
}

// state follows a connection. One that has sent nothing yet is idle too.
func (p *perPeer) state(c *net.TCPConn, to http.ConnState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := address(c)
	of := p.held[k]
	if to == http.StateNew {
		if of == nil {
			of = &connections{all: map[*net.TCPConn]*list.Element{}}
			p.held[k] = of
		}
		of.all[c] = of.idle.PushBack(c)
		if len(of.all) > maxPerPeer && !weak.Off(weak.Connections) {
			oldest := of.idle.Remove(of.idle.Front()).(*net.TCPConn)
			delete(of.all, oldest)
			oldest.Close() //nolint:errcheck // net/http closes it again
		}
		return
	}
	if of == nil {
		return
	}
	place, counted := of.all[c]
	switch {
	case !counted: // it was closed above
	case to == http.StateIdle:
		of.all[c] = of.idle.PushBack(c)
	case to == http.StateActive && place != nil:
		of.idle.Remove(place)
		of.all[c] = nil
	case to == http.StateClosed: // net/http does not report it of hijacked ones: see Keep
		p.dropLocked(c)
	}
}

func address(c net.Conn) string { return c.RemoteAddr().(*net.TCPAddr).IP.String() }

func (p *perPeer) drop(c *net.TCPConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropLocked(c)
}

func (p *perPeer) dropLocked(c *net.TCPConn) {
	k := address(c)
	of := p.held[k]
	if of == nil {
		return
	}
	if place := of.all[c]; place != nil {
		of.idle.Remove(place)
	}
	if delete(of.all, c); len(of.all) == 0 {
		delete(p.held, k)
	}
}

// halfCloser is a connection whose two directions close one by one, as those of TCP
// and TLS.
type halfCloser interface {
	net.Conn
	CloseWrite() error
}

// Keep returns a hijacked connection of p, which counts for its address until it is
// closed.
func (p *Peer) Keep(c net.Conn) net.Conn {
	if h, ok := c.(halfCloser); ok && p.free != nil {
		return upgradedConn{h, p.free}
	}
	return c
}

// upgradedConn is a hijacked connection, which counts for its address until it is
// closed.
type upgradedConn struct {
	halfCloser
	free func()
}

// NetConn is the connection below.
func (c upgradedConn) NetConn() net.Conn { return c.halfCloser }

func (c upgradedConn) Close() error {
	c.free()
	return c.halfCloser.Close()
}

// PeerOf is the other end of the connection that a request came by.
func PeerOf(r *http.Request) *Peer {
	if p, ok := r.Context().Value(peerKey{}).(*Peer); ok {
		return p
	}
	return &Peer{Actor: r.RemoteAddr}
}
