// Package client is the Go client of sandboxd: the lifecycle API, commands and
// files in sandboxes, and what sandboxd has beyond OpenSandbox.
//
//	c, err := client.FromEnv()
//	sb, err := c.Create(ctx, wire.CreateRequest{…}, true)
//	p, err := c.Start(ctx, sb.ID, client.Command{Argv: []string{"uname", "-a"}})
//	exit, err := p.Wait(os.Stdout, os.Stderr)
//	err = c.Delete(ctx, sb.ID)
//
// Errors carry a code of pkg/errs. What surprises: bytes that come out of a
// sandbox are hostile. This package bounds their size and never takes a path
// from them; who shows them on a terminal escapes them first.
package client

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// DefaultHost is where a daemon of the default instance listens.
const DefaultHost = "unix:///run/sandboxd/sandboxd.sock"

// How long a daemon may take. One that hangs must not hang its clients, too.
const (
	dialLimit = 10 * time.Second
	// answerLimit is until the header of an answer; the daemon itself gives up
	// on the slowest it does, a creation, after 90 s.
	answerLimit = 2 * time.Minute
)

// maxReply bounds an answer that is not a stream.
const maxReply = 64 << 20

// Client talks to one daemon. It is safe for concurrent use.
type Client struct {
	host string // as given, for messages
	base string // "http://…", without a slash at its end
	key  string
	http *http.Client

	answer time.Duration // answerLimit, but in tests
	ping   time.Duration // pingEvery, but in tests
}

// FromEnv makes a Client of SANDBOXD_HOST, else of what OpenSandbox's SDKs
// read (OPEN_SANDBOX_DOMAIN, OPEN_SANDBOX_PROTOCOL), else of DefaultHost; the
// key is OPEN_SANDBOX_API_KEY.
func FromEnv() (*Client, error) {
	host := os.Getenv("SANDBOXD_HOST")
	if d := os.Getenv("OPEN_SANDBOX_DOMAIN"); host == "" && d != "" {
		host = d
		if !strings.Contains(d, "://") {
			host = cmp.Or(os.Getenv("OPEN_SANDBOX_PROTOCOL"), "http") + "://" + d
		}
	}
	return New(cmp.Or(host, DefaultHost), os.Getenv("OPEN_SANDBOX_API_KEY"))
}

// New makes a Client of host: unix:///path, tcp://host:port or an http(s) URL.
func New(host, key string) (*Client, error) {
	tr := &http.Transport{Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: 16, IdleConnTimeout: 90 * time.Second, DisableCompression: true}
	c := &Client{host: host, key: key, answer: answerLimit, ping: pingEvery, http: &http.Client{
		Transport: tr,
		// The API does not redirect; a sandbox behind it may, to anywhere.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	dialer := &net.Dialer{Timeout: dialLimit}
	tr.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		return watch(dialer.DialContext(ctx, network, address))
	}
	scheme, rest, ok := strings.Cut(host, "://")
	if !ok {
		scheme, rest = "tcp", host
	}
	switch scheme {
	case "unix":
		if rest == "" {
			return nil, badHost(host)
		}
		tr.Proxy = nil
		tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return watch(dialer.DialContext(ctx, "unix", rest))
		}
		c.base = "http://sandboxd"
		return c, nil
	case "tcp":
		scheme = "http"
	case "http", "https":
	default:
		return nil, badHost(host)
	}
	u, err := url.Parse(scheme + "://" + rest)
	if err != nil || u.Host == "" || u.RawQuery != "" || u.User != nil {
		return nil, badHost(host)
	}
	c.base = strings.TrimSuffix(strings.TrimSuffix(u.String(), "/"), "/v1")
	return c, nil
}

func badHost(host string) error {
	return errs.New(errs.Invalid, "SANDBOXD_HOST %q is no place to connect to; want unix:///run/sandboxd/sandboxd.sock, tcp://127.0.0.1:8080 or an http(s) URL", host)
}

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// request is one exchange.
type request struct {
	method, path string // path under /v1, escaped
	query        url.Values
	header       http.Header
	body         io.Reader
	length       int64 // of body; 0: unknown
	json         any   // instead of body
	// The answer may begin late: when there is something to follow.
	patient bool
}

// errSilent is why a request was given up: its answer did not begin.
var errSilent = errors.New("no answer")

// stream sends r and returns the answer if it is a success; the caller closes
// its body. If no answer begins for answerLimit that is an error, unless r has
// a body, which takes as long as it is, or is patient.
func (c *Client) stream(ctx context.Context, r request) (*http.Response, error) {
	if r.json != nil {
		b, err := json.Marshal(r.json)
		if err != nil {
			return nil, fmt.Errorf("encode the request: %w", err)
		}
		r.body = bytes.NewReader(b)
	}
	u := c.base + "/v1" + r.path
	if len(r.query) > 0 {
		u += "?" + r.query.Encode()
	}
	asker := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	var clock *time.Timer
	if !r.patient && (r.body == nil || r.json != nil) {
		clock = time.AfterFunc(c.answer, func() { cancel(errSilent) })
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
	if c.key != "" {
		req.Header.Set(wire.HeaderAPIKey, c.key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if context.Cause(ctx) == errSilent { //nolint:errorlint // it is passed through unwrapped
			err = errs.Wrap(err, errs.Unavailable, "%s took the request %s %s and did not answer for %s: sandboxd hangs or its host is overloaded; see its log, restart it if need be (sandboxes live on), and ask again",
				c.host, r.method, r.path, c.answer)
		} else {
			err = c.lost(asker, err)
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
func (c *Client) do(ctx context.Context, r request, out any) error {
	_, err := c.exchange(ctx, r, out)
	return err
}

// exchange is do that returns the answer's header too.
func (c *Client) exchange(ctx context.Context, r request, out any) (http.Header, error) {
	resp, err := c.stream(ctx, r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxReply))
	if err != nil {
		return nil, c.lost(ctx, err)
	}
	if out == nil {
		return resp.Header, nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return nil, errs.Wrap(err, errs.Internal, "the answer of %s to %s %s is not what this client expects; is it a sandboxd of this release?", c.host, r.method, r.path)
	}
	return resp.Header, nil
}

// followed is the body of an answer that may go on for long. Reading it, a
// connection that breaks is explained.
func (c *Client) followed(ctx context.Context, rc io.ReadCloser) io.ReadCloser {
	return &following{rc, func(err error) error { return c.lost(ctx, err) }}
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

// lost explains a connection that could not be made or broke.
func (c *Client) lost(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		why := op.Err.Error()
		if errors.Is(err, os.ErrPermission) {
			return errs.Wrap(err, errs.Denied, "cannot connect to %s: permission denied; become root or a member of group sandboxd", c.host)
		}
		return errs.Wrap(err, errs.Unavailable, "cannot connect to %s: %s; is sandboxd running? Start it with `make dev-up` or `systemctl start sandboxd`, or set SANDBOXD_HOST", c.host, why)
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return errs.Wrap(err, errs.Denied, "the certificate of %s is not to be trusted: %s; have SSL_CERT_FILE name the PEM file of the authority that signed it, and ask under a name that it holds", c.host, err)
	}
	return errs.Wrap(err, errs.Unavailable, "the connection to %s broke: %s; see whether sandboxd still runs and ask again", c.host, err)
}

// fromResponse turns an answer that is no success back into an error of
// pkg/errs: the other direction of the table in pkg/api.
func fromResponse(resp *http.Response) error {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	var e wire.Error
	if json.Unmarshal(b, &e) != nil || e.Message == "" {
		e.Message = strings.TrimSpace(string(b))
		if strings.HasSuffix(e.Message, "HTTP request to an HTTPS server.") { // net/http's own words
			e.Message = "this is a TLS listener, and was asked without; begin the host with https://"
		}
		if e.Message == "" || strings.HasPrefix(e.Message, "<") {
			e.Message = "the server answered " + resp.Status
		}
	}
	err := fromWire(resp.StatusCode, e)
	if n, perr := strconv.Atoi(resp.Header.Get("Retry-After")); perr == nil && n > 0 {
		err = errs.Retry(err, time.Duration(n)*time.Second)
	}
	return err
}

func fromWire(status int, e wire.Error) error {
	return errs.Wire(errs.New(codeOf(status, e.Code), "%s", e.Message), e.Code)
}

func codeOf(status int, wireCode string) errs.Code {
	switch status {
	case http.StatusBadRequest:
		if wireCode == "SANDBOX::API_NOT_SUPPORTED" || wireCode == "SNAPSHOT::NOT_IMPLEMENTED" || wireCode == "VOLUME::UNSUPPORTED_BACKEND" {
			return errs.Unsupported
		}
		return errs.Invalid
	case http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity, http.StatusMethodNotAllowed:
		return errs.Invalid
	case http.StatusUnauthorized, http.StatusForbidden:
		return errs.Denied
	case http.StatusNotFound:
		return errs.NotFound
	case http.StatusConflict:
		if wireCode == "SANDBOX::ALREADY_EXISTS" {
			return errs.Exists
		}
		return errs.WrongState
	case http.StatusTooManyRequests, http.StatusInsufficientStorage:
		return errs.Exhausted
	case http.StatusNotImplemented:
		return errs.Unsupported
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		if wireCode == "SANDBOX::CAPACITY_EXCEEDED" {
			return errs.Exhausted
		}
		return errs.Unavailable
	}
	return errs.Internal
}
