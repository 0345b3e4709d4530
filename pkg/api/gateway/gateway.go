// Package gateway carries a client's bytes to a port in a sandbox and back:
//
//	request ─▶ Target: which sandbox, which port, what of the path is the port's
//	   ─▶ CheckSignature ─▶ Serve: role, token or signature ─▶ does it run? ─▶ headers ─▶ agent or app
//
// A request names its Target by the API's own route or, on a listener of the gateway,
// by host, header or path (Names). Nothing here needs an API key: each port has a
// token, and a signed address opens one port by itself. A key of an operator replaces
// every token.
//
// The surprise: the bytes are not interpreted, with one exception. The last event of the
// stream of a command that failed gets what only the host knows (ending.go): that the
// kernel killed it for its memory, and what the network refused meanwhile.
package gateway

import (
	"context"
	"log"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Config is what a Gateway needs.
type Config struct {
	Names
	// Secret signs tokens and addresses.
	Secret []byte
	// TrustedProxies are peers whose X-Forwarded-* is trusted and passed on; that of
	// a Unix socket always is.
	TrustedProxies []netip.Prefix

	Sandboxes Sandboxes
	Agents    Agents
	Guard     Guard
	// Kills counts the processes of a sandbox that the kernel killed for its memory.
	Kills func(id string) (int64, error)
	// Denials counts what the network has refused a sandbox. Denied says in a line what it
	// refused after so many denials; "": nothing. Both may be nil.
	Denials func(id string) int64
	Denied  func(id string, before int64) string
	// State is the state of a sandbox in the words of clients.
	State func(*record.Record) string
	// Accessed is called for each request that is admitted to a running sandbox, unless
	// the request asks not to renew it. It must not wait.
	Accessed func(*http.Request, *record.Record)
	// Use begins a use of a sandbox, which lasts until leave is called. It wakes one that is asleep,
	// and rec becomes its newest record. It may be nil. (idle.Watcher)
	Use func(ctx context.Context, rec *record.Record) (leave func(), err error)

	// Ended may answer for the agent of a sandbox that has ended; it reports whether it did. It may
	// be nil.
	Ended func(w http.ResponseWriter, r *http.Request, rec *record.Record, path string) (bool, error)

	Log *log.Logger // gets what goes wrong behind an answer
}

// Sandboxes finds sandboxes. (api.Sandboxes)
type Sandboxes interface {
	// Await blocks while the sandbox is being brought up.
	Await(ctx context.Context, idOrName string) (record.Record, error)
	Get(ctx context.Context, idOrName string) (record.Record, error)
	// Life ends when the sandbox has ended. A stream from the sandbox does not end by
	// itself, since its link goes away without a packet.
	Life(id string) context.Context
}

// Agents reaches into sandboxes. (agent)
type Agents interface {
	// Transport returns pooled connections to the agent of r. They add the agent's
	// token to every request, so the gateway has authorised it before. They ignore the
	// host of the request's URL.
	Transport(r *record.Record) http.RoundTripper
	// Dial connects to a port at the address of r. A server that listens on loopback
	// only is reached through the agent's /proxy/{port}.
	Dial(ctx context.Context, r record.Record, port uint16) (net.Conn, error)
}

// Guard knows the API keys. (auth.Guard)
type Guard interface {
	// Role is the role of an API key, and how long it has that; empty: the text is no key.
	Role(secret string) (role record.Role, life context.Context)
	// Holds reports whether the value of a header holds an API key.
	Holds(value string) bool
	// Public reports whether guests' ports are open to the sender without a token.
	Public(r *http.Request) bool
	// FromPage refuses web pages where the API asks for no key.
	FromPage(r *http.Request) error
	// Refusal says why the key of a request opens no port; nil: the request has no key.
	Refusal(r *http.Request, role record.Role) error
}

// A Visit is one request to a port: what the API knows of its sender, and what the
// gateway notes for the line in the log. Only the request's own goroutine touches it.
type Visit struct {
	Role record.Role // of the sender's API key or Unix socket; empty: none
	Peer string      // the other end of the connection, for the log
	Unix bool        // the request came by a Unix socket
	// Conn is what the request is read from and the answer written to; nil: unknown.
	Conn net.Conn
	// Keyless: the request came to the API by a listener that asks for no key. So Role
	// is anybody's.
	Keyless bool

	Actor   string // who was admitted by a token; empty: the sender that the API names
	Runs    bool   // the request has the agent run a command or code
	Runtime string // of the sandbox
	Image   string // of the sandbox
	Guest   bool   // the answer's status may be the guest's choice
	// Hold: the headers of the answer need no packet of their own, because the first
	// of its body follows at once.
	Hold bool

	life  context.Context // of the key that admitted the request to the agent; nil: none did
	until time.Time       // when the signed address that admitted it expires; zero: none did
}

// during is ctx for as long as what admitted the request does so.
func (v *Visit) during(ctx context.Context, port uint16) (context.Context, context.CancelFunc) {
	if v.until.IsZero() {
		return httperr.During(ctx, v.life)
	}
	return context.WithDeadlineCause(ctx, v.until, httperr.Revoke(errAddressExpired(v.until, port)))
}

// A Gateway serves ports of sandboxes. Make one with New.
type Gateway struct {
	cfg   Config
	ports *http.Transport // to ports other than the agent's
}

// New makes a Gateway.
func New(c Config) *Gateway {
	g := &Gateway{cfg: c}
	g.ports = g.portTransport()
	return g
}

// Close drops idle connections into sandboxes.
func (g *Gateway) Close() { g.ports.CloseIdleConnections() }

// Ours reports whether a port is the daemon's own, and not the guest's.
func Ours(port uint16) bool { return port == wire.AgentPort || port == wire.EgressPort }

// Serve checks that a request may use a port of rec. It carries the request there and
// the answer back, for as long as bytes flow. An error that it returns is to be the
// answer, unless the answer has begun. Call CheckSignature before.
//
// Records are large, and a stack that they make grow stays large for as long as a
// WebSocket is open. So they are passed by reference from here on.
func (g *Gateway) Serve(w http.ResponseWriter, r *http.Request, v *Visit, rec *record.Record, port uint16, t *Target) error {
	if err := g.authorise(w, r, v, rec, port, t); err != nil {
		return err
	}
	ctx, leave := v.during(r.Context(), port)
	defer leave()
	r = r.WithContext(ctx)
	if rec.State == record.Ended && port == wire.AgentPort && g.cfg.Ended != nil {
		if done, err := g.cfg.Ended(w, r, rec, t.Rest); done || err != nil {
			return err
		}
	}
	if isPing(r, port, t) {
		if rec.Asleep() { // what the agent would answer: the next request wakes it
			w.Header().Set("Content-Length", "0")
			w.WriteHeader(http.StatusOK)
			return nil
		}
		if err := g.Reachable(r.Context(), rec, port); err != nil {
			return err
		}
	} else {
		leave, err := g.Enter(r.Context(), rec, port)
		if err != nil {
			return err
		}
		defer leave()
	}
	v.Runs = r.Method == http.MethodPost && port == wire.AgentPort && runs(strings.TrimSuffix(t.Rest, "/"))
	v.Runtime, v.Image = rec.Spec.Runtime, rec.Spec.Image.Ref()
	if !strings.EqualFold(strings.TrimSpace(r.Header.Get(wire.HeaderAccessRenew)), "skip") {
		g.cfg.Accessed(r, rec)
	}
	return g.forward(w, r, v, rec, port, t)
}
