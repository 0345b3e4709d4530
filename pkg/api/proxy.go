package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
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
	port, err := parsePort(rt.port)
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
	s.renewOnAccess(r, rec)
	s.forward(w, r, rec, port, rt.rest)
}

// authorise checks the token of one port of one sandbox.
func (s *Server) authorise(w http.ResponseWriter, r *http.Request, rec record.Record, port uint16, rt route) error {
	in := infoOf(r)
	if in.trusted {
		return nil
	}
	if port == wire.AgentPort {
		given := r.Header.Get(wire.HeaderAgentToken)
		switch {
		case rec.Token != "" && equal(given, rec.Token):
			in.actor = "token " + peerOf(r).actor
			return nil
		case s.isKey(given): // Go's SDK sends the API key where an endpoint gave it no header
			in.actor = "key " + peerOf(r).actor
			return nil
		}
		if s.keyless() {
			return s.unauthorized(r)
		}
		return withStatus(http.StatusUnauthorized, "UNAUTHORIZED", errs.Denied,
			"port %d of a sandbox needs its token: send the headers that GET /v1/sandboxes/{id}/endpoints/%d returns, or the API key", port, port)
	}
	if peerOf(r).public {
		return nil
	}
	want := s.endpointToken(rec.ID, port)
	name := tokenCookie + strconv.Itoa(int(port))
	if equal(r.Header.Get(wire.HeaderEndpointToken), want) {
		return nil
	}
	if c, err := r.Cookie(name); err == nil && equal(c.Value, want) {
		return nil
	}
	if given, _ := cutQuery(r.URL.RawQuery, tokenQuery); equal(given, want) {
		mount := ""
		if rt.v1 {
			mount = "/v1"
		}
		http.SetCookie(w, &http.Cookie{ // so that what the page loads next is let in
			Name: name, Value: want, HttpOnly: true, SameSite: http.SameSiteStrictMode,
			Path: fmt.Sprintf("%s/sandboxes/%s/proxy/%d", mount, url.PathEscape(rt.id), port),
		})
		return nil
	}
	return withStatus(http.StatusUnauthorized, "UNAUTHORIZED", errs.Denied,
		"port %d of this sandbox needs an endpoint token: send the headers that GET /v1/sandboxes/{id}/endpoints/%d returns, or add ?%s=…", port, port, tokenQuery)
}

// reachable waits, for the agent's port, until a sandbox being made runs, and
// refuses one that does not run.
func (s *Server) reachable(ctx context.Context, rec record.Record, port uint16) (record.Record, error) {
	if rec.State == record.Creating && port == wire.AgentPort {
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
	case record.Creating:
		return rec, errs.New(errs.Unavailable, "sandbox %s is still being made; ask again in a moment", rec.ID)
	case record.Deleting:
		return rec, notFound(rec.ID)
	case record.Ended:
		return rec, errs.New(errs.WrongState, "sandbox %s has ended (%s) and answers no more: %s", rec.ID, rec.Reason, orElse(rec.Message, "create another"))
	case record.Pausing, record.Paused:
		return rec, errs.New(errs.WrongState, "sandbox %s is %s and answers nothing; resume it first", rec.ID, stateOf(&rec))
	}
	return rec, errs.New(errs.Unavailable, "sandbox %s is %s; ask again in a moment", rec.ID, stateOf(&rec))
}

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// forward copies request and answer, unbuffered, for as long as bytes flow.
func (s *Server) forward(w http.ResponseWriter, r *http.Request, rec record.Record, port uint16, rest string) {
	transport := s.agents.Transport(rec)
	if port != wire.AgentPort {
		transport = &portTripper{direct: s.ports, agent: transport, port: port}
	}
	small, err := smallBody(r, port)
	if err != nil {
		s.fail(w, r, invalid("the body broke off: %s", err))
		return
	}
	path, err := url.PathUnescape(rest)
	if err != nil {
		s.fail(w, r, invalid("the path behind the port does not decode"))
		return
	}
	p := &httputil.ReverseProxy{
		Transport:     transport,
		FlushInterval: -1,
		ErrorLog:      s.quiet,
		BufferPool:    buffers{},
		Rewrite: func(pr *httputil.ProxyRequest) {
			out := pr.Out
			out.URL.Scheme = "http"
			out.URL.Host = net.JoinHostPort(rec.ID, strconv.Itoa(int(port))) // the key of the connection pool
			out.URL.Path, out.URL.RawPath = orElse(path, "/"), orElse(rest, "/")
			_, out.URL.RawQuery = cutQuery(pr.In.URL.RawQuery, tokenQuery)
			out.Host = "localhost:" + strconv.Itoa(int(port)) // what a server checks that minds its name
			s.cleanHeaders(pr, port)
			if small != nil {
				pr.Out.Body = io.NopCloser(bytes.NewReader(small))
			}
		},
		ModifyResponse: func(resp *http.Response) error {
			resp.Header.Del(wire.HeaderRequestID) // ours stands already
			upgraded(resp)
			if port == wire.AgentPort {
				if t, ok := w.(*tracked); ok {
					t.hold = resp.Header.Get("Content-Type") == agent.FramesType
				}
				for k := range resp.Header {
					if strings.HasPrefix(k, "Access-Control-") {
						resp.Header.Del(k)
					}
				}
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
	ctx, cancel := s.untilEnd(r.Context(), rec.ID)
	defer cancel()
	p.ServeHTTP(w, r.WithContext(ctx))
}

// drainTime is how long the last words of a sandbox that has ended may take
// to arrive.
const drainTime = time.Second

// untilEnd is a context for bytes from a sandbox: it ends soon after the
// sandbox has, and its cause says so. The link is gone then, and no packet tells.
func (s *Server) untilEnd(ctx context.Context, id string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	done := s.sandboxes.Done(id)
	go func() {
		select {
		case <-done:
		case <-ctx.Done():
			return
		}
		t := time.NewTimer(drainTime)
		defer t.Stop()
		select {
		case <-t.C:
			if err := s.ended(ctx, id); err != nil {
				cancel(err)
			}
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// ended says how a sandbox ended, or nothing of one that lives and is only not
// watched for its end.
func (s *Server) ended(ctx context.Context, id string) error {
	rec, err := s.sandboxes.Get(ctx, id)
	switch {
	case errs.Is(err, errs.NotFound):
		return errs.New(errs.NotFound, "sandbox %s ended (deleted) during the request", id)
	case err == nil && (rec.State == record.Ended || rec.State == record.Stopping):
		return errs.New(errs.WrongState, "sandbox %s ended (%s) during the request: %s", id, rec.Reason, rec.Message)
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

// buffers are what answers are copied through.
type buffers struct{}

var bufferPool = sync.Pool{New: func() any { return new([32 << 10]byte) }}

func (buffers) Get() []byte  { return bufferPool.Get().(*[32 << 10]byte)[:] }
func (buffers) Put(b []byte) { bufferPool.Put((*[32 << 10]byte)(b)) }

// cleanHeaders takes away what only this server may see, and says who asked.
func (s *Server) cleanHeaders(pr *httputil.ProxyRequest, port uint16) {
	h := pr.Out.Header
	h.Del(wire.HeaderAPIKey)
	h.Del(wire.HeaderEndpointToken)
	h.Del(wire.HeaderEgressToken)
	if s.isKey(h.Get(wire.HeaderAPIKeyOther)) { // else it is a key of the app inside
		h.Del(wire.HeaderAPIKeyOther)
	}
	if s.isKey(h.Get(wire.HeaderAgentToken)) || port != wire.AgentPort {
		h.Del(wire.HeaderAgentToken)
	}
	if scheme, k, ok := strings.Cut(h.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") && s.isKey(strings.TrimSpace(k)) {
		h.Del("Authorization")
	}
	if cookies := pr.In.Cookies(); len(cookies) > 0 {
		h.Del("Cookie")
		for _, c := range cookies {
			if !strings.HasPrefix(c.Name, tokenCookie) {
				pr.Out.AddCookie(c)
			}
		}
	}
	h["X-Forwarded-For"] = pr.In.Header["X-Forwarded-For"]
	pr.SetXForwarded()
	for _, k := range []string{"X-Forwarded-Host", "X-Forwarded-Proto"} {
		if v := pr.In.Header.Get(k); v != "" {
			h.Set(k, v)
		}
	}
	if peerOf(pr.In).unix {
		h.Del("X-Forwarded-For") // a socket has no address
	}
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
	return &httpError{http.StatusBadGateway, errs.Wire(e, "GENERAL::UNKNOWN_ERROR")}
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
