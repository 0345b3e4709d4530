// Package api serves the HTTP API of sandboxd: OpenSandbox's lifecycle routes,
// the proxy into sandboxes, and our own extensions (api/openapi.yaml), all at
// "/" and at "/v1".
//
//	connection ─▶ auth.Listener ─▶ ServeHTTP: request id, log line, role, CORS
//	   ─▶ routes.go, on the raw path ─┬▶ gateway: tokens of ports, no key needed
//	                                  └▶ role ─▶ handler ─▶ Sandboxes, Images, …
//	                                               └▶ spec: request ─▶ record ─▶ wire
//
// The rooms below it do not know one another; all stand on wire and wire/httperr.
// deps.go says what the daemon puts behind the handlers.
//
// The surprise: paths are split here, by hand and undecoded. net/http's mux cleans
// paths and redirects, and a route that is exempt from the key must never depend on a
// string that something cleans later.
package api

import (
	"bytes"
	"context"
	"crypto/rand"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/sandboxd/sandboxd/internal/history"
	"github.com/sandboxd/sandboxd/internal/journal"
	"github.com/sandboxd/sandboxd/pkg/admission"
	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/gateway"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Config is what the host's owner decides, and what the daemon knows. The zero value
// of a limit means the default named beside it.
type Config struct {
	// APIKeys open the API over TCP; a client needs one of them. If there are none,
	// every TCP request is refused or, with Insecure, only those of web pages.
	APIKeys  []string
	Insecure bool
	// Keys keeps further keys, each with a role of its own; may be nil.
	Keys auth.Store
	// Volumes keeps named volumes; may be nil: then there are none.
	Volumes Volumes
	// Policies keeps named policies; may be nil: then there are none.
	Policies Policies
	// Forks makes copies of sandboxes; may be nil: then none can be made. KeepsMemory says whether
	// it can copy the memory of sandboxes on a runtime.
	Forks       Forks
	KeepsMemory func(runtime string) bool
	// Pools keeps pools of ready sandboxes; may be nil: then there are none.
	Pools Pools
	// Vaults keeps credential vaults; may be nil: then no requests can be inspected.
	Vaults Vaults
	// RequestsPerSecond is how many requests one client may send by TCP; 0: no bound.
	RequestsPerSecond int
	Now               func() time.Time // of that bound; nil: time.Now

	// Secret signs endpoint tokens. If it is nil, a random one does, and tokens end with
	// the process.
	Secret []byte

	// TrustedProxies are peers whose X-Forwarded-* is trusted and passed on; that of a
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
	// Differences says how a level of security differs from the default on a runtime; may
	// be nil.
	Differences func(runtime string, level record.Security) []string
	// Health says what the probe of a sandbox has found; nil: it has no probe.
	// AwaitReady blocks while a running sandbox may still become ready. Both functions
	// may be nil.
	Health     func(record.Record) *wire.Health
	AwaitReady func(context.Context, record.Record) error
	// Use begins a use of a sandbox; see gateway.Config. It may be nil.
	Use func(ctx context.Context, rec *record.Record) (leave func(), err error)

	// Hold blocks until a request may change what the store has, or says why it may not; nonce is its
	// header Sandboxd-Trial. nil: it may. (versions.Hold)
	Hold func(ctx context.Context, nonce string) error
	// Trying reports whether nonce is of the program that tries this version: what it creates is gone in
	// a moment, so it passes a drain of the host. May be nil. (versions.Hold)
	Trying func(nonce string) bool

	// Impaired names, for /health, a fault that does not keep the daemon from serving,
	// in words that anybody may read; nil or "": none.
	Impaired func() string
	// System answers /system; may be nil.
	System System
	// Backups answers /system/backups; may be nil: then the daemon cannot keep any.
	Backups Backups
	// Network answers /sandboxes/{id}/network; may be nil: then nothing is known.
	Network Network

	Version wire.Version
	OpenAPI []byte        // answers /openapi.json (api.JSON)
	Docs    []byte        // answers /docs (api.Docs)
	Log     *slog.Logger  // default: slog.Default()
	Left    Left          // what commands of ended sandboxes have printed; may be nil
	History *history.Book // what happened to sandboxes, for diagnostics; may be nil
	Flows   Flows
	// OnAnswer, if not nil, is called after every request. It must not wait.
	OnAnswer func(Answer)
}

func (c *Config) defaults() {
	c.Complete()
	c.NoVolumes, c.NoPolicies, c.NoInspect, c.NoForks = c.Volumes == nil, c.Policies == nil, c.Vaults == nil, c.Forks == nil
	c.NoPools = c.Pools == nil
	if c.Network == nil {
		c.Network = noNetwork{}
	}
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
	cfg     Config
	routes  router
	guard   *auth.Guard
	gateway *gateway.Gateway
	quiet   *log.Logger // what goes wrong behind answers
	streams streams
	bodies  *semaphore.Weighted // bodyBudget

	// One for each resource; table says which routes each of them serves.
	sandboxes   *sandboxHandlers
	forks       *forkHandlers
	policies    *policyHandlers
	vaults      *vaultHandlers
	network     *networkHandlers
	flows       *flowHandlers
	logs        *logHandlers
	diagnostics *diagnosticHandlers
	snapshots   *snapshotHandlers
	diffs       *diffHandlers
	images      *imageHandlers
	volumes     *volumeHandlers
	named       *namedHandlers
	pools       *poolHandlers
	stats       *statsHandlers
	events      *eventHandlers
	keys        *keyHandlers
	system      *systemHandlers
	backups     *backupHandlers
	renewals    *renewals
}

// New makes a Server. It fails if the keys of the store cannot be read.
func New(cfg Config, sb Sandboxes, sn Snapshots, df Diffs, im Images, ag gateway.Agents, st Stats) (*Server, error) {
	cfg.defaults()
	guard, err := auth.New(auth.Config{
		Keys: cfg.APIKeys, Insecure: cfg.Insecure, Store: cfg.Keys, ExternalHost: cfg.ExternalHost,
		RequestsPerSecond: cfg.RequestsPerSecond,
		Now:               cfg.Now,
	})
	if err != nil {
		return nil, err
	}
	cfg.APIKeys = nil
	s := &Server{
		cfg: cfg, guard: guard, quiet: slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug),
		bodies: semaphore.NewWeighted(bodyBudget),
	}
	s.streams.answers = map[*tracked]net.Conn{}
	s.renewals = &renewals{sandboxes: sb, most: cfg.MaxTimeout, log: cfg.Log, at: map[string]time.Time{}}
	s.gateway = gateway.New(gateway.Config{
		Names: cfg.Gateway, Secret: cfg.Secret, TrustedProxies: cfg.TrustedProxies,
		Sandboxes: sb, Agents: ag, Guard: guard,
		Kills:   func(id string) (int64, error) { return st.OOMKills(id) },
		Denials: cfg.Network.Denied,
		Denied:  func(id string, before int64) string { return cfg.Network.Denials(id).Line(before) },
		State:   spec.StateOf, Accessed: s.renewals.accessed, Use: cfg.Use, Log: s.quiet,
		Ended: func(w http.ResponseWriter, r *http.Request, rec *record.Record, path string) (bool, error) {
			return s.logs.ofEnded(w, r, rec, path)
		},
	})
	offer := &s.cfg.Offer
	s.sandboxes = &sandboxHandlers{
		sandboxes: sb, images: im, snapshots: sn, guard: guard, offer: offer, pools: cfg.Pools,
		host: cfg.Host, notes: cfg.Notes, differences: cfg.Differences, health: cfg.Health, awaitReady: cfg.AwaitReady,
		waitLimit: waitLimit, holdLimit: holdLimit,
	}
	s.forks = &forkHandlers{forks: cfg.Forks, sandboxes: sb, guard: guard, offer: offer, keepsMemory: cfg.KeepsMemory}
	s.vaults = &vaultHandlers{cfg.Vaults}
	s.policies = &policyHandlers{sandboxes: sb, offer: offer, guard: guard, gateway: s.gateway, vaults: s.vaults}
	s.network = &networkHandlers{network: cfg.Network, offer: offer, agents: ag, gateway: s.gateway}
	s.flows = &flowHandlers{cfg.Flows}
	s.logs = &logHandlers{sandboxes: sb, agents: ag, gateway: s.gateway, left: cfg.Left}
	s.diagnostics = &diagnosticHandlers{history: cfg.History, logs: s.logs, describe: s.sandboxes.describe}
	s.diffs = &diffHandlers{sandboxes: sb, snapshots: sn, diffs: df}
	s.images = &imageHandlers{images: im}
	s.snapshots = &snapshotHandlers{snapshots: sn, diffs: df, images: s.images}
	s.volumes = &volumeHandlers{volumes: cfg.Volumes, offer: offer, log: cfg.Log}
	s.named = &namedHandlers{policies: cfg.Policies, offer: offer}
	s.pools = &poolHandlers{pools: cfg.Pools, offer: offer}
	s.stats = &statsHandlers{sandboxes: sb, stats: st, log: cfg.Log}
	s.events = &eventHandlers{sandboxes: sb}
	s.keys = &keyHandlers{guard: guard}
	s.system = &systemHandlers{
		known: cfg.System, impaired: cfg.Impaired, release: cfg.Version, document: cfg.OpenAPI, page: cfg.Docs, guard: guard,
		pruner: pruner{sb, sn, im},
	}
	s.backups = &backupHandlers{cfg.Backups}
	s.routes = newRouter(s.table())
	return s, nil
}

// Close drops idle connections into sandboxes.
func (s *Server) Close() {
	s.gateway.Close()
	s.guard.Close()
}

// HTTPServer returns a server for one listener; call Serve on it.
func (s *Server) HTTPServer(l auth.Listener) *auth.Server { return l.Server(s, s.quiet) }

// handler serves one route. An error that it returns becomes the answer.
type handler func(w http.ResponseWriter, r *http.Request) error

// ServeHTTP routes one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	in := &info{start: time.Now(), requestID: requestID(r), bodies: s.bodies}
	var life context.Context
	in.actor, in.role, life = s.guard.WhoIs(r)
	ctx := journal.With(r.Context(), slog.String("request", in.requestID), slog.String("actor", in.actor))
	ctx, leave := httperr.During(context.WithValue(ctx, infoKey{}, in), life)
	defer leave()
	r = r.WithContext(ctx)
	tw := &tracked{ResponseWriter: w, in: in, rc: http.NewResponseController(w), peer: auth.PeerOf(r), streams: &s.streams}
	in.follows = strings.Contains(r.URL.RawQuery, "follow=true")
	tw.rc.SetWriteDeadline(time.Time{}) //nolint:errcheck // a recorder in a test has none
	tw.Header().Set(wire.HeaderRequestID, in.requestID)
	defer s.finish(tw, r, in)
	defer tw.during(ctx, life)()
	if err := tw.peer.Clear(); err != nil {
		in.route = nameNone
		tw.Header().Set("Connection", "close")
		tw.rc.SetReadDeadline(time.Now()) //nolint:errcheck // what follows is not a body
		fail(tw, r, err)
		return
	}
	if r.ContentLength != 0 {
		// Also for a request that is refused: the server reads some of its body before it
		// goes on. Who takes a body that may last moves the deadline.
		tw.rc.SetReadDeadline(in.start.Add(bodyTime)) //nolint:errcheck // a recorder in a test has none
	}
	f, err := s.find(r)
	in.route = f.name
	if in.role != "" && !tw.peer.Unix {
		if err := s.guard.Allow(r); err != nil {
			s.cors(tw, r)
			fail(tw, r, err)
			return
		}
	}
	if err != nil {
		fail(tw, r, err)
		return
	}
	if f.need == tokens { // ReverseProxy hangs on the context of the request
		if err := s.port(tw, r, f.target); err != nil {
			fail(tw, r, err)
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
		fail(tw, r, s.guard.Unauthorized(r))
		return
	case !in.role.Covers(f.need):
		fail(tw, r, auth.Forbidden(in.role, f.need))
		return
	}
	r.Body = &admitted{r.Body, ctx}
	if f.changes {
		err = s.hold(tw, r)
	}
	if err == nil {
		err = f.handle(tw, r)
	}
	if err != nil {
		fail(tw, r, err)
	}
	if tw.goesOn && httperr.Revoked(ctx) != nil {
		panic(http.ErrAbortHandler) // what was cut short must not look complete
	}
}

// admitted is a body that is read for as long as its request is admitted.
type admitted struct {
	io.ReadCloser
	ctx context.Context
}

func (a *admitted) Read(p []byte) (int, error) {
	if why := httperr.Revoked(a.ctx); why != nil {
		return 0, why
	}
	return a.ReadCloser.Read(p)
}

// maxHeld bounds, in bytes, the body that is read before a request waits.
const maxHeld = 64 << 10

// hold waits until r may change what the store has. Its body may take as long then as if it came now.
func (s *Server) hold(tw *tracked, r *http.Request) error {
	if s.cfg.Hold == nil {
		return nil
	}
	start := time.Now()
	if r.ContentLength > 0 && r.ContentLength <= maxHeld { // net/http notices that a client has left only when it has read all
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return errs.Wrap(err, errs.Invalid, "the request body could not be read completely; send it again")
		}
		r.Body = io.NopCloser(bytes.NewReader(b))
	}
	nonce := r.Header.Get(wire.HeaderTrial)
	if nonce != "" && s.cfg.Trying != nil && s.cfg.Trying(nonce) {
		*r = *r.WithContext(admission.Trial(r.Context()))
	}
	err := s.cfg.Hold(r.Context(), nonce)
	if err == nil && r.ContentLength != 0 && time.Since(start) > time.Second {
		tw.rc.SetReadDeadline(time.Now().Add(bodyTime)) //nolint:errcheck // a recorder in a test has none
	}
	return err
}

// find finds what a request is for: on the gateway's listener a port and nothing else,
// except its own /health.
func (s *Server) find(r *http.Request) (found, error) {
	switch {
	case r.Method == http.MethodConnect:
		return found{name: nameNone}, httperr.New(http.StatusMethodNotAllowed, "GENERAL::METHOD_NOT_ALLOWED", errs.Invalid,
			"CONNECT is not supported: sandboxd does not proxy to other hosts; for a port of a sandbox, use GET "+
				"/v1/sandboxes/{id}/endpoints/{port}")
	case !auth.PeerOf(r).Gateway, r.URL.Path == "/health" && s.cfg.Gateway.Itself(r):
		return s.routes.find(r), nil
	}
	target, err := s.cfg.Gateway.Find(r)
	return found{name: nameGateway, need: tokens, target: target}, err
}
