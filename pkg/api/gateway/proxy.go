package gateway

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A passage is a request on its way to a port of a sandbox, and its answer.
type passage struct {
	*Gateway
	visit  *Visit
	rec    *record.Record
	port   uint16
	target *Target
	path   string // what follows the port, decoded
	host   string // the server in the sandbox may check its name
	small  []byte // the body, if it was read already

	was     before
	explain func(*http.Response) // may be nil

	w      http.ResponseWriter
	conn   net.Conn // into the sandbox
	proxy  *httputil.ReverseProxy
	failed error
}

// forward copies request and answer as they come, for as long as bytes flow.
func (g *Gateway) forward(w http.ResponseWriter, r *http.Request, v *Visit, rec *record.Record, port uint16, t *Target) error {
	p := &passage{
		Gateway: g, visit: v, rec: rec, port: port, target: t, host: "localhost:" + strconv.Itoa(int(port)), w: w,
		was: before{unknownKills, unknownDenials},
	}
	transport := g.cfg.Agents.Transport(rec)
	if port != wire.AgentPort {
		transport = &portTripper{direct: g.ports, agent: transport, port: port}
	}
	var err error
	if p.small, err = smallBody(r, port); err != nil {
		return httperr.Invalid("the request body could not be read completely: %s", err)
	}
	if p.path, err = url.PathUnescape(t.Rest); err != nil {
		return httperr.Invalid("the path after the port cannot be decoded; percent-encode it")
	}
	if port == wire.AgentPort {
		if agent.DaemonOnly(p.path) {
			return httperr.New(http.StatusNotFound, "NOT_SUPPORTED", errs.NotFound, "the agent of a sandbox has no such path for clients")
		}
		p.was = g.lookBefore(r.Method, p.path, rec)
	}
	p.proxy = &httputil.ReverseProxy{
		Transport:      transport,
		FlushInterval:  -1, // waiting a millisecond for more bytes had no measurable effect: docs/benchmarks.md
		ErrorLog:       g.cfg.Log,
		BufferPool:     relay.Buffers{},
		Rewrite:        p.rewrite,
		ModifyResponse: p.answered,
		ErrorHandler:   p.fails,
	}
	// An app may answer before it has read all; HTTP/1 servers of Go would wait for
	// the rest first. A connection that cannot do both, as HTTP/2, need not.
	rc := http.NewResponseController(w)
	rc.EnableFullDuplex()           //nolint:errcheck // see above
	rc.SetReadDeadline(time.Time{}) //nolint:errcheck // a recorder in a test has none
	ctx, cancel := g.UntilEnd(r.Context(), rec)
	defer cancel()
	if port == wire.AgentPort {
		p.explain = g.explain(ctx, r.Method, p.path, rec, p.was)
	}
	r = r.WithContext(traced(ctx, &p.conn))
	body := &unread{ReadCloser: r.Body}
	r.Body = body
	p.proxy.ServeHTTP(hinted{w, p.clean}, r)
	if r.ContentLength != 0 && body.stop(w) && r.ContentLength < 0 {
		closeAfter(w)
	}
	return p.failed
}

// rewrite makes the request that the port gets.
func (p *passage) rewrite(pr *httputil.ProxyRequest) {
	out := pr.Out
	out.URL.Scheme = "http"
	out.URL.Host = net.JoinHostPort(poolKey(p.rec), strconv.Itoa(int(p.port)))
	out.URL.Path, out.URL.RawPath = cmp.Or(p.path, "/"), cmp.Or(p.target.Rest, "/")
	_, out.URL.RawQuery = cutQuery(pr.In.URL.RawQuery, tokenQuery)
	out.Host = p.host
	p.cleanHeaders(pr, p.port, p.visit.Unix)
	p.target.hideFromGuest(out.Header)
	setKills(out.Header, p.was.kills)
	if p.small != nil {
		out.Body = io.NopCloser(bytes.NewReader(p.small))
	} else if pr.In.ContentLength >= minPoured {
		out.Body = &sourced{out.Body, p.visit.Conn}
	}
}

// clean removes what an answer of a port may not say.
func (p *passage) clean(h http.Header) { cleanAnswer(h, p.port, p.target.Rest, p.host, p.target.base) }

// answered makes the answer that the client gets.
func (p *passage) answered(resp *http.Response) error {
	if err := upgraded(resp, p.conn); err != nil {
		return err
	}
	p.clean(resp.Header)
	p.visit.Guest = true
	if p.visit.Keyless { // a page has the API's own origin, and may do there what its user may
		resp.Header.Add("Content-Security-Policy", "sandbox")
	}
	if p.port == wire.AgentPort {
		setKills(resp.Header, p.was.kills) // ours and not the agent's: a client may rely on it
		setDenials(resp.Header, p.was.denials)
		if p.explain != nil {
			p.explain(resp)
		}
		p.visit.Hold = resp.Header.Get("Content-Type") == agent.FramesType
	}
	if pour(p.w, resp, p.visit.Conn, p.conn) {
		p.proxy.FlushInterval = 0 // nothing else may write at the same time
	}
	return nil
}

// fails notes why there is no answer.
func (p *passage) fails(_ http.ResponseWriter, r *http.Request, err error) {
	if p.failed = httperr.Revoked(r.Context()); p.failed != nil {
		return
	}
	if ended, ok := errors.AsType[*errs.Error](context.Cause(r.Context())); ok {
		err = ended
	}
	p.failed = Unreachable(err, p.rec.ID, p.port)
}

// maxSmall bounds, in bytes, what is read before it is passed on.
const maxSmall = 32 << 10

// smallBody reads a small body of a known length that goes to the agent; it is nil
// for other bodies. The transport then sends it in one packet with its head, and the
// agent wakes up once, not twice.
func smallBody(r *http.Request, port uint16) ([]byte, error) {
	if port != wire.AgentPort || r.ContentLength <= 0 || r.ContentLength > maxSmall {
		return nil, nil
	}
	b := make([]byte, r.ContentLength)
	_, err := io.ReadFull(r.Body, b)
	return b, err
}
