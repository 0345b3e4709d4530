package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// How long a daemon may take. A daemon that hangs must not make its clients hang.
const (
	dialLimit = 10 * time.Second
	// answerLimit is the time to the header of an answer. The slowest request is a
	// creation, which the daemon gives up after 90 s.
	answerLimit = 2 * time.Minute
)

// maxReply bounds an answer that is not a stream.
const maxReply = 64 << 20

// daemon is a daemon as it is reached over HTTP: requests in, answers or errors
// of pkg/errs out.
type daemon struct {
	host string // as given, for messages
	base string // "http://…", without a slash at its end
	key  string
	http *http.Client
	// socket is the path of the Unix socket; "": it is another kind of connection.
	socket string
	// trial is the value of the header of whoever tries a new version; "": not sent.
	trial string

	answer time.Duration // answerLimit, but in tests
	ping   time.Duration // pingEvery, but in tests
	look   time.Duration // lookEvery, but in tests
}

// in is a sandbox of the daemon, by its id or name.
func (d *daemon) in(idOrName string) sandbox { return sandbox{d, idOrName} }

// sandbox is one sandbox of a daemon.
type sandbox struct {
	*daemon
	name string // id or name, as the caller gave it
}

// path is where a route of the API for the sandbox is.
func (s sandbox) path(rest string) string { return sandboxPath(s.name, rest) }

// agentPath is where a route of the agent in the sandbox is.
func (s sandbox) agentPath(rest string) string {
	return s.path("/proxy/" + strconv.Itoa(agent.Port) + rest)
}

// request is one exchange.
type request struct {
	method, path string // path under /v1, escaped
	query        url.Values
	header       http.Header
	body         io.Reader
	length       int64 // of body; 0: unknown
	json         any   // instead of body
	// patient: the answer may begin late, when there is something to follow.
	patient bool
}

// errSilent is why a request was given up: its answer did not begin.
var errSilent = errors.New("no answer")

// stream sends r and returns the answer if it is a success; the caller closes its body.
// If no answer begins within answerLimit, that is an error, unless r has a body, which
// may take long to send, or is patient.
func (d *daemon) stream(ctx context.Context, r request) (*http.Response, error) {
	if r.json != nil {
		b, err := json.Marshal(r.json)
		if err != nil {
			return nil, fmt.Errorf("encode the request: %w", err)
		}
		r.body = bytes.NewReader(b)
	}
	u := d.base + "/v1" + r.path
	if len(r.query) > 0 {
		u += "?" + r.query.Encode()
	}
	asker := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	var clock *time.Timer
	if !r.patient && (r.body == nil || r.json != nil) {
		clock = time.AfterFunc(d.answer, func() { cancel(errSilent) })
		defer clock.Stop()
	}
	req, err := http.NewRequestWithContext(ctx, r.method, u, r.body)
	if err != nil {
		cancel(nil)
		return nil, fmt.Errorf("make the request: %w", err)
	}
	if r.length > 0 {
		req.ContentLength = r.length
	}
	for k, v := range r.header {
		req.Header[k] = v
	}
	if r.json != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if d.key != "" {
		req.Header.Set(wire.HeaderAPIKey, d.key)
	}
	if d.trial != "" {
		req.Header.Set(wire.HeaderTrial, d.trial)
	}
	stop := d.watchDaemon(cancel)
	resp, err := d.http.Do(req)
	stop()
	if err != nil {
		switch context.Cause(ctx) { //nolint:errorlint // they are passed through unwrapped
		case errDeserted:
			err = errs.Wrap(err, errs.Unavailable, "no sandboxd serves %s: the one that did has ended, and none has taken its place. "+
				"If it fails to start, `systemctl status sandboxd` and `journalctl -u sandboxd -n 20` say why; if it was stopped, start "+
				"it with `systemctl start sandboxd`. Sandboxes keep running", d.host)
		case errSilent:
			err = errs.Wrap(err, errs.Unavailable, "%s accepted the request %s %s and did not answer within %s: "+
				"sandboxd starts, hangs or its host is overloaded; see `systemctl status sandboxd` and its log, restart it if needed "+
				"(sandboxes keep running), and try again", d.host, r.method, r.path, d.answer)
		default:
			err = d.lost(asker, err)
		}
		cancel(nil)
		return nil, err
	}
	resp.Body = &body{resp.Body, cancel}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		return nil, fromResponse(resp)
	}
	return resp, nil
}

// body is that of an answer, whose context ends with it.
type body struct {
	io.ReadCloser
	cancel context.CancelCauseFunc
}

func (b *body) Close() error {
	err := b.ReadCloser.Close()
	b.cancel(nil)
	return err
}

// do sends r and decodes the answer into out, unless that is nil.
func (d *daemon) do(ctx context.Context, r request, out any) error {
	_, err := d.exchange(ctx, r, out)
	return err
}

// exchange is do that returns the answer's header too.
func (d *daemon) exchange(ctx context.Context, r request, out any) (http.Header, error) {
	resp, err := d.stream(ctx, r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxReply))
	if err != nil {
		return nil, d.lost(ctx, err)
	}
	if out == nil {
		return resp.Header, nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return nil, errs.Wrap(err, errs.Internal,
			"the answer of %s to %s %s is not what this client expects; "+
				"are this client and sandboxd of the same release?", d.host, r.method, r.path)
	}
	return resp.Header, nil
}

// followed is the body of an answer that may go on for long. Reading it, a
// connection that breaks is explained.
func (d *daemon) followed(ctx context.Context, rc io.ReadCloser) io.ReadCloser {
	return &following{rc, func(err error) error { return d.lost(ctx, err) }}
}

type following struct {
	io.ReadCloser
	explain func(error) error
}

func (f *following) Read(p []byte) (int, error) {
	n, err := f.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		err = f.explain(err)
	}
	return n, err
}
