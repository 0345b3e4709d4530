package api

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
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
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Listener says what connections of one listening socket may do.
type Listener struct {
	// PublicPorts opens sandbox ports other than the agent's and the egress
	// API's without an endpoint token. Sensible on loopback only.
	PublicPorts bool
	// Gateway has it serve ports of sandboxes and nothing else.
	Gateway bool
}

// peer is what is known of the other end of a connection.
type peer struct {
	unix   bool // whoever may open the socket may use the API
	actor  string
	who    string // what of actor stays the same from one connection to the next
	public bool
	// gateway: no API; and that the API may be open to all who can connect is
	// said of another listener.
	gateway bool
	free    func() // gives up its place among those of its address; nil: it has none
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
			p := &peer{actor: c.RemoteAddr().String(), public: l.PublicPorts, gateway: l.Gateway}
			c = underTLS(c)
			switch c := c.(type) {
			case *net.UnixConn:
				p.unix = true
				p.who, p.actor = credentials(c)
			case *net.TCPConn:
				p.who = address(c)
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

// underTLS is the connection that c is spoken on.
func underTLS(c net.Conn) net.Conn {
	if t, ok := c.(*tls.Conn); ok {
		return t.NetConn()
	}
	return c
}

// halfCloser is a connection whose two directions end apart, as TCP's and TLS's.
type halfCloser interface {
	net.Conn
	CloseWrite() error
}

// upgradedConn is a hijacked connection; it keeps its place until it is closed.
type upgradedConn struct {
	halfCloser
	free func()
}

func (c upgradedConn) Close() error {
	c.free()
	return c.halfCloser.Close()
}

func peerOf(r *http.Request) *peer {
	if p, ok := r.Context().Value(peerKey{}).(*peer); ok {
		return p
	}
	return &peer{actor: r.RemoteAddr}
}

// whoIs names the caller for the log and says what it may do; nothing is the
// empty role. Who may open the Unix socket is an admin: the host's owner gives it
// to root and one group.
func (s *Server) whoIs(r *http.Request) (actor string, role record.Role) {
	p := peerOf(r)
	key, ok := s.keys.find(givenKey(r))
	switch {
	case p.unix:
		return p.actor, record.Admin
	case ok && !expired(key):
		return "key " + key.Name + " " + p.actor, key.Role
	case s.keyless() && !p.gateway:
		if s.unauthorized(r) == nil {
			role = record.Admin
		}
		return "anyone " + p.actor, role
	}
	return "anonymous " + p.actor, ""
}

// client names whom a request counts for where clients take turns: a user of the
// host, a key, or where none is asked for, an address.
func (s *Server) client(r *http.Request) string {
	p := peerOf(r)
	if key, ok := s.keys.find(givenKey(r)); ok && !p.unix {
		return "key " + key.Name
	}
	return p.who
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

// isKey reports whether k is, or was until it expired, a key of the API: what no
// guest may see.
func (s *Server) isKey(k string) bool { _, ok := s.keys.find(k); return ok }

// holdsKey reports whether the value of a header is a key of the API, by itself or
// as a bearer's.
func (s *Server) holdsKey(v string) bool {
	if scheme, k, ok := strings.Cut(v, " "); ok && strings.EqualFold(scheme, "Bearer") {
		v = k
	}
	return s.isKey(strings.TrimSpace(v))
}

// keyless reports whether the API is open to everybody who can connect. The
// first key that somebody makes ends that.
func (s *Server) keyless() bool { return s.cfg.Insecure && len(*s.keys.all.Load()) == 0 }

// fromPage refuses, where no key is asked for, what a web page sends. There is no
// page of ours: those under this very address are guests', whose ports are served
// beside the API, so the same origin says nothing. No Origin comes with a GET, and
// Sec-Fetch-Site only to https and to loopback; what remains by plain HTTP is how
// browsers call themselves. A page may drop its Referer, so one is enough and none
// proves nothing.
func (s *Server) fromPage(r *http.Request) error {
	h := r.Header
	site := h.Get("Sec-Fetch-Site")
	switch {
	case h.Get("Origin") != "", h.Get("Referer") != "", site != "" && site != "none":
	case site == "" && strings.HasPrefix(h.Get("User-Agent"), "Mozilla/"):
	default:
		return nil
	}
	return httperr.New(http.StatusForbidden, "SANDBOX::FORBIDDEN", errs.Denied,
		"this daemon asks for no key, so it takes nothing from web pages or browsers (this came from %q): guests serve pages under its address too; set listen.api_key_file to call it from a page",
		httperr.Clip(cmp.Or(h.Get("Origin"), h.Get("Referer"), h.Get("User-Agent"), site), 80))
}

// foreign refuses, where no key is asked for, what the browser of somebody who
// can connect sends for a page of another: a request with another Origin, or
// one to a name that may be the page's own, bound anew to this address. With a
// key neither matters, since no browser sends the key by itself.
func (s *Server) foreign(r *http.Request) error {
	external, _, _ := strings.Cut(s.cfg.ExternalHost, "/")
	host := hostname(r.Host)
	_, err := netip.ParseAddr(host)
	if err != nil && host != "localhost" && !strings.HasSuffix(host, ".localhost") && host != hostname(external) {
		return httperr.New(http.StatusForbidden, "SANDBOX::FORBIDDEN", errs.Denied,
			"this daemon asks for no key, so it answers only under an IP address, localhost or its listen.public_address, not as %q: any web page may have that name; use one of these, or set listen.api_key_file", httperr.Clip(host, 80))
	}
	if origin := r.Header.Get("Origin"); origin != "" {
		u, err := url.Parse(origin)
		if err != nil || !strings.EqualFold(u.Host, r.Host) && (external == "" || !strings.EqualFold(u.Host, external)) {
			return httperr.New(http.StatusForbidden, "SANDBOX::FORBIDDEN", errs.Denied,
				"this daemon asks for no key, so it takes nothing from web pages of others, as %q; set listen.api_key_file to call it from a page", httperr.Clip(origin, 80))
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
		if err := s.foreign(r); err != nil {
			return err
		}
		return s.fromPage(r)
	}
	if givenKey(r) == "" {
		return httperr.New(http.StatusUnauthorized, "MISSING_API_KEY", errs.Denied,
			"this needs an API key: send it as header %s (the SDKs take it from OPEN_SANDBOX_API_KEY), or use the Unix socket", wire.HeaderAPIKey)
	}
	if key, ok := s.keys.find(givenKey(r)); ok && expired(key) {
		return httperr.New(http.StatusUnauthorized, "INVALID_API_KEY", errs.Denied,
			"this API key, %s, expired at %s; ask an admin for another (`sandboxctl key create`)", key.Name, key.Expires.Format(time.RFC3339))
	}
	return httperr.New(http.StatusUnauthorized, "INVALID_API_KEY", errs.Denied,
		"this API key is not one of this daemon's; its keys stand in the file that its configuration names, and `sandboxctl key ls` lists the others")
}

// endpointToken is what opens one port of one sandbox, and nothing else.
func (s *Server) endpointToken(id string, port uint16) string {
	m := hmac.New(sha256.New, s.cfg.Secret)
	fmt.Fprintf(m, "endpoint\n%s\n%d\n", id, port)
	return hex.EncodeToString(m.Sum(nil)[:20])
}

func equal(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }
