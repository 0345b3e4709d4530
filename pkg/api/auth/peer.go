package auth

import (
	"context"
	"crypto/tls"
	"fmt"
	"log"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sys/unix"
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

	user   string // the part of Actor that is the same for all connections of a client
	public bool   // see Listener.PublicPorts
	free   func() // takes it out of the count of its address; nil: it is not counted
}

type peerKey struct{}

// maxPerPeer is how many connections one TCP address may hold, so that one client
// cannot take the descriptors of all.
const maxPerPeer = 512

// Server returns a server for the listener; call Serve on it. The handler finds the
// other end of each connection by PeerOf.
//
// There is no write or read timeout, because commands stream for hours: the handler
// moves the deadlines with each write, and bounds the size of bodies.
func (l Listener) Server(h http.Handler, errorLog *log.Logger) *http.Server {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	conns := &perPeer{held: map[string]int{}}
	return &http.Server{
		Handler:           h,
		Protocols:         &protocols,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       120 * time.Second,
		MaxHeaderBytes:    64 << 10,
		ConnState:         conns.state,
		ErrorLog:          errorLog,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			p := &Peer{Actor: c.RemoteAddr().String(), public: l.PublicPorts, Gateway: l.Gateway}
			c = underTLS(c)
			switch c := c.(type) {
			case *net.UnixConn:
				p.Unix = true
				p.user, p.Actor = credentials(c)
			case *net.TCPConn:
				p.user = address(c)
				p.free = sync.OnceFunc(func() { conns.drop(c) })
			}
			return context.WithValue(ctx, peerKey{}, p)
		},
	}
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

// perPeer counts the connections of each TCP address and closes those beyond
// maxPerPeer.
type perPeer struct {
	mu   sync.Mutex
	held map[string]int
}

func (p *perPeer) state(c net.Conn, st http.ConnState) {
	tcp, ok := underTLS(c).(*net.TCPConn)
	if !ok {
		return
	}
	c = tcp
	switch st {
	case http.StateNew:
		if p.add(c) > maxPerPeer {
			c.Close() //nolint:errcheck // net/http closes it again
		}
	case http.StateClosed: // net/http does not report it of hijacked ones: see Keep
		p.drop(c)
	}
}

func address(c net.Conn) string { return c.RemoteAddr().(*net.TCPAddr).IP.String() }

func (p *perPeer) add(c net.Conn) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := address(c)
	p.held[k]++
	return p.held[k]
}

func (p *perPeer) drop(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := address(c)
	if p.held[k]--; p.held[k] <= 0 {
		delete(p.held, k)
	}
}

// underTLS is the TCP connection under c, or c.
func underTLS(c net.Conn) net.Conn {
	if t, ok := c.(*tls.Conn); ok {
		return t.NetConn()
	}
	return c
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
