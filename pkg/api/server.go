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
	"strconv"
	"strings"
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
	h, rt, err := s.find(r)
	in.route = rt.name
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
	if rt.proxy {
		if err := s.port(tw, r, rt.target); err != nil {
			s.fail(tw, r, err)
		}
		return
	}
	s.cors(tw, r)
	if r.Method == http.MethodOptions {
		writeEmpty(tw, http.StatusNoContent)
		return
	}
	if !rt.open && in.role == "" {
		s.fail(tw, r, s.guard.Unauthorized(r))
		return
	}
	if need := leastRole(r.Method, rt); !rt.open && !in.role.Covers(need) {
		s.fail(tw, r, auth.Forbidden(in.role, need))
		return
	}
	if err := h(tw, r); err != nil {
		s.fail(tw, r, err)
	}
}

// route is what the path of a request says.
type route struct {
	name string // for the log: the path with {id} for what varies
	open bool   // needs no key
	// refused: there is no such route, or none for this method
	refused bool
	proxy   bool
	v1      bool // asked through /v1

	target gateway.Target // of proxy
}

// find finds what a request is for, on the kind of listener that it came by.
func (s *Server) find(r *http.Request) (h handler, rt route, err error) {
	switch {
	case r.Method == http.MethodConnect:
		return nil, route{name: "none", refused: true}, httperr.New(http.StatusMethodNotAllowed, "GENERAL::METHOD_NOT_ALLOWED", errs.Invalid,
			"CONNECT is not served: this is no proxy to other hosts; ports of sandboxes are reached by GET /v1/sandboxes/{id}/endpoints/{port}")
	case !auth.PeerOf(r).Gateway:
		h, rt = s.route(r)
		return h, rt, nil
	case r.URL.Path == "/health" && s.cfg.Gateway.Itself(r):
		h, rt = s.route(r)
		return h, rt, nil
	}
	rt = route{name: "/{id}/{port}", proxy: true}
	rt.target, err = s.cfg.Gateway.Find(r)
	return nil, rt, err
}

// route splits the raw path and finds its handler.
func (s *Server) route(r *http.Request) (handler, route) {
	raw := r.URL.EscapedPath()
	p, v1 := raw, false
	if rest, ok := strings.CutPrefix(raw, "/v1/"); ok {
		p, v1 = "/"+rest, true
	}
	seg := strings.Split(strings.TrimPrefix(p, "/"), "/")
	if seg[0] == "sandboxes" && len(seg) >= 4 && seg[2] == "proxy" {
		rest := strings.Join(seg[4:], "/")
		if len(seg) > 4 {
			rest = "/" + rest
		}
		id, base := unescape(seg[1]), ""
		if v1 {
			base = "/v1"
		}
		base += gateway.Base(id, seg[3])
		return nil, route{name: "/sandboxes/{id}/proxy/{port}", proxy: true, v1: v1, target: gateway.Below(base, id, seg[3], rest)}
	}
	if len(seg) > 1 && seg[len(seg)-1] == "" { // one trailing slash is forgiven
		seg = seg[:len(seg)-1]
	}
	var rt route
	var methods map[string]handler
	switch {
	case seg[0] == "sandboxes":
		rt, methods = s.sandboxRoutes(seg, v1)
	case seg[0] == "images":
		rt, methods = s.imageRoutes(seg)
	case seg[0] == "system":
		rt, methods = s.systemRoutes(seg)
	case seg[0] == "snapshots":
		rt, methods = s.snapshotRoutes(seg)
	case seg[0] == "volumes":
		rt, methods = s.volumeRoutes(seg)
	case seg[0] == "keys":
		rt, methods = s.keyRoutes(seg)
	case seg[0] == "pools":
		rt, methods = never("/pools", "KUBERNETES::POOL_NOT_SUPPORTED", "a single host has no pools; SDK-side pools work without them")
	case seg[0] == "templates":
		rt, methods = never("/templates", "FSB::API_NOT_SUPPORTED", "templates are built by OpenSandbox's Kubernetes runtime, which this is not; make an image (sandboxctl image build, image import) or a snapshot of a sandbox, and create sandboxes from that")
	case len(seg) == 1:
		rt, methods = s.plainRoutes(seg[0], v1)
	case p == "/metrics/events":
		rt, methods = route{name: p}, only(http.MethodPost, func(w http.ResponseWriter, _ *http.Request) error {
			writeEmpty(w, http.StatusNoContent) // SDK telemetry; we keep none
			return nil
		})
	}
	rt.v1 = v1
	if methods == nil {
		return func(http.ResponseWriter, *http.Request) error {
			return httperr.New(http.StatusNotFound, "GENERAL::NOT_FOUND", errs.NotFound,
				"there is no route %q here; GET /openapi.json lists our own routes, the rest is OpenSandbox's lifecycle API", httperr.Clip(raw, 120))
		}, route{name: "none", refused: true}
	}
	h := methods[r.Method]
	if h == nil && r.Method == http.MethodHead {
		h = methods[http.MethodGet]
	}
	if h == nil {
		h = methods["*"]
	}
	if h == nil {
		h, rt.refused = methodNotAllowed(methods), true
	}
	return h, rt
}

func (s *Server) plainRoutes(name string, v1 bool) (route, map[string]handler) {
	rt := route{name: "/" + name}
	switch name {
	case "health":
		rt.open = true
		return rt, only(http.MethodGet, func(w http.ResponseWriter, _ *http.Request) error {
			answer := map[string]string{"status": "healthy"}
			if f := s.cfg.Impaired; f != nil {
				if text := f(); text != "" {
					answer["warning"] = text
				}
			}
			writeJSON(w, http.StatusOK, answer)
			return nil
		})
	case "openapi.json":
		rt.open = true
		return rt, only(http.MethodGet, func(w http.ResponseWriter, _ *http.Request) error {
			w.Header().Set("Content-Type", "application/json")
			w.Write(s.cfg.OpenAPI) //nolint:errcheck // a client that left needs no answer
			return nil
		})
	case "docs":
		rt.open = true
		return rt, only(http.MethodGet, s.docs)
	case "version":
		rt.open = true // as upstream; who has no key learns the release alone
		return rt, only(http.MethodGet, func(w http.ResponseWriter, r *http.Request) error {
			v := s.cfg.Version
			if infoOf(r).role == "" {
				if s.guard.Keyless() { // a page asks
					return s.guard.Unauthorized(r)
				}
				v = wire.Version{Version: v.Version}
			}
			writeJSON(w, http.StatusOK, v)
			return nil
		})
	case "events":
		return rt, only(http.MethodGet, s.events)
	case "stats":
		return rt, only(http.MethodGet, s.usageOfAll)
	case "diff":
		return rt, only(http.MethodGet, s.diff)
	}
	return route{}, nil
}

// docs serves a page that shows the API. It loads nothing and runs nothing, and
// says so: guests serve pages under this address, too.
func (s *Server) docs(w http.ResponseWriter, _ *http.Request) error {
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Length", strconv.Itoa(len(s.cfg.Docs)))
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	w.Write(s.cfg.Docs) //nolint:errcheck // a client that left needs no answer
	return nil
}

func only(method string, h handler) map[string]handler { return map[string]handler{method: h} }

// never answers every method with the same refusal: 400, which SDKs show with
// its text, and which no client takes for a server that is about to be better.
func never(name, wireCode, text string) (route, map[string]handler) {
	return route{name: name}, map[string]handler{"*": func(http.ResponseWriter, *http.Request) error {
		return errs.Wire(errs.New(errs.Unsupported, "%s", text), wireCode)
	}}
}

func methodNotAllowed(methods map[string]handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		var allow []string
		for _, m := range []string{"GET", "POST", "PUT", "PATCH", "DELETE"} {
			if methods[m] != nil {
				allow = append(allow, m)
			}
		}
		w.Header().Set("Allow", strings.Join(allow, ", "))
		return httperr.New(http.StatusMethodNotAllowed, "GENERAL::METHOD_NOT_ALLOWED", errs.Invalid,
			"%s is not allowed on %s; allowed: %s", r.Method, infoOf(r).route, strings.Join(allow, ", "))
	}
}
