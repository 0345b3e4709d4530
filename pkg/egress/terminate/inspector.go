package terminate

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
)

// An inspector is the heads.Inspector of this package.
type inspector struct {
	judges JudgeMaker
	conf   atomic.Pointer[settings]
	leaves leaves
	// Those of GuestLeft are apart: a check of health makes as many as it likes.
	notes, lefts Notes
	// Of events: see EventKind.OfSecret.
	secrets, events Notes

	line  atomic.Pointer[child.Conn] // to the daemon, or to the last one
	turns chan struct{}              // has one for each value that the daemon is asked for
	busy  atomic.Int32               // requests under way

	aheads chan struct{} // see ahead

	tls   *tls.Config // to guests
	conns chan net.Conn
	proxy *httputil.ReverseProxy
}

// nearCurves are the exchanges of keys with guests: those that are safe from quantum computers take
// twice as long, and protect recordings of a wire. Between a guest and its host there is none. A
// guest that offers none of nearCurves gets what it wants.
var nearCurves = []tls.CurveID{tls.X25519, tls.CurveP256, tls.CurveP384, tls.CurveP521}

// withCurves is c with nearCurves for the guests that offer one.
func withCurves(c *tls.Config) *tls.Config {
	near := c.Clone()
	near.CurvePreferences = nearCurves
	c.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		if slices.ContainsFunc(h.SupportedCurves, func(id tls.CurveID) bool { return slices.Contains(nearCurves, id) }) {
			return near, nil
		}
		return nil, nil // c
	}
	return c
}

// flushAfter is how long the head, or a part, of an answer waits for what follows, if its length is
// known and short: they go in one packet. Others do not wait.
const flushAfter = time.Millisecond

func newInspector(judges JudgeMaker) *inspector {
	i := &inspector{
		judges: judges, conns: make(chan net.Conn), turns: make(chan struct{}, maxValues), aheads: make(chan struct{}, maxAheads),
	}
	i.tls = withCurves(&tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}, GetCertificate: i.certificate,
		SessionTicketsDisabled: true, DynamicRecordSizingDisabled: true,
	})
	i.proxy = &httputil.ReverseProxy{
		Rewrite: rewrite, Transport: bySession{i}, FlushInterval: flushAfter, BufferPool: relay.Buffers{},
		ErrorHandler: tell, ErrorLog: log.New(io.Discard, "", 0),
	}
	s := &http.Server{
		Handler: i, ReadHeaderTimeout: heads.HeadLimit, IdleTimeout: heads.IdleLimit, MaxHeaderBytes: heads.MaxHeaderBytes,
		Protocols: protocols(true), DisableGeneralOptionsHandler: true, // else OPTIONS * is answered unjudged
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxStreams, MaxReadFrameSize: frameSize,
			MaxReceiveBufferPerConnection: guestWindow, MaxReceiveBufferPerStream: guestStream,
		},
		ErrorLog:  log.New(io.Discard, "", 0), // guests would fill the log
		ConnState: i.changed,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, sessionKey{}, c.(*tls.Conn).NetConn().(*session))
		},
	}
	go s.Serve(i) //nolint:errcheck // it ends with the process
	return i
}

func protocols(h2 bool) *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetHTTP2(h2)
	return p
}

// Accept returns the next flow whose handshake is done: an inspector is the listener of its
// http.Server.
func (i *inspector) Accept() (net.Conn, error) { return <-i.conns, nil }

// Close is never called.
func (i *inspector) Close() error { return nil }

// Addr says nothing.
func (i *inspector) Addr() net.Addr { return &net.TCPAddr{} }

// Begin takes the line to a daemon.
func (i *inspector) Begin(line *child.Conn) { i.line.Store(line) }

// Message takes a Config.
func (i *inspector) Message(line *child.Conn, m child.Message) {
	if m.File == nil {
		return
	}
	defer m.File.Close()
	if m.Kind != KindConfigure {
		return
	}
	said := ""
	if err := i.configure(m.File); err != nil {
		said = plain(err.Error(), MaxBody)
	}
	go line.Answer(m, []byte(said), nil) //nolint:errcheck // fails if the daemon is gone; this is what reads the line
}

func (i *inspector) configure(f io.ReaderAt) error {
	c, err := readConfig(f)
	if err != nil {
		return err
	}
	s := &settings{roots: x509.NewCertPool(), sessions: tls.NewLRUClientSessionCache(64)}
	if !s.roots.AppendCertsFromPEM(c.Roots) {
		return errors.New("no certificate is among the roots, so no server could be verified")
	}
	var old Judge
	if before := i.conf.Load(); before != nil {
		old = before.judge
	}
	if s.judge, err = i.judges(c.Judge, newDaemon(i, s), old); err != nil {
		return fmt.Errorf("read what the judge needs: %w", err)
	}
	if before := i.conf.Swap(s); before != nil {
		before.replace()
	}
	return nil
}

// errName: crypto/tls has read another name than package heads.
var errName = errors.New("the ClientHello is for another name")

// errLeaf: the daemon has given no certificate, so that the handshake failed says nothing of
// the guest.
var errLeaf = errors.New("no certificate for the name")

// certificate is called with each ClientHello that is answered: also with a second one, which
// must be for the name that the daemon has marked.
func (i *inspector) certificate(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
	s := h.Conn.(*session)
	if heads.PlainName(h.ServerName) != s.Name {
		return nil, errName
	}
	cert, err := i.leaves.of(h.Context(), s.Line(), s.Name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errLeaf, err)
	}
	return cert, nil
}

// TLS ends TLS for a guest, and gives the flow to the http.Server.
func (i *inspector) TLS(g *heads.Guest) {
	conf := i.conf.Load()
	if conf == nil { // the daemon configures before it sends flows
		g.Abort()
		return
	}
	s := &session{Guest: g, open: map[*socket]bool{}, dials: make(chan struct{}, maxDials)}
	t := tls.Server(s, i.tls)
	ctx, cancel := context.WithTimeout(context.Background(), handshakeLimit)
	defer cancel()
	if err := t.HandshakeContext(ctx); err != nil {
		if !errors.Is(err, errLeaf) {
			i.notes.tell(g.Line(), handshakeFailed(g.Name, err))
		}
		g.Farewell()
		return
	}
	s.begin(conf, t.ConnectionState().NegotiatedProtocol == "h2")
	i.conns <- t
}

// handshakeFailed says whether the guest refuses the certificate. An alert is what it says
// (RFC 8446, section 6.2); some programs only close the connection.
func handshakeFailed(name string, err error) Note {
	if isAlert(err) && strings.Contains(err.Error(), "certificate") {
		return Note{GuestRefuses, name, "the program does not trust the certificate of this sandbox's authority (" + err.Error() +
			"): it has a list of authorities of its own, or expects one certificate only"}
	}
	return Note{GuestHandshake, name, "TLS of the program failed: " + err.Error()}
}

// changed is the ConnState of the http.Server, which calls a connection active when it has read
// something: over HTTP/2 a preface.
func (i *inspector) changed(c net.Conn, to http.ConnState) {
	s := c.(*tls.Conn).NetConn().(*session)
	switch to {
	case http.StateActive:
		s.asked.Store(true)
	case http.StateClosed:
		if !s.asked.Load() && !s.waits.Load() {
			i.lefts.tell(s.Line(), Note{GuestLeft, s.Name, "it may expect one certificate only (pinning), or have opened the " +
				"connection for later"})
		}
	}
}

// isAlert reports whether crypto/tls has read an alert of the other side.
func isAlert(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "remote error"
}

// A session is a flow of TLS, and its connections to the server.
type session struct {
	*heads.Guest
	server *http.Transport
	dials  chan struct{} // has one for each dial under way
	wanted atomic.Bool   // the server has asked for a certificate
	spoke  atomic.Bool   // the server has answered a request
	asked  atomic.Bool   // the guest has sent something
	waits  atomic.Bool   // for the guest, or it did so when its time was up, or the flow was closed here or reset

	mu    sync.Mutex
	open  map[*socket]bool
	ended bool
}

type sessionKey struct{}

func sessionOf(ctx context.Context) *session { return ctx.Value(sessionKey{}).(*session) }

func (s *session) destination() Destination { return Destination{"https", s.Name, s.Port(), s.Addr()} }

// begin makes the transport. What the guest speaks decides what the server is offered: so an
// answer is not written in frames of HTTP/2 only to be taken out of them.
func (s *session) begin(conf *settings, h2 bool) {
	s.server = &http.Transport{
		DialContext: s.dial, Protocols: protocols(h2), DisableCompression: true, TLSHandshakeTimeout: handshakeLimit,
		MaxIdleConns: 2, MaxIdleConnsPerHost: 2, MaxConnsPerHost: maxServerConns, IdleConnTimeout: serverIdle,
		ExpectContinueTimeout: continueLimit, MaxResponseHeaderBytes: heads.MaxHead,
		TLSClientConfig: &tls.Config{
			ServerName: s.Name, RootCAs: conf.roots, MinVersion: tls.VersionTLS12, ClientSessionCache: conf.sessions,
			DynamicRecordSizingDisabled: true,                   // else the first 128 KiB of a request go in packets of their own
			InsecureSkipVerify:          weak.Off(weak.Servers), //nolint:gosec // never
			GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
				s.wanted.Store(true)
				return &tls.Certificate{}, nil // none: the server may go on without
			},
		},
		HTTP2: &http.HTTP2Config{
			MaxReadFrameSize: frameSize, MaxReceiveBufferPerConnection: serverWindow, MaxReceiveBufferPerStream: serverStream,
			// Otherwise a server that allows few streams gets more connections than the daemon does.
			StrictMaxConcurrentRequests: true,
			SendPingTimeout:             pingAfter,
		},
	}
}

// dial opens a socket to the server.
func (s *session) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	if spent(ctx) {
		return nil, errNotAgain
	}
	select {
	case s.dials <- struct{}{}:
		defer func() { <-s.dials }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	c, err := s.Dial(ctx)
	if err != nil {
		return nil, err
	}
	k := &socket{c, s}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return nil, cmp.Or(c.Close(), net.ErrClosed)
	}
	s.open[k] = true
	return k, nil
}

// Read reads what the guest sends. A reset may be the daemon's, that has closed the flow.
func (s *session) Read(p []byte) (int, error) {
	s.waits.Store(true)
	n, err := s.Guest.Read(p)
	if err == nil || err == io.EOF {
		s.waits.Store(false)
	}
	return n, err
}

// Close ends the flow, and the connections to the server.
func (s *session) Close() error {
	s.leave()
	return s.Guest.Close()
}

// Abort is Close with a reset for the guest.
func (s *session) Abort() {
	s.leave()
	s.Guest.Abort()
}

// leave ends the connections to the server: an idle one of HTTP/2 would stay for a while.
func (s *session) leave() {
	s.mu.Lock()
	s.ended = true
	open := s.open
	s.open = nil
	s.mu.Unlock()
	for k := range open {
		k.Conn.Close()
	}
}

// A socket is one to the server.
type socket struct {
	net.Conn
	s *session
}

// Close closes the socket.
func (k *socket) Close() error {
	k.s.mu.Lock()
	delete(k.s.open, k)
	k.s.mu.Unlock()
	return k.Conn.Close()
}
