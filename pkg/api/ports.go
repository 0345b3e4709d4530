package api

import (
	"cmp"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/gateway"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// port serves ANY /sandboxes/{id}/proxy/{port}/… and every request to the gateway's
// listener. It asks for no API key: each port has a token of its own, which
// Endpoint.headers carries. A client that sends the API key, or comes by the Unix
// socket, needs none of them.
func (s *Server) port(w *tracked, r *http.Request, t gateway.Target) error {
	port, err := spec.ParsePort(t.Port)
	if err != nil {
		return err
	}
	if gateway.Ours(port) {
		s.cors(w, r) // an app inside decides on CORS for itself
		if r.Method == http.MethodOptions {
			writeEmpty(w, http.StatusNoContent)
			return nil
		}
	}
	rec, err := s.recordOf(r, t.ID)
	if err != nil {
		return err
	}
	if err := s.gateway.CheckSignature(&t, rec, port); err != nil {
		return err
	}
	if port == wire.EgressPort {
		if (route{method: r.Method}).changes() {
			if err := s.hold(w, r); err != nil {
				return err
			}
		}
		s.policies.port(w, r, rec, t.Rest)
		return nil
	}
	in, p := infoOf(r), auth.PeerOf(r)
	in.visit = gateway.Visit{
		Role: in.role, Peer: p.Actor, Unix: p.Unix, Conn: p.Conn(), Keyless: s.guard.Keyless() && !p.Unix && !p.Gateway,
	}
	return s.gateway.Serve(w, r, &in.visit, rec, port, &t)
}

// recordOf looks up a sandbox for port. A record is large, and a stack stays as large as
// it ever was for as long as a WebSocket is open: hence a pointer, and no inlining.
//
//go:noinline
func (s *Server) recordOf(r *http.Request, id string) (*record.Record, error) {
	rec, err := lookup(r, s.sandboxes.sandboxes, id)
	return &rec, err
}

// endpoint says where a port of a sandbox is reached: by the gateway's listener if
// there is one, or by the API's own route. It answers for any port, and also before the
// sandbox runs, because SDKs resolve 44772 and 18080 at once. Of one that has failed it
// says why: SDKs would try its agent for half a minute.
func (s *Server) endpoint(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	port, err := spec.ParsePort(r.PathValue("port"))
	if err != nil {
		return err
	}
	if rec.Failed() {
		return gateway.Ended(&rec)
	}
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return httperr.Invalid("the query string cannot be parsed; percent-encode its values")
	}
	byAPI := false
	if v := q.Get("use_server_proxy"); v != "" {
		if byAPI, err = spec.ParseBool(v); err != nil {
			return httperr.Invalid("use_server_proxy %q: want true or false", httperr.Clip(v, 20))
		}
	}
	at := s.ownHost(r) + mount(r)
	if !q.Has("expires") {
		writeJSON(w, http.StatusOK, s.gateway.Endpoint(&rec, port, at, byAPI))
		return nil
	}
	if byAPI {
		return httperr.Invalid("expires and use_server_proxy=true are both given; leave one out")
	}
	until, err := gateway.ParseExpires(q.Get("expires"), &rec)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, s.gateway.SignedEndpoint(&rec, port, until, at))
	return nil
}

// ownHost is the host, and perhaps a path, under which clients reach the API.
func (s *Server) ownHost(r *http.Request) string {
	host := cmp.Or(s.cfg.ExternalHost, r.Host)
	if auth.PeerOf(r).Unix && s.cfg.ExternalHost == "" { // no client elsewhere could use the name that this one sent
		host = cmp.Or(s.cfg.ListenAddress, host)
	}
	return strings.TrimSuffix(host, "/")
}

// renewEvery bounds how often access renews a sandbox, as OpenSandbox does.
const renewEvery = time.Minute

// renewals moves the expiry of a sandbox that was made with ExtRenew when somebody uses
// it: at most once in renewEvery, and without delaying the request. No client asks for
// that, so unlike a renewal by a client it is bounded: by most, from now; 0: no bound.
type renewals struct {
	sandboxes Sandboxes
	most      time.Duration
	log       *slog.Logger

	mu sync.Mutex
	at map[string]time.Time // when access last renewed a sandbox
}

func (n *renewals) accessed(r *http.Request, rec *record.Record) {
	v, ok := rec.Spec.Extensions[wire.ExtRenew]
	if !ok || rec.Expires.IsZero() {
		return
	}
	extend, err := spec.ParseRenew(v)
	if n.most > 0 {
		extend = min(extend, n.most)
	}
	now := time.Now()
	until := now.Add(extend)
	if err != nil || !until.After(rec.Expires) {
		return
	}
	n.mu.Lock()
	due := now.Sub(n.at[rec.ID]) >= renewEvery
	if due {
		if len(n.at) > 4096 { // forget those of long ago
			for id, at := range n.at {
				if now.Sub(at) >= renewEvery {
					delete(n.at, id)
				}
			}
		}
		n.at[rec.ID] = now
	}
	n.mu.Unlock()
	if !due {
		return
	}
	ctx, cancel := detached(r, time.Minute)
	go func() {
		defer cancel()
		if _, err := n.sandboxes.Renew(ctx, rec.ID, until); err != nil {
			n.log.Warn("cannot renew a sandbox on access", "sandbox", rec.ID, "err", err)
		}
	}()
}
