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

// forward copies request and answer as they come, for as long as bytes flow.
func (g *Gateway) forward(w http.ResponseWriter, r *http.Request, v *Visit, rec *record.Record, port uint16, t *Target) error {
	rest, host := t.Rest, "localhost:"+strconv.Itoa(int(port)) // a server may check its name
	transport := g.cfg.Agents.Transport(rec)
	if port != wire.AgentPort {
		transport = &portTripper{direct: g.ports, agent: transport, port: port}
	}
	small, err := smallBody(r, port)
	if err != nil {
		return httperr.Invalid("the request body could not be read completely: %s", err)
	}
	path, err := url.PathUnescape(rest)
	if err != nil {
		return httperr.Invalid("the path after the port cannot be decoded; percent-encode it")
	}
	var explain func(*http.Response)
	was := before{unknownKills, unknownDenials}
	if port == wire.AgentPort {
		was = g.lookBefore(r.Method, path, rec)
		explain = g.explain(r.Method, path, rec, was)
	}
	clean := func(h http.Header) { cleanAnswer(h, port, rest, host, t.base) }
	var failed error
	var conn net.Conn // into the sandbox
	var p *httputil.ReverseProxy
	p = &httputil.ReverseProxy{
		Transport:     transport,
		FlushInterval: -1, // waiting a millisecond for more bytes had no measurable effect: docs/benchmarks.md
		ErrorLog:      g.cfg.Log,
		BufferPool:    relay.Buffers{},
		Rewrite: func(pr *httputil.ProxyRequest) {
			out := pr.Out
			out.URL.Scheme = "http"
			out.URL.Host = net.JoinHostPort(poolKey(rec), strconv.Itoa(int(port)))
			out.URL.Path, out.URL.RawPath = cmp.Or(path, "/"), cmp.Or(rest, "/")
			_, out.URL.RawQuery = cutQuery(pr.In.URL.RawQuery, tokenQuery)
			out.Host = host
			g.cleanHeaders(pr, port, v.Unix)
			t.hideFromGuest(out.Header)
			setKills(out.Header, was.kills)
			if small != nil {
				pr.Out.Body = io.NopCloser(bytes.NewReader(small))
			} else if pr.In.ContentLength >= minPoured {
				pr.Out.Body = &sourced{pr.Out.Body, v.Conn}
			}
		},
		ModifyResponse: func(resp *http.Response) error {
			if err := upgraded(resp, conn); err != nil {
				return err
			}
			clean(resp.Header)
			v.Guest = true
			if v.Keyless { // a page has the API's own origin, and may do there what its user may
				resp.Header.Add("Content-Security-Policy", "sandbox")
			}
			if port == wire.AgentPort {
				setKills(resp.Header, was.kills) // ours and not the agent's: a client may rely on it
				setDenials(resp.Header, was.denials)
				if explain != nil {
					explain(resp)
				}
				v.Hold = resp.Header.Get("Content-Type") == agent.FramesType
			}
			if pour(w, resp, v.Conn, conn) {
				p.FlushInterval = 0 // nothing else may write at the same time
			}
			return nil
		},
		ErrorHandler: func(_ http.ResponseWriter, r *http.Request, err error) {
			if ended, ok := errors.AsType[*errs.Error](context.Cause(r.Context())); ok {
				err = ended
			}
			failed = Unreachable(err, rec.ID, port)
		},
	}
	// An app may answer before it has read all; HTTP/1 servers of Go would wait for
	// the rest first. A connection that cannot do both, as HTTP/2, need not.
	rc := http.NewResponseController(w)
	rc.EnableFullDuplex()           //nolint:errcheck // see above
	rc.SetReadDeadline(time.Time{}) //nolint:errcheck // a recorder in a test has none
	ctx, cancel := g.UntilEnd(r.Context(), rec)
	defer cancel()
	r = r.WithContext(traced(ctx, &conn))
	body := &unread{ReadCloser: r.Body}
	r.Body = body
	p.ServeHTTP(hinted{w, clean}, r)
	if r.ContentLength != 0 && !body.ended.Load() {
		rc.SetReadDeadline(time.Now().Add(unreadTime)) //nolint:errcheck // a recorder in a test has none
		if r.ContentLength < 0 {
			closeAfter(w)
		}
	}
	return failed
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
