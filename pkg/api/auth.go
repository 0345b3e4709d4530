package api

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Listener says what connections of one listening socket may do.
type Listener struct {
	// PublicPorts opens sandbox ports other than the agent's and the egress
	// API's without an endpoint token. Sensible on loopback only.
	PublicPorts bool
}

// peer is what is known of the other end of a connection.
type peer struct {
	unix   bool // whoever may open the socket may use the API
	actor  string
	public bool
	free   func() // gives up its place among those of its address; nil: it has none
}

type peerKey struct{}

// maxPerPeer is how many connections one TCP address may hold, so that one
// client can not take the descriptors of all.
const maxPerPeer = 512

// HTTPServer returns a server for one listener; call Serve on it.
//
// There is no write or read timeout, because commands stream for hours: the
// deadlines move with each write (see tracked), and bodies are limited in size.
func (s *Server) HTTPServer(l Listener) *http.Server {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	conns := &perPeer{held: map[string]int{}}
	return &http.Server{
		Handler:           s,
		Protocols:         &protocols,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       120 * time.Second,
		MaxHeaderBytes:    64 << 10,
		ConnState:         conns.state,
		ErrorLog:          s.quiet,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			p := &peer{actor: c.RemoteAddr().String(), public: l.PublicPorts}
			switch c := c.(type) {
			case *net.UnixConn:
				p.unix, p.actor = true, credentials(c)
			case *net.TCPConn:
				p.free = sync.OnceFunc(func() { conns.drop(c) })
			}
			return context.WithValue(ctx, peerKey{}, p)
		},
	}
}

// credentials names the process at the other end of a Unix socket.
func credentials(c *net.UnixConn) string {
	who := "unix"
	raw, err := c.SyscallConn()
	if err != nil {
		return who
	}
	raw.Control(func(fd uintptr) { //nolint:errcheck // who stays "unix"
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			who = fmt.Sprintf("uid=%d pid=%d", cred.Uid, cred.Pid)
		}
	})
	return who
}

// perPeer counts the connections of each TCP address and closes those beyond
// maxPerPeer.
type perPeer struct {
	mu   sync.Mutex
	held map[string]int
}

func (p *perPeer) state(c net.Conn, st http.ConnState) {
	if _, ok := c.(*net.TCPConn); !ok {
		return
	}
	switch st {
	case http.StateNew:
		if p.add(c) > maxPerPeer {
			c.Close() //nolint:errcheck // net/http closes it again
		}
	case http.StateClosed: // of hijacked ones net/http hears no more: see upgradedConn
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

// upgradedConn is a hijacked connection; it keeps its place until it is closed.
type upgradedConn struct {
	*net.TCPConn
	free func()
}

func (c upgradedConn) Close() error {
	c.free()
	return c.TCPConn.Close()
}

func peerOf(r *http.Request) *peer {
	if p, ok := r.Context().Value(peerKey{}).(*peer); ok {
		return p
	}
	return &peer{actor: r.RemoteAddr}
}

// whoIs names the caller for the log and says whether the API is open to it.
func (s *Server) whoIs(r *http.Request) (actor string, trusted bool) {
	p := peerOf(r)
	switch {
	case p.unix:
		return p.actor, true
	case s.isKey(givenKey(r)):
		return "key " + p.actor, true
	case s.keyless():
		return "anyone " + p.actor, s.foreign(r) == nil
	}
	return "anonymous " + p.actor, false
}

// givenKey is the key a request carries, wherever that is, or "".
func givenKey(r *http.Request) string {
	for _, h := range []string{wire.HeaderAPIKey, wire.HeaderAPIKeyOther} {
		if k := r.Header.Get(h); k != "" {
			return k
		}
	}
	if scheme, k, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
		return strings.TrimSpace(k)
	}
	return ""
}

// isKey compares in a time that depends on nothing secret.
func (s *Server) isKey(k string) bool {
	if k == "" {
		return false
	}
	sum := sha256.Sum256([]byte(k))
	found := 0
	for i := range s.keys {
		found |= subtle.ConstantTimeCompare(sum[:], s.keys[i][:])
	}
	return found == 1
}

// keyless reports whether the API is open to everybody who can connect.
func (s *Server) keyless() bool { return len(s.keys) == 0 && s.cfg.Insecure }

// foreign refuses, where no key is asked for, what the browser of somebody who
// can connect sends for a page of another: a request with another Origin, or
// one to a name that may be the page's own, bound anew to this address. With a
// key neither matters, since no browser sends the key by itself.
func (s *Server) foreign(r *http.Request) error {
	external, _, _ := strings.Cut(s.cfg.ExternalHost, "/")
	host := hostname(r.Host)
	_, err := netip.ParseAddr(host)
	if err != nil && host != "localhost" && !strings.HasSuffix(host, ".localhost") && host != hostname(external) {
		return withStatus(http.StatusForbidden, "SANDBOX::FORBIDDEN", errs.Denied,
			"this daemon asks for no key, so it answers only under an IP address, localhost or its listen.public_address, not as %q: any web page may have that name; use one of these, or set listen.api_key_file", clip(host, 80))
	}
	if origin := r.Header.Get("Origin"); origin != "" {
		u, err := url.Parse(origin)
		if err != nil || !strings.EqualFold(u.Host, r.Host) && (external == "" || !strings.EqualFold(u.Host, external)) {
			return withStatus(http.StatusForbidden, "SANDBOX::FORBIDDEN", errs.Denied,
				"this daemon asks for no key, so it takes nothing from web pages of others, as %q; set listen.api_key_file to call it from a page", clip(origin, 80))
		}
	}
	return nil
}

// hostname is what names the host in a Host header.
func hostname(hostport string) string {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	return strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
}

func (s *Server) unauthorized(r *http.Request) error {
	if s.keyless() {
		return s.foreign(r)
	}
	if givenKey(r) == "" {
		return withStatus(http.StatusUnauthorized, "MISSING_API_KEY", errs.Denied,
			"this needs an API key: send it as header %s (the SDKs take it from OPEN_SANDBOX_API_KEY), or use the Unix socket", wire.HeaderAPIKey)
	}
	return withStatus(http.StatusUnauthorized, "INVALID_API_KEY", errs.Denied,
		"this API key is not one of this daemon's; its keys stand in the file that its configuration names")
}

// endpointToken is what opens one port of one sandbox, and nothing else.
func (s *Server) endpointToken(id string, port uint16) string {
	m := hmac.New(sha256.New, s.cfg.Secret)
	fmt.Fprintf(m, "endpoint\n%s\n%d\n", id, port)
	return hex.EncodeToString(m.Sum(nil)[:20])
}

func equal(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }
