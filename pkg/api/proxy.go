package api

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

const (
	// holdPending is how long a request to the agent waits for a sandbox that
	// is still being made: SDKs poll every 200 ms, and so their first poll
	// succeeds (architecture.md, decision 6).
	holdPending = 5 * time.Second
	// renewEvery bounds how often access renews a sandbox, as OpenSandbox does.
	renewEvery = time.Minute

	tokenQuery  = "sandboxd_token"
	tokenCookie = "sandboxd_token_" // and the port
)

// proxy serves ANY /sandboxes/{id}/proxy/{port}/…. It takes no API key: each
// port has a token of its own, which Endpoint.headers carries. A caller who
// does send the API key, or comes by the Unix socket, needs none of them.
func (s *Server) proxy(w *tracked, r *http.Request, rt route) {
	port, err := spec.ParsePort(rt.port)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	ours := port == wire.AgentPort || port == wire.EgressPort
	if ours {
		s.cors(w, r) // an app inside decides on CORS for itself
		if r.Method == http.MethodOptions {
			writeEmpty(w, http.StatusNoContent)
			return
		}
	}
	rec, err := s.lookup(r, rt.id)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	if err := s.checkSignature(&rt, rec, port); err != nil {
		s.fail(w, r, err)
		return
	}
	if port == wire.EgressPort {
		s.policy(w, r, rec, rt.rest)
		return
	}
	if err := s.authorise(w, r, rec, port, rt); err != nil {
		s.fail(w, r, err)
		return
	}
	if rec, err = s.reachable(r.Context(), rec, port); err != nil {
		s.fail(w, r, err)
		return
	}
	infoOf(r).notesExec(r, &rec, port, rt.rest)
	if !strings.EqualFold(strings.TrimSpace(r.Header.Get(wire.HeaderAccessRenew)), "skip") {
		s.renewOnAccess(r, rec)
	}
	s.forward(w, r, rec, port, rt)
}

// authorise checks the token of one port of one sandbox.
func (s *Server) authorise(w http.ResponseWriter, r *http.Request, rec record.Record, port uint16, rt route) error {
	in := infoOf(r)
	if in.role.Covers(record.Operator) {
		return nil
	}
	if port == wire.AgentPort {
		if s.keyless() { // a page that got the token got it where none should have been given
			if err := s.fromPage(r); err != nil {
				return err
			}
		}
		given := r.Header.Get(wire.HeaderAgentToken)
		switch {
		case rec.Token != "" && equal(given, rec.Token):
			in.actor = "token " + peerOf(r).actor
			return nil
		case s.keys.role(given).Covers(record.Operator): // Go's SDK sends the API key where an endpoint gave it no header
			in.actor = "key " + peerOf(r).actor
			return nil
		}
		if s.keyless() && !peerOf(r).gateway {
			return s.unauthorized(r)
		}
		if in.role != "" {
			return forbidden(in.role, record.Operator)
		}
		return httperr.New(http.StatusUnauthorized, "UNAUTHORIZED", errs.Denied,
			"port %d of a sandbox needs its token: send the headers that GET /v1/sandboxes/{id}/endpoints/%d returns, or the API key", port, port)
	}
	if rt.signed {
		in.actor = "signed " + peerOf(r).actor
		return nil
	}
	want := s.endpointToken(rec.ID, port)
	given, right := tokenGiven(r, want)
	switch {
	case right:
		return nil
	case !rec.Spec.SecureAccess && s.public(r):
		return nil // a guest's page asks its own port for more
	case given:
		return httperr.New(http.StatusUnauthorized, "UNAUTHORIZED", errs.Denied,
			"the endpoint token is not that of port %d of this sandbox: send the headers that GET /v1/sandboxes/{id}/endpoints/%d returns, as they are", port, port)
	}
	name := tokenCookie + strconv.Itoa(int(port))
	for _, c := range r.Cookies() { // a guest at a neighbouring name may have set others
		if c.Name == name && equal(c.Value, want) && s.ownPage(r) {
			return nil
		}
	}
	if given, _ := cutQuery(r.URL.RawQuery, tokenQuery); equal(given, want) {
		http.SetCookie(w, &http.Cookie{ // so that what the page loads next is let in
			Name: name, Value: want, HttpOnly: true, Secure: r.TLS != nil, SameSite: http.SameSiteStrictMode,
			Path: rt.cookiePath(),
		})
		return nil
	}
	return httperr.New(http.StatusUnauthorized, "UNAUTHORIZED", errs.Denied,
		"port %d of this sandbox needs an endpoint token: send the headers that GET /v1/sandboxes/{id}/endpoints/%d returns, or add ?%s=…", port, port, tokenQuery)
}

// ownPage reports whether a request with a cookie is not one that another guest's
// page made a browser send: names below one domain are one site to it, so SameSite
// does not keep their pages apart. Links may lead from one to the other.
func (s *Server) ownPage(r *http.Request) bool {
	switch site := r.Header.Get("Sec-Fetch-Site"); {
	case site == "same-origin", site == "none":
		return true
	case site != "":
		return r.Header.Get("Sec-Fetch-Mode") == "navigate" && (r.Method == http.MethodGet || r.Method == http.MethodHead)
	}
	origin := r.Header.Get("Origin")
	if origin == "" {
		return true
	}
	host := r.Host
	if s.trustedProxy(r) {
		host = cmp.Or(r.Header.Get("X-Forwarded-Host"), host)
	}
	u, err := url.Parse(origin)
	return err == nil && strings.EqualFold(u.Host, host)
}

// public reports whether ports of guests are open to whoever sends r.
func (s *Server) public(r *http.Request) bool {
	p := peerOf(r)
	return p.public || !p.gateway && s.keyless() && s.foreign(r) == nil
}

// reachable waits, for the agent's port, until a sandbox being made runs, and
// refuses one that does not run.
func (s *Server) reachable(ctx context.Context, rec record.Record, port uint16) (record.Record, error) {
	if rec.State.Beginning() && port == wire.AgentPort {
		hold, cancel := context.WithTimeout(ctx, holdPending)
		defer cancel()
		now, err := s.sandboxes.Await(hold, rec.ID)
		switch {
		case err == nil:
			rec = now
		case ctx.Err() != nil:
			return rec, ctx.Err()
		case hold.Err() == nil:
			return rec, fmt.Errorf("wait for sandbox %s: %w", rec.ID, err)
		}
	}
	switch rec.State {
	case record.Running:
		return rec, nil
	case record.Creating, record.Starting:
		return rec, errs.New(errs.Unavailable, "sandbox %s is still being made; ask again in a moment", rec.ID)
	case record.Deleting:
		return rec, httperr.NoSandbox(rec.ID)
	case record.Ended:
		return rec, errs.New(errs.WrongState, "sandbox %s has ended (%s) and answers no more: %s", rec.ID, rec.Reason, cmp.Or(rec.Message, "create another"))
	case record.Pausing, record.Paused:
		return rec, errs.New(errs.WrongState, "sandbox %s is %s and answers nothing; resume it first", rec.ID, spec.StateOf(&rec))
	}
	return rec, errs.New(errs.Unavailable, "sandbox %s is %s; ask again in a moment", rec.ID, spec.StateOf(&rec))
}

// ofOrigin is what an answer says of all that is served at its address, which
// is not one guest's to say.
var ofOrigin = []string{"Service-Worker-Allowed", "Clear-Site-Data", "Strict-Transport-Security", "Alt-Svc", "Nel", "Report-To"}

// forward copies request and answer as they come, for as long as bytes flow.
func (s *Server) forward(w http.ResponseWriter, r *http.Request, rec record.Record, port uint16, rt route) {
	rest, host := rt.rest, "localhost:"+strconv.Itoa(int(port)) // what a server checks that minds its name
	transport := s.agents.Transport(rec)
	if port != wire.AgentPort {
		transport = &portTripper{direct: s.ports, agent: transport, port: port}
	}
	small, err := smallBody(r, port)
	if err != nil {
		s.fail(w, r, httperr.Invalid("the body broke off: %s", err))
		return
	}
	path, err := url.PathUnescape(rest)
	if err != nil {
		s.fail(w, r, httperr.Invalid("the path behind the port does not decode"))
		return
	}
	var explain func(*http.Response)
	kills := int64(unknownKills)
	if port == wire.AgentPort {
		kills = s.kills(r.Method, path, rec)
		explain = s.explainKills(r.Method, path, rec, kills)
	}
	p := &httputil.ReverseProxy{
		Transport:     transport,
		FlushInterval: -1, // a millisecond's patience measured nothing: docs/benchmarks.md
		ErrorLog:      s.quiet,
		BufferPool:    relay.Buffers{},
		Rewrite: func(pr *httputil.ProxyRequest) {
			out := pr.Out
			out.URL.Scheme = "http"
			out.URL.Host = net.JoinHostPort(poolKey(&rec), strconv.Itoa(int(port)))
			out.URL.Path, out.URL.RawPath = cmp.Or(path, "/"), cmp.Or(rest, "/")
			_, out.URL.RawQuery = cutQuery(pr.In.URL.RawQuery, tokenQuery)
			out.Host = host
			s.cleanHeaders(pr, port)
			rt.hideFromGuest(out.Header)
			tellKills(out.Header, kills)
			if small != nil {
				pr.Out.Body = io.NopCloser(bytes.NewReader(small))
			}
		},
		ModifyResponse: func(resp *http.Response) error {
			if err := upgraded(resp); err != nil {
				return err
			}
			resp.Header.Del(wire.HeaderRequestID) // ours stands already
			for _, k := range ofOrigin {
				resp.Header.Del(k)
			}
			infoOf(r).guests = true
			if port == wire.AgentPort {
				tellKills(resp.Header, kills) // not of the agent's: a client may count on it
				if explain != nil {
					explain(resp)
				}
				if t, ok := w.(*tracked); ok {
					t.hold = resp.Header.Get("Content-Type") == agent.FramesType
				}
				for k := range resp.Header {
					if strings.HasPrefix(k, "Access-Control-") {
						resp.Header.Del(k)
					}
				}
			} else {
				relocate(resp.Header, host, rt.base)
				ownCookies(resp.Header)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if ended, ok := errors.AsType[*errs.Error](context.Cause(r.Context())); ok {
				err = ended
			}
			s.fail(w, r, unreachable(err, rec.ID, port))
		},
	}
	// An app may answer before it has read all; HTTP/1 servers of Go would
	// wait for the rest first. What can not do both, as HTTP/2, need not.
	http.NewResponseController(w).EnableFullDuplex() //nolint:errcheck // see above
	ctx, cancel := s.untilEnd(r.Context(), rec)
	defer cancel()
	if port != wire.AgentPort {
		ctx = fewHints(ctx)
	}
	p.ServeHTTP(w, r.WithContext(ctx))
}

// relocate has a redirect to the app itself, which thinks that it is at the root
// of host, lead where it is served. One to elsewhere stays.
func relocate(h http.Header, host, prefix string) {
	was := h.Get("Location")
	to := was
	if rest, ok := strings.CutPrefix(to, "http://"+host); ok && (rest == "" || strings.ContainsRune("/?#", rune(rest[0]))) {
		to = rest
		if !strings.HasPrefix(to, "/") {
			to = "/" + to
		}
	}
	if strings.HasPrefix(to, "/") && !strings.HasPrefix(to, "//") && (prefix == "" || to != prefix && !strings.HasPrefix(to, prefix+"/")) {
		to = prefix + to
	}
	if to != was {
		h.Set("Location", to)
	}
}

// drainTime is how long the last words of a sandbox that has ended may take
// to arrive.
const drainTime = time.Second

// untilEnd is a context for bytes from a sandbox: it ends soon after the
// sandbox has, and its cause says so. The link is gone then, and no packet tells.
func (s *Server) untilEnd(ctx context.Context, was record.Record) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	// A callback, and no goroutine that waits: of 1,000 terminals each counts.
	stop := context.AfterFunc(s.sandboxes.Life(was.ID), func() {
		t := time.NewTimer(drainTime)
		defer t.Stop()
		select {
		case <-t.C:
			if err := s.ended(ctx, was); err != nil {
				cancel(err)
			}
		case <-ctx.Done():
		}
	})
	return ctx, func() { stop(); cancel(nil) }
}

// ended says how a sandbox ended, or nothing of one that lives as it was and is
// only not watched for its end.
func (s *Server) ended(ctx context.Context, was record.Record) error {
	id := was.ID
	rec, err := s.sandboxes.Get(ctx, id)
	switch {
	case errs.Is(err, errs.NotFound):
		return errs.New(errs.NotFound, "sandbox %s ended (deleted) during the request", id)
	case err == nil && (rec.State == record.Ended || rec.State == record.Stopping):
		return errs.New(errs.WrongState, "sandbox %s ended (%s) during the request: %s", id, rec.Reason, rec.Message)
	case err == nil && !was.Started.IsZero() && !rec.Started.Equal(was.Started):
		return errs.New(errs.WrongState, "sandbox %s ended during the request, and was started again since; ask again", id)
	}
	return nil
}

// maxSmall bounds, in bytes, what is read before it is passed on.
const maxSmall = 32 << 10

// smallBody reads a small body of a known length that goes to the agent; nil
// is another one. The transport sends bytes in one packet with their head, and
// the agent wakes up once for them, not twice.
func smallBody(r *http.Request, port uint16) ([]byte, error) {
	if port != wire.AgentPort || r.ContentLength <= 0 || r.ContentLength > maxSmall {
		return nil, nil
	}
	b := make([]byte, r.ContentLength)
	_, err := io.ReadFull(r.Body, b)
	return b, err
}

// cleanHeaders takes away what only this server may see, and says who asked.
func (s *Server) cleanHeaders(pr *httputil.ProxyRequest, port uint16) {
	h := pr.Out.Header
	h.Del(wire.HeaderAccessRenew)
	h.Del(wire.HeaderAPIKey)
	h.Del(wire.HeaderEndpointToken)
	h.Del(wire.HeaderSecureAccess)
	h.Del(wire.HeaderIngressTo)
	h.Del(wire.HeaderEgressToken)
	if port != wire.AgentPort {
		h.Del(wire.HeaderAgentToken)
	}
	for _, k := range []string{wire.HeaderAPIKeyOther, wire.HeaderAgentToken, "Authorization"} { // else it is the app's own
		if k := http.CanonicalHeaderKey(k); len(h[k]) > 0 {
			if h[k] = slices.DeleteFunc(slices.Clone(h[k]), s.holdsKey); len(h[k]) == 0 {
				delete(h, k)
			}
		}
	}
	if strings.EqualFold(h.Get("Upgrade"), "h2c") || len(h["Http2-Settings"]) > 0 { // what follows that upgrade nobody here reads
		h.Del("Upgrade")
		h.Del("Connection")
		h.Del("Http2-Settings")
	}
	if cookies := pr.In.Cookies(); len(cookies) > 0 {
		h.Del("Cookie")
		for _, c := range cookies {
			if !strings.HasPrefix(c.Name, tokenCookie) {
				pr.Out.AddCookie(c)
			}
		}
	}
	s.forwarded(pr)
}

// forwarded says for whom a request is passed on. What the client says of that
// itself an app would take for ours, so it goes, unless a proxy says it that is
// trusted.
func (s *Server) forwarded(pr *httputil.ProxyRequest) {
	h, in, p := pr.Out.Header, pr.In.Header, peerOf(pr.In)
	if !p.unix && !s.trustedProxy(pr.In) {
		for k := range h {
			if strings.HasPrefix(k, "X-Forwarded-") || k == "X-Real-Ip" || k == "Forwarded" {
				delete(h, k)
			}
		}
		pr.SetXForwarded()
		return
	}
	h["X-Forwarded-For"] = in["X-Forwarded-For"]
	pr.SetXForwarded()
	for _, k := range []string{"X-Forwarded-Host", "X-Forwarded-Proto", "Forwarded"} { // ReverseProxy has taken them out
		if v := in.Get(k); v != "" {
			h.Set(k, v)
		}
	}
	if p.unix {
		h.Del("X-Forwarded-For") // a socket has no address
	}
}

// trustedProxy reports whether the peer is one of Config.TrustedProxies.
func (s *Server) trustedProxy(r *http.Request) bool {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && slices.ContainsFunc(s.cfg.TrustedProxies, func(p netip.Prefix) bool { return p.Contains(peer.Addr().Unmap()) })
}

// unreachable says that nothing answers, in the words SDKs expect: 502 with a body.
func unreachable(err error, id string, port uint16) error {
	if _, ok := errors.AsType[*errs.Error](err); ok {
		return err
	}
	what := "nothing listens there, or it hung up"
	if errors.Is(err, context.DeadlineExceeded) {
		what = "it did not answer in time"
	}
	e := errs.Wrap(err, errs.Unavailable, "port %d of sandbox %s can not be reached: %s; start a server there, or look at the sandbox with `sandboxctl inspect %s`", port, id, what, id)
	return httperr.With(http.StatusBadGateway, errs.Wire(e, "GENERAL::UNKNOWN_ERROR"))
}

// cutQuery takes the first value of key out of a raw query and leaves all
// else as it is: what does not parse is the sandbox's business.
func cutQuery(raw, key string) (value, rest string) {
	if !strings.Contains(raw, key) {
		return "", raw
	}
	var keep []string
	for pair := range strings.SplitSeq(raw, "&") {
		if k, v, _ := strings.Cut(pair, "="); k == key {
			if value == "" {
				value = v
			}
			continue
		}
		keep = append(keep, pair)
	}
	return value, strings.Join(keep, "&")
}
