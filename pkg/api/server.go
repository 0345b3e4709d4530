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
	"crypto/sha256"
	"log"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
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

	// Secret signs endpoint tokens. Empty: a random one, and tokens end with
	// the process.
	Secret []byte

	// ExternalHost replaces the request's Host in endpoints, if set. It may carry a path.
	ExternalHost string

	// What a request that does not say gets.
	Runtime     string             // runsc
	Network     record.NetworkMode // rules
	MemoryBytes int64              // 512 Mi
	CPUMillis   int64              // 1000
	Pids        int64              // 256
	DiskBytes   int64              // 10 Gi; see NoDisk

	// What a request may ask for at most, each for itself: the disks of all
	// sandboxes together may be larger than the pool, as memory may.
	MaxMemoryBytes int64         // 1 Ti
	MaxCPUMillis   int64         // 1024 cores
	MaxDiskBytes   int64         // 64 Ti; the daemon gives the size of its pool
	MaxTimeout     time.Duration // no limit; else also what one gets that asks for none, and how far ahead a renewal may reach

	Runtimes []string // that exist on this host; default runsc and runc
	NoDisk   bool     // the storage pool can not limit: asking for a disk size is an error

	// ParseRule parses CIDR[:port[/proto]] of sandboxd.allow. (egress.ParseRule)
	// ParsePolicy parses a networkPolicy as it was sent. (egress.FromPolicy)
	// Without them there is one parser less, and rules are refused.
	ParseRule   func(string) (record.Rule, error)
	ParsePolicy func([]byte) (record.Network, error)
	// Host says what a sandbox is called on the host, for inspect; may be nil.
	Host func(record.Record) map[string]string

	Version wire.Version
	OpenAPI []byte       // answers /openapi.json (api.JSON)
	Log     *slog.Logger // default: slog.Default()
}

func (c *Config) defaults() {
	orInt := func(p *int64, v int64) {
		if *p == 0 {
			*p = v
		}
	}
	orInt(&c.MemoryBytes, 512<<20)
	orInt(&c.CPUMillis, 1000)
	orInt(&c.Pids, 256)
	orInt(&c.DiskBytes, 10<<30)
	orInt(&c.MaxMemoryBytes, 1<<40)
	orInt(&c.MaxCPUMillis, 1024*1000)
	orInt(&c.MaxDiskBytes, 64<<40)
	c.DiskBytes = min(c.DiskBytes, c.MaxDiskBytes) // the default may be of a larger host
	if c.Runtime == "" {
		c.Runtime = "runsc"
	}
	if c.Network == "" {
		c.Network = record.NetworkRules
	}
	if c.Runtimes == nil {
		c.Runtimes = []string{"runsc", "runc"}
	}
	if c.Secret == nil {
		c.Secret = make([]byte, 32)
		rand.Read(c.Secret) //nolint:errcheck // never fails since Go 1.24
	}
	if c.ParseRule == nil {
		c.ParseRule = func(string) (record.Rule, error) { return record.Rule{}, errNoRules }
	}
	if c.ParsePolicy == nil {
		c.ParsePolicy = func([]byte) (record.Network, error) { return record.Network{}, errNoRules }
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
}

var errNoRules = errs.New(errs.Unsupported, "this daemon was built without network rules; leave them out")

// Server answers requests. Make one with New; its fields do not change after.
type Server struct {
	cfg       Config
	keys      [][sha256.Size]byte
	sandboxes Sandboxes
	images    Images
	agents    Agents
	stats     Stats
	ports     *http.Transport // to ports other than the agent's
	quiet     *log.Logger     // what the proxy says besides its errors

	renewMu sync.Mutex
	renewed map[string]time.Time // when access last renewed a sandbox
}

// New makes a Server.
func New(cfg Config, sb Sandboxes, im Images, ag Agents, st Stats) *Server {
	cfg.defaults()
	s := &Server{cfg: cfg, sandboxes: sb, images: im, agents: ag, stats: st, renewed: map[string]time.Time{}}
	for _, k := range cfg.APIKeys {
		s.keys = append(s.keys, sha256.Sum256([]byte(k)))
	}
	s.cfg.APIKeys = nil
	s.ports = s.portTransport()
	s.quiet = slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug)
	return s
}

// Close drops idle connections into sandboxes.
func (s *Server) Close() { s.ports.CloseIdleConnections() }

// handler serves one route. An error that it returns becomes the answer.
type handler func(w http.ResponseWriter, r *http.Request) error

// ServeHTTP routes one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	in := &info{start: time.Now(), requestID: requestID(r)}
	r = r.WithContext(context.WithValue(r.Context(), infoKey{}, in))
	tw := &tracked{ResponseWriter: w, in: in, rc: http.NewResponseController(w), peer: peerOf(r)}
	tw.rc.SetWriteDeadline(time.Time{}) //nolint:errcheck // a recorder in a test has none
	tw.Header().Set(wire.HeaderRequestID, in.requestID)
	in.actor, in.trusted = s.whoIs(r)
	defer s.finish(tw, r, in)
	h, rt := s.route(r)
	in.route = rt.name
	if rt.proxy {
		s.proxy(tw, r, rt)
		return
	}
	s.cors(tw, r)
	if r.Method == http.MethodOptions {
		writeEmpty(tw, http.StatusNoContent)
		return
	}
	if !rt.open && !in.trusted {
		s.fail(tw, r, s.unauthorized(r))
		return
	}
	if err := h(tw, r); err != nil {
		s.fail(tw, r, err)
	}
}

// route is what the path of a request says.
type route struct {
	name  string // for the log: the path with {id} for what varies
	open  bool   // needs no key
	proxy bool
	v1    bool // asked through /v1

	id   string // of proxy
	port string
	rest string // undecoded, after the port; empty or begins with "/"
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
		return nil, route{name: "/sandboxes/{id}/proxy/{port}", proxy: true, v1: v1, id: unescape(seg[1]), port: seg[3], rest: rest}
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
	case seg[0] == "snapshots":
		rt, methods = notYet("/snapshots", http.StatusNotImplemented, "SNAPSHOT::NOT_IMPLEMENTED", "snapshots come with a later release")
	case seg[0] == "pools":
		rt, methods = notYet("/pools", http.StatusNotImplemented, "KUBERNETES::POOL_NOT_SUPPORTED", "a single host has no pools; SDK-side pools work without them")
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
			return withStatus(http.StatusNotFound, "GENERAL::NOT_FOUND", errs.NotFound,
				"there is no route %q here; GET /openapi.json lists our own routes, the rest is OpenSandbox's lifecycle API", clip(raw, 120))
		}, route{name: "none"}
	}
	h := methods[r.Method]
	if h == nil && r.Method == http.MethodHead {
		h = methods[http.MethodGet]
	}
	if h == nil {
		h = methods["*"]
	}
	if h == nil {
		h = methodNotAllowed(methods)
	}
	return h, rt
}

func (s *Server) plainRoutes(name string, v1 bool) (route, map[string]handler) {
	rt := route{name: "/" + name}
	switch name {
	case "health":
		rt.open = true
		return rt, only(http.MethodGet, func(w http.ResponseWriter, _ *http.Request) error {
			writeJSON(w, http.StatusOK, map[string]string{"status": "healthy"})
			return nil
		})
	case "openapi.json":
		rt.open = true
		return rt, only(http.MethodGet, func(w http.ResponseWriter, _ *http.Request) error {
			w.Header().Set("Content-Type", "application/json")
			w.Write(s.cfg.OpenAPI) //nolint:errcheck // a client that left needs no answer
			return nil
		})
	case "version":
		return rt, only(http.MethodGet, func(w http.ResponseWriter, _ *http.Request) error {
			writeJSON(w, http.StatusOK, s.cfg.Version)
			return nil
		})
	case "events":
		return rt, only(http.MethodGet, s.events)
	}
	return route{}, nil
}

func only(method string, h handler) map[string]handler { return map[string]handler{method: h} }

// notYet answers every method with the same refusal.
func notYet(name string, status int, wireCode, text string) (route, map[string]handler) {
	return route{name: name}, map[string]handler{"*": func(http.ResponseWriter, *http.Request) error {
		return withStatus(status, wireCode, errs.Unsupported, "%s", text)
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
		return withStatus(http.StatusMethodNotAllowed, "GENERAL::METHOD_NOT_ALLOWED", errs.Invalid,
			"%s is not allowed on %s; allowed: %s", r.Method, infoOf(r).route, strings.Join(allow, ", "))
	}
}
