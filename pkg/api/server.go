// Package api serves the HTTP API of sandboxd: OpenSandbox's lifecycle routes,
// the proxy into sandboxes, and our own extensions (api/openapi.yaml), all at
// "/" and at "/v1".
//
//	connection ─▶ listener (who may connect) ─▶ request id, log line, CORS
//	   ─▶ route, on the raw path ─┬▶ proxy: its own tokens, no API key needed
//	                              └▶ API key ─▶ handler ─▶ Sandboxes, Images, …
//
// What surprises: paths are split here, by hand and undecoded. net/http's mux
// cleans paths and redirects, and a route that is exempt from the key must
// never depend on a string that something cleans later.
package api

import (
	"context"
	"crypto/rand"
	"log"
	"log/slog"
	"net/http"
	"net/netip"
	"time"

	"github.com/sandboxd/sandboxd/internal/history"
	"github.com/sandboxd/sandboxd/internal/journal"
	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/gateway"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Config is what the host's owner decides. The zero value of a limit means
// the default named beside it.
type Config struct {
	// APIKeys open the API over TCP; any one will do. Without one every TCP
	// request is refused; with Insecure only what web pages of others send is.
	APIKeys  []string
	Insecure bool
	// Keys keeps others, each with a role of its own; may be nil.
	Keys auth.Store
	// Volumes keeps named volumes; may be nil: then there are none.
	Volumes Volumes
	// RequestsPerSecond is what one client may send by TCP; 0: no bound.
	RequestsPerSecond int

	// Secret signs endpoint tokens. Empty: a random one, and tokens end with
	// the process.
	Secret []byte

	// TrustedProxies are peers whose X-Forwarded-* is believed and passed on; that of a
	// Unix socket always is.
	TrustedProxies []netip.Prefix

	// Gateway has the names of the listeners that serve ports and nothing else.
	Gateway gateway.Names
	// ListenAddress is where the API is served by TCP, for endpoints that are
	// asked for by the Unix socket; may be empty.
	ListenAddress string

	// ExternalHost replaces the request's Host in endpoints, if set. It may carry a path.
	ExternalHost string

	// Offer is what a sandbox gets, and may get at most.
	spec.Offer

	// Host says what a sandbox is called on the host, for inspect; may be nil.
	Host func(record.Record) map[string]string
	// Notes says where a limit of a sandbox holds less than its name says; may be nil.
	Notes func(record.Record) []string
	// Health is how a sandbox is by its probe; nil: it has none. AwaitReady
	// blocks while one that runs may become ready. Both may be missing.
	Health     func(record.Record) *wire.Health
	AwaitReady func(context.Context, record.Record) error

	// Impaired says in words that anybody may read what the daemon serves in spite
	// of, for /health; nil or "": nothing.
	Impaired func() string
	// System answers /system; may be nil.
	System System

	Version wire.Version
	OpenAPI []byte        // answers /openapi.json (api.JSON)
	Docs    []byte        // answers /docs (api.Docs)
	Log     *slog.Logger  // default: slog.Default()
	History *history.Book // what happened to sandboxes, for diagnostics; may be nil
	// OnAnswer, if not nil, hears of every request that is over. It must not wait.
	OnAnswer func(Answer)
}

func (c *Config) defaults() {
	c.Complete()
	c.NoVolumes = c.Volumes == nil
	if c.Secret == nil {
		c.Secret = make([]byte, 32)
		rand.Read(c.Secret) //nolint:errcheck // never fails since Go 1.24
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
}

// Server answers requests. Make one with New; its fields do not change after.
type Server struct {
	cfg       Config
	guard     *auth.Guard
	gateway   *gateway.Gateway
	renewals  *renewals
	sandboxes Sandboxes
	images    Images
	agents    gateway.Agents
	stats     Stats
	snapshots Snapshots
	diffs     Diffs
	quiet     *log.Logger // what the proxy says besides its errors
	routes    router

	waitLimit time.Duration // the constant, but in tests
}

// New makes a Server. It fails if the keys of the store cannot be read.
func New(cfg Config, sb Sandboxes, sn Snapshots, df Diffs, im Images, ag gateway.Agents, st Stats) (*Server, error) {
	cfg.defaults()
	s := &Server{cfg: cfg, sandboxes: sb, snapshots: sn, diffs: df, images: im, agents: ag, stats: st, waitLimit: waitLimit}
	var err error
	s.guard, err = auth.New(auth.Config{
		Keys: cfg.APIKeys, Insecure: cfg.Insecure, Store: cfg.Keys, ExternalHost: cfg.ExternalHost, RequestsPerSecond: cfg.RequestsPerSecond,
	})
	if err != nil {
		return nil, err
	}
	s.cfg.APIKeys = nil
	s.quiet = slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug)
	s.renewals = &renewals{sandboxes: sb, most: cfg.MaxTimeout, log: cfg.Log, at: map[string]time.Time{}}
	s.gateway = gateway.New(gateway.Config{
		Names: cfg.Gateway, Secret: cfg.Secret, TrustedProxies: cfg.TrustedProxies,
		Sandboxes: sb, Agents: ag, Guard: s.guard,
		Kills: func(id string) (int64, error) { return st.OOMKills(id) },
		State: spec.StateOf, Accessed: s.renewals.accessed, Log: s.quiet,
	})
	s.routes = newRouter(s.table())
	return s, nil
}

// Close drops idle connections into sandboxes.
func (s *Server) Close() { s.gateway.Close() }

// HTTPServer returns a server for one listener; call Serve on it.
func (s *Server) HTTPServer(l auth.Listener) *http.Server { return l.Server(s, s.quiet) }

// handler serves one route. An error that it returns becomes the answer.
type handler func(w http.ResponseWriter, r *http.Request) error

// ServeHTTP routes one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	in := &info{start: time.Now(), requestID: requestID(r)}
	in.actor, in.role = s.guard.WhoIs(r)
	ctx := journal.With(r.Context(), slog.String("request", in.requestID), slog.String("actor", in.actor))
	r = r.WithContext(context.WithValue(ctx, infoKey{}, in))
	tw := &tracked{ResponseWriter: w, in: in, rc: http.NewResponseController(w), peer: auth.PeerOf(r)}
	tw.rc.SetWriteDeadline(time.Time{}) //nolint:errcheck // a recorder in a test has none
	tw.Header().Set(wire.HeaderRequestID, in.requestID)
	defer s.finish(tw, r, in)
	f, err := s.find(r)
	in.route = f.name
	if in.role != "" && !tw.peer.Unix {
		if err := s.guard.Allow(r); err != nil {
			s.cors(tw, r)
			s.fail(tw, r, err)
			return
		}
	}
	if err != nil {
		s.fail(tw, r, err)
		return
	}
	if f.need == tokens {
		if err := s.port(tw, r, f.target); err != nil {
			s.fail(tw, r, err)
		}
		return
	}
	s.cors(tw, r)
	if r.Method == http.MethodOptions {
		writeEmpty(tw, http.StatusNoContent)
		return
	}
	switch {
	case f.need == anyone:
	case in.role == "":
		s.fail(tw, r, s.guard.Unauthorized(r))
		return
	case !in.role.Covers(f.need):
		s.fail(tw, r, auth.Forbidden(in.role, f.need))
		return
	}
	if err := f.handle(tw, r); err != nil {
		s.fail(tw, r, err)
	}
}

// find finds what a request is for, on the kind of listener that it came by.
func (s *Server) find(r *http.Request) (found, error) {
	switch {
	case r.Method == http.MethodConnect:
		return found{name: nameNone}, httperr.New(http.StatusMethodNotAllowed, "GENERAL::METHOD_NOT_ALLOWED", errs.Invalid,
			"CONNECT is not served: this is no proxy to other hosts; ports of sandboxes are reached by GET /v1/sandboxes/{id}/endpoints/{port}")
	case !auth.PeerOf(r).Gateway, r.URL.Path == "/health" && s.cfg.Gateway.Itself(r):
		return s.routes.find(r), nil
	}
	target, err := s.cfg.Gateway.Find(r)
	return found{name: nameGateway, need: tokens, target: target}, err
}
