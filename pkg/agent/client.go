package agent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Bounds of what a client takes from an agent.
const (
	maxReplyHeader = 64 << 10
	dialTimeout    = 5 * time.Second
	// An idle connection costs the agent about 12 KiB. The time is shorter than the
	// agent's own 120 s, so the client closes first: it is the side that may retry.
	idleTimeout = 90 * time.Second
	// How long a connection made by Ready may wait for its first request.
	spareAge = 5 * time.Second
	// If a request gets no head of an answer, either the request is slow or the agent
	// hangs. After doubtAfter the client pings the agent, which must answer within
	// patience.
	doubtAfter = 5 * time.Second
	patience   = 10 * time.Second
	// An agent answers a request that begins a command as soon as the process runs. If it
	// has not done so after beginLimit, pings prove nothing: an agent that cannot start
	// processes answers them, too.
	beginLimit = 30 * time.Second
)

// Client talks to one agent. It keeps connections open; Close closes them.
type Client struct {
	dial      func(context.Context) (net.Conn, error)
	token     atomic.Pointer[string] // Adopt changes it
	transport *http.Transport

	doubtAfter, patience time.Duration
	variables            variables

	mu    sync.Mutex
	spare net.Conn    // made and used by Ready; guarded by mu
	stale *time.Timer // closes spare, because nobody would notice if the agent closed it; guarded by mu
}

// New returns a client that dials with dial and proves itself with token.
func New(dial func(ctx context.Context) (net.Conn, error), token string) *Client {
	c := &Client{dial: dial, doubtAfter: doubtAfter, patience: patience}
	c.token.Store(&token)
	c.transport = &http.Transport{
		Proxy:                  nil, // never from the environment
		DialContext:            c.connect,
		DisableCompression:     true,
		MaxIdleConnsPerHost:    4,
		IdleConnTimeout:        idleTimeout,
		MaxResponseHeaderBytes: maxReplyHeader,
		ExpectContinueTimeout:  time.Second,
	}
	return c
}

// Close closes idle connections; those in use close when their reply ends.
func (c *Client) Close() {
	if s := c.takeSpare(); s != nil {
		s.Close()
	}
	c.transport.CloseIdleConnections()
}

// RoundTripper forwards requests to the agent and nowhere else. It ignores scheme and
// host of a request, passes path, headers and body on as they are, and sets the agent's
// token in place of any that the request has. So the caller must have authorised the
// request. Reply headers are bounded by 64 KiB. Bodies stream and are not bounded.
// Upgrades work as with [http.Transport].
//
// A request may take long as long as the agent answers pings. If the agent does not
// answer, because somebody stopped it or it gets no CPU, the request ends after 15 s
// with errs.Unavailable. So does, after 30 s, a request that begins a command, although
// the agent answers pings. Once the head of an answer is there, the client sends no
// pings.
func (c *Client) RoundTripper() http.RoundTripper { return roundTripper{c} }

type roundTripper struct{ c *Client }

func (t roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, giveUp := context.WithCancelCause(r.Context())
	r2 := r.WithContext(ctx) // a shallow copy: round trippers must not change their request
	u := *r.URL
	u.Scheme, u.Host, u.User = "http", "sandbox", nil
	r2.URL = &u
	r2.Header = r.Header.Clone()
	if r2.Header == nil {
		r2.Header = http.Header{}
	}
	r2.Header.Set(TokenHeader, *t.c.token.Load())
	answered := t.c.doubt(ctx, giveUp)
	if beginsCommand(r2) {
		late := time.AfterFunc(beginLimit, func() { giveUp(errStuck()) })
		defer late.Stop()
	}
	if startsProgram(r2) {
		t.c.tellVariables(ctx) // within the time that r has
	}
	resp, err := t.c.transport.RoundTrip(r2)
	answered()
	if err != nil {
		giveUp(nil)
		err = brief(err)
		if silent, ok := errors.AsType[*errs.Error](context.Cause(ctx)); ok {
			err = silent
		}
	}
	return resp, err // its body needs ctx, which ends with that of r
}

// maxError bounds the text of an error that may repeat what an agent has sent, in bytes:
// net/http quotes a whole line of an answer that is none.
const maxError = 500

// brief is err, or its beginning if it is long.
func brief(err error) error {
	if text := err.Error(); len(text) > maxError {
		return errors.New(printable(text, maxError) + "…")
	}
	return err
}

// beginsCommand reports whether the agent answers r as soon as a process runs, or a line
// of a session, or a terminal is there. Other requests may take long, such as a search.
func beginsCommand(r *http.Request) bool {
	switch p := r.URL.Path; r.Method {
	case http.MethodPost:
		return p == "/command" || p == "/pty" || strings.HasPrefix(p, "/session/") && strings.HasSuffix(p, "/run")
	case http.MethodGet:
		return strings.HasPrefix(p, "/pty/") && strings.HasSuffix(p, "/ws")
	}
	return false
}

// errStuck is the error of a command that an agent does not begin although it answers
// pings.
func errStuck() error {
	return errs.New(errs.Unavailable, "the agent of this sandbox answers pings, but has not begun the command for %v: "+
		"it cannot start processes, because it gets no CPU time or memory or its disk hangs, or it is stuck; the command may still begin; "+
		"`sandboxctl stats` shows the use, `sandboxctl rm` removes the sandbox in any case", beginLimit)
}

// doubt pings the agent while a request waits for its answer, and ends the request when
// no ping is answered. The caller says when the request is.
func (c *Client) doubt(ctx context.Context, giveUp context.CancelCauseFunc) (answered func()) {
	ctx, stop := context.WithCancel(ctx)
	late := time.AfterFunc(c.doubtAfter, func() {
		for c.lives(ctx) {
			select {
			case <-ctx.Done():
				return
			case <-time.After(c.doubtAfter):
			}
		}
		if ctx.Err() == nil {
			giveUp(errSilent(c.doubtAfter + c.patience))
		}
	})
	return func() {
		late.Stop()
		stop()
	}
}

// lives reports whether the agent answers a ping, even with a refusal.
func (c *Client) lives(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, c.patience)
	defer cancel()
	err := c.Ready(ctx)
	return err == nil || ctx.Err() == nil
}

// CloseIdleConnections makes [http.Client.CloseIdleConnections] work.
func (t roundTripper) CloseIdleConnections() { t.c.Close() }

func (c *Client) connect(ctx context.Context, _, _ string) (net.Conn, error) {
	if s := c.takeSpare(); s != nil {
		return s, nil
	}
	limited, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := c.dial(limited)
	if late, ok := errors.AsType[net.Error](err); ok && late.Timeout() && ctx.Err() == nil {
		return nil, errSilent(dialTimeout)
	}
	return conn, err
}

// errSilent is the error of a request whose agent does not answer.
func errSilent(limit time.Duration) error {
	return errs.New(errs.Unavailable, "the agent of this sandbox has not answered for %v: "+
		"its processes were stopped from outside, or get no CPU time or memory; "+
		"`sandboxctl stats` shows the use of both, `sandboxctl rm` removes the sandbox in any case", limit)
}

func (c *Client) takeSpare() net.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.spare
	c.spare = nil
	if s != nil {
		c.stale.Stop()
	}
	return s
}

// errNotReady is an answer after which a later attempt may succeed.
var errNotReady = errors.New("agent is not ready")

// Ready blocks until the agent answers, which it does once commands can run, or ctx
// ends. It connects anew every 1 to 20 ms, a sixteenth of the time waited so far, so
// that polling adds a few percent to any boot. Each attempt has a deadline of its own:
// while a guest boots, connections are refused or, if the link is not up yet, time out,
// and the kernel would repeat a lost SYN only after a second. An agent that refuses the
// token or speaks a foreign protocol is an error at once.
func (c *Client) Ready(ctx context.Context) error {
	attempt, start := 20*time.Millisecond, time.Now()
	for {
		conn, err := c.tryDial(ctx, attempt)
		if err == nil {
			err = c.ping(ctx, conn)
			if err == nil {
				c.keep(conn)
				return nil
			}
			conn.Close()
			if errs.CodeOf(err) != errs.Internal {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the agent: %w; last attempt: %w", context.Cause(ctx), err)
		case <-time.After(min(max(time.Since(start)/16, time.Millisecond), 20*time.Millisecond)):
		}
		attempt = min(attempt*3/2, 500*time.Millisecond)
	}
}

// Tell sends the agent the limits of its sandbox, which it reports inside. An agent of
// an older release does not know the request, which is no error.
func (c *Client) Tell(ctx context.Context, l Limits) error {
	status, err := c.put(ctx, "/limits", l)
	if err == nil && status != http.StatusOK && status != http.StatusNotFound {
		err = fmt.Errorf("status %d", status)
	}
	if err != nil {
		return fmt.Errorf("send the agent its limits: %w", err)
	}
	return nil
}

// put sends v as JSON.
func (c *Client) put(ctx context.Context, path string, v any) (status int, err error) {
	b, err := json.Marshal(v)
	if err != nil {
		return 0, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPut, "http://sandbox"+path, bytes.NewReader(b))
	if err != nil {
		return 0, err
	}
	resp, err := c.RoundTripper().RoundTrip(r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if _, err = io.CopyN(io.Discard, resp.Body, 1<<10); err == io.EOF { // all of it
		err = nil
	}
	return resp.StatusCode, err
}

func (c *Client) tryDial(ctx context.Context, limit time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return c.dial(ctx)
}

// ping asks over conn. The request is written by hand, so that a connection
// with nothing left to read can be handed to the transport afterwards.
func (c *Client) ping(ctx context.Context, conn net.Conn) error {
	deadline := time.Now().Add(5 * time.Second)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	conn.SetDeadline(deadline) //nolint:errcheck // then reads fail as well
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := io.WriteString(conn, "GET /ping HTTP/1.1\r\nHost: sandbox\r\n"+TokenHeader+": "+*c.token.Load()+"\r\n\r\n"); err != nil {
		return fmt.Errorf("ping the agent: %w", err)
	}
	br := bufio.NewReader(&io.LimitedReader{R: conn, N: maxReplyHeader})
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		return fmt.Errorf("ping the agent: %w", brief(err))
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	if err != nil {
		return fmt.Errorf("ping the agent: %w", brief(err))
	}
	if err := checkPing(resp); err != nil {
		return err
	}
	if resp.Close || br.Buffered() > 0 || len(bytes.TrimSpace(body)) > 0 {
		return errNotReady // something answers, but not as an agent does: never reuse this connection
	}
	if !stop() {
		return context.Cause(ctx)
	}
	return conn.SetDeadline(time.Time{})
}

func checkPing(resp *http.Response) error {
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		return errs.New(errs.Denied, "the agent refused its token: something else answers on port %d of this sandbox", Port)
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("%w: status %d", errNotReady, resp.StatusCode)
	}
	h := resp.Header.Get(ProtocolHeader)
	p, err := strconv.Atoi(h)
	if err != nil || p < MinProtocol || p > Protocol {
		return errs.New(errs.Unsupported, "the agent speaks protocol %.16q, this daemon speaks %d to %d: "+
			"remove the sandbox, or run the daemon that created it", h, MinProtocol, Protocol)
	}
	return nil
}

func (c *Client) keep(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.spare != nil {
		c.stale.Stop()
		c.spare.Close()
	}
	c.spare = conn
	c.stale = time.AfterFunc(spareAge, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.spare == conn {
			conn.Close()
			c.spare = nil
		}
	})
}
