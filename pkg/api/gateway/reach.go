package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// portTripper reaches a port of a sandbox at the sandbox's address. If the address
// refuses, it goes through the agent, because most development servers listen on
// 127.0.0.1 only.
type portTripper struct {
	direct, agent http.RoundTripper
	port          uint16
}

func (p *portTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	body := r.Body
	first := r.Clone(r.Context())
	if body != nil && body != http.NoBody {
		first.Body = held{body}
	}
	resp, err := p.direct.RoundTrip(first)
	if err == nil || !errors.Is(err, syscall.ECONNREFUSED) {
		return resp, err
	}
	second := r.Clone(r.Context())
	prefix := "/proxy/" + strconv.Itoa(int(p.port))
	second.URL.Path, second.URL.RawPath = prefix+r.URL.Path, prefix+r.URL.EscapedPath()
	return p.agent.RoundTrip(second)
}

// held is a body that a dial which fails does not close.
type held struct{ io.ReadCloser }

func (held) Close() error { return nil }

// NetConn is that of the body (sourced).
func (h held) NetConn() net.Conn {
	if b, ok := h.ReadCloser.(interface{ NetConn() net.Conn }); ok {
		return b.NetConn()
	}
	return nil
}

// maxHints is how many interim answers (1xx) may come before the real one.
const maxHints = 32

// traced bounds interim answers: ReverseProxy passes each on, which lifts the transport's
// own bound. It notes in got by which connection the request goes.
func traced(ctx context.Context, got *net.Conn) context.Context {
	n := 0
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(c httptrace.GotConnInfo) { *got = c.Conn },
		Got1xxResponse: func(int, textproto.MIMEHeader) error {
			if n++; n > maxHints {
				return fmt.Errorf("more than %d interim (1xx) responses", maxHints)
			}
			return nil
		},
	})
}

// poolKey is the host of URLs into a sandbox, by which connections are pooled: the
// sandbox's id, which is never used twice, and the time when it was started.
// Connections from before a restart seem open, since the link went away without a
// packet.
func poolKey(r *record.Record) string {
	return r.ID + "-" + strconv.FormatInt(r.Started.UnixNano(), 36)
}

// portTransport connects to ports other than the agent's. See poolKey.
func (g *Gateway) portTransport() *http.Transport {
	return &http.Transport{
		Proxy: nil,
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			key, portText, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			id, _, _ := strings.Cut(key, "-")
			port, err := strconv.ParseUint(portText, 10, 16)
			if err != nil {
				return nil, err
			}
			rec, err := g.cfg.Sandboxes.Get(ctx, id)
			if err != nil {
				return nil, err
			}
			conn, err := g.cfg.Agents.Dial(ctx, rec, uint16(port))
			if err != nil {
				return nil, err
			}
			return relay.New(conn), nil
		},
		DisableCompression:     true,
		MaxIdleConnsPerHost:    4,
		MaxIdleConns:           1024,
		IdleConnTimeout:        30 * time.Second,
		MaxResponseHeaderBytes: 64 << 10,
	}
}

// holdPending is how long a request to the agent waits for a sandbox that is still
// being made: SDKs poll every 200 ms, and so their first poll succeeds.
const holdPending = 5 * time.Second

// Enter is Reachable for a request that uses a sandbox until leave is called. It wakes one that is
// asleep; rec then becomes its newest record.
func (g *Gateway) Enter(ctx context.Context, rec *record.Record, port uint16) (leave func(), err error) {
	if err := g.awaitPending(ctx, rec, port); err != nil {
		return nil, err
	}
	leave = func() {}
	if g.cfg.Use != nil {
		if leave, err = g.cfg.Use(ctx, rec); err != nil {
			return nil, fmt.Errorf("wake sandbox %s: %w", rec.ID, err)
		}
	}
	if err := g.refusal(rec); err != nil {
		leave()
		return nil, err
	}
	return leave, nil
}

// isPing reports whether a request only asks the agent whether it is there. It is no use of the
// sandbox.
func isPing(r *http.Request, port uint16, t *Target) bool {
	return port == wire.AgentPort && strings.TrimSuffix(t.Rest, "/") == "/ping" && r.Method == http.MethodGet
}

// Reachable refuses a sandbox that does not run. A request to the agent waits for a
// sandbox that is being made; rec then becomes its newest record.
func (g *Gateway) Reachable(ctx context.Context, rec *record.Record, port uint16) error {
	if err := g.awaitPending(ctx, rec, port); err != nil {
		return err
	}
	return g.refusal(rec)
}

func (g *Gateway) awaitPending(ctx context.Context, rec *record.Record, port uint16) error {
	if !rec.State.Beginning() || port != wire.AgentPort {
		return nil
	}
	hold, cancel := context.WithTimeout(ctx, holdPending)
	defer cancel()
	now, err := g.cfg.Sandboxes.Await(hold, rec.ID)
	switch {
	case err == nil:
		*rec = now
	case ctx.Err() != nil:
		return ctx.Err()
	case hold.Err() == nil:
		return fmt.Errorf("wait for sandbox %s: %w", rec.ID, err)
	}
	return nil
}

// refusal is why a sandbox cannot answer; nil: it runs.
func (g *Gateway) refusal(rec *record.Record) error {
	switch rec.State {
	case record.Running:
		return nil
	case record.Creating, record.Starting:
		return errs.New(errs.Unavailable, "sandbox %s is still being created; try again in a moment", rec.ID)
	case record.Deleting:
		return httperr.NoSandbox(rec.ID)
	case record.Ended:
		return Ended(rec)
	case record.Pausing, record.Paused, record.Hibernating, record.Hibernated:
		if rec.Asleep() {
			return errs.New(errs.WrongState, "sandbox %s is asleep because it was idle, and this request does not wake it; a command "+
				"does, and `sandboxctl resume %s`", rec.ID, rec.ID)
		}
		if rec.State == record.Hibernating || rec.State == record.Hibernated {
			return errs.New(errs.WrongState, "sandbox %s hibernates, because a client has put its memory on disk, and cannot answer; "+
				"resume it first (`sandboxctl resume %s`)", rec.ID, rec.ID)
		}
		return errs.New(errs.WrongState, "sandbox %s is %s and cannot answer; resume it first (`sandboxctl resume %s`)", rec.ID,
			g.cfg.State(rec), rec.ID)
	}
	return errs.New(errs.Unavailable, "sandbox %s is %s; try again in a moment", rec.ID, g.cfg.State(rec))
}

// Ended is the error of a request into a sandbox that has ended.
func Ended(rec *record.Record) error {
	return errs.New(errs.WrongState, "sandbox %s has ended (%s) and no longer answers: %s", rec.ID, rec.Reason,
		cmp.Or(rec.Message, "create another sandbox"))
}

// drainTime is how long the last bytes of a sandbox that has ended may take to
// arrive.
const drainTime = time.Second

// UntilEnd is a context for bytes from a sandbox. It ends soon after the sandbox has,
// and its cause says so. The link itself goes away without a packet.
func (g *Gateway) UntilEnd(ctx context.Context, rec *record.Record) (context.Context, context.CancelFunc) {
	id, started := rec.ID, rec.Started
	ctx, cancel := context.WithCancelCause(ctx)
	// A callback, and no goroutine that waits: there may be 1,000 terminals.
	stop := context.AfterFunc(g.cfg.Sandboxes.Life(id), func() {
		t := time.NewTimer(drainTime)
		defer t.Stop()
		select {
		case <-t.C:
			if err := g.ended(ctx, id, started); err != nil {
				cancel(err)
			}
		case <-ctx.Done():
		}
	})
	return ctx, func() { stop(); cancel(nil) }
}

// ended says how a sandbox that was started at started has ended. It is nil if that
// sandbox still runs.
func (g *Gateway) ended(ctx context.Context, id string, started time.Time) error {
	rec, err := g.cfg.Sandboxes.Get(ctx, id)
	switch {
	case errs.Is(err, errs.NotFound):
		return errs.New(errs.NotFound, "sandbox %s ended (deleted) during the request", id)
	case err == nil && (rec.State == record.Ended || rec.State == record.Stopping):
		return errs.New(errs.WrongState, "sandbox %s ended (%s) during the request: %s", id, rec.Reason, rec.Message)
	case err == nil && rec.Hibernation != nil:
		return errs.New(errs.WrongState, "sandbox %s went into hibernation during the request; resume it (`sandboxctl resume %s`) and "+
			"try again", id, id)
	case err == nil && !started.IsZero() && !rec.Started.Equal(started):
		return errs.New(errs.WrongState, "sandbox %s ended during the request and has been started again; try again", id)
	}
	return nil
}

// Unreachable says that nothing answers at a port, in the form that SDKs expect: 502
// with a body.
func Unreachable(err error, id string, port uint16) error {
	if _, ok := errors.AsType[*errs.Error](err); ok {
		return err
	}
	what := "nothing listens there, or the server closed the connection"
	if errors.Is(err, context.DeadlineExceeded) {
		what = "it did not answer in time"
	}
	e := errs.Wrap(err, errs.Unavailable, "port %d of sandbox %s cannot be reached: %s; start a server there, or inspect the sandbox "+
		"with `sandboxctl inspect %s`", port, id, what, id)
	return httperr.With(http.StatusBadGateway, errs.Wire(e, "GENERAL::UNKNOWN_ERROR"))
}
