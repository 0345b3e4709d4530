// Package framing finds HTTP/1 requests that do not say clearly where they end. A proxy
// in front of the daemon could then see the end elsewhere than the daemon, and take
// what follows for the request of another client (request smuggling, RFC 9112 §11.2).
//
//	Listener ─▶ Conn, which reads along ─▶ net/http ─▶ handler, which asks Conn.Clear
//
// net/http accepts a request that has Content-Length and Transfer-Encoding, and removes
// the first without a trace (fixLength in its transfer.go). So the bytes must be seen
// before net/http sees them.
//
// The surprise: a Conn changes no byte and refuses nothing. It counts the requests that
// are clear. It never counts again after one that is not, or that it cannot follow. So
// at worst a connection ends early.
package framing

import (
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
	"time"
)

// Listener makes the connections of l Conns. If l speaks TLS, they read along what was
// decrypted. Failed handshakes are written to errorLog, which may be nil.
func Listener(l net.Listener, errorLog *log.Logger) net.Listener { return listener{l, errorLog} }

type listener struct {
	net.Listener
	log *log.Logger
}

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	conn := &Conn{Conn: c}
	if t, ok := c.(*tls.Conn); ok {
		return &secured{conn, t, l.log}, nil
	}
	return conn, nil
}

// Conn is a connection whose requests are read along. It has one reader at a time, as
// net/http reads it.
type Conn struct {
	net.Conn
	along scanner
	clear atomic.Int64 // heads that along has found clear
	begun int64        // heads that net/http has read
}

// Read may leave the bytes of a body out of p, if the connection below does (internal/relay).
// Of those, along only uses the number.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.along.state != lost {
		c.clear.Add(c.along.see(p[:n]))
	}
	return n, err
}

// ReadFrom is how net/http sends a body that comes from another socket (internal/relay).
func (c *Conn) ReadFrom(r io.Reader) (int64, error) { return io.Copy(c.Conn, r) }

// State must be called for each change of the connection's state, by the goroutine that
// serves it. (http.Server.ConnState)
func (c *Conn) State(s http.ConnState) {
	switch s {
	case http.StateActive:
		c.begun++
	case http.StateHijacked: // what follows is not HTTP
		c.along = scanner{state: lost}
	}
}

// Clear reports whether the request that is being served says clearly where it ends.
// Only the goroutine that serves the connection may call it.
func (c *Conn) Clear() bool { return c.begun <= c.clear.Load() }

// CloseWrite closes the half of the connection that the server writes to.
func (c *Conn) CloseWrite() error {
	if h, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return errors.ErrUnsupported
}

// NetConn is the connection below, as that of tls.Conn.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// Socket is the socket of a connection, below TLS and a Conn.
func Socket(c net.Conn) net.Conn {
	for {
		over, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return c
		}
		c = over.NetConn()
	}
}

// Of is the Conn that an http.Server serves as c; nil: its listener is no Listener.
func Of(c net.Conn) *Conn {
	switch c := c.(type) {
	case *Conn:
		return c
	case *secured:
		return c.Conn
	}
	return nil
}

// secured is a Conn over TLS.
type secured struct {
	*Conn
	tls *tls.Conn
	log *log.Logger
}

// handshakeLimit is how long a handshake may take: what net/http allows where the head
// of a request may take as long.
const handshakeLimit = 10 * time.Second

// ConnectionState makes the handshake. net/http asks for it before it reads. Only for
// a *tls.Conn it makes the handshake itself, and this does the same.
func (s *secured) ConnectionState() tls.ConnectionState {
	s.tls.SetDeadline(time.Now().Add(handshakeLimit)) //nolint:errcheck // then the handshake fails
	err := s.tls.Handshake()                          // again at the first read, which then fails
	s.tls.SetDeadline(time.Time{})                    //nolint:errcheck // see above
	if err != nil && s.log != nil {
		s.log.Printf("TLS handshake with %s: %v", s.RemoteAddr(), err)
	}
	if plain, ok := errors.AsType[tls.RecordHeaderError](err); ok && plain.Conn != nil && looksLikeHTTP(plain.RecordHeader) {
		io.WriteString(plain.Conn, //nolint:errcheck // it is closed next
			"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n")
		plain.Conn.Close()
	}
	return s.tls.ConnectionState()
}

// looksLikeHTTP reports whether the first bytes of a connection begin a request.
func looksLikeHTTP(first [5]byte) bool {
	return slices.Contains([]string{"GET /", "HEAD ", "POST ", "PUT /", "PATCH", "DELET", "OPTIO"}, string(first[:]))
}
