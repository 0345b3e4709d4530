package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Terminals are the terminals of a sandbox. The strings that describe them come
// from the guest.
type Terminals struct{ sandbox }

// A Terminal is a session in a sandbox: a process at a terminal, or at three
// pipes, that starts when the first client attaches and outlives all of them
// and the daemon.
type Terminal struct {
	ID string

	in sandbox
}

// Create makes a session for cmd; without Argv it is an interactive shell.
// The terminal has cols by rows characters, or 80 by 24 if either is 0.
func (c Terminals) Create(ctx context.Context, cmd Command, cols, rows int) (*Terminal, error) {
	var reply agent.PtyCreated
	err := c.do(ctx, request{method: http.MethodPost, path: c.agentPath("/pty"), json: agent.PtyRequest{
		Argv: cmd.Argv, Cwd: cmd.Dir, Envs: cmd.Env, UID: cmd.UID, GID: cmd.GID,
		Timeout: cmd.Timeout.Milliseconds(), Cols: cols, Rows: rows,
	}}, &reply)
	if err != nil {
		return nil, err
	}
	return c.Get(reply.SessionID)
}

// Get returns a session by its id. It does not ask whether the session exists.
func (c Terminals) Get(id string) (*Terminal, error) {
	if !agent.IsCommandID(id) {
		return nil, errs.New(errs.Invalid, "%q is not the id of a terminal", id)
	}
	return &Terminal{ID: id, in: c.sandbox}, nil
}

// List lists the sessions of a sandbox, oldest first.
func (c Terminals) List(ctx context.Context) ([]agent.PtyStatus, error) {
	var l agent.PtyList
	err := c.do(ctx, get(c.agentPath("/pty")), &l)
	return l.Sessions, err
}

// Status returns the state of the session.
func (t *Terminal) Status(ctx context.Context) (st agent.PtyStatus, err error) {
	err = t.in.do(ctx, get(t.in.agentPath("/pty/"+t.ID)), &st)
	return st, err
}

// Remove hangs up: the process and what it started are ended.
func (t *Terminal) Remove(ctx context.Context) error {
	return t.in.do(ctx, request{method: http.MethodDelete, path: t.in.agentPath("/pty/" + t.ID)}, nil)
}

// Signal sends a signal, by name as "SIGTERM", to the group of the session's
// first process.
func (t *Terminal) Signal(ctx context.Context, name string) error {
	return Commands{t.in}.Signal(ctx, t.ID, name)
}

var (
	// ErrTakenOver ends Attach when another client has taken the session over.
	ErrTakenOver = errors.New("another client has taken over the terminal")
	// errBroke is a connection that ended without a reason.
	errBroke = errors.New("the connection to the terminal broke")
)

// retryEvery is between two attempts to connect again. There is no event for a
// daemon that is back.
const retryEvery = 100 * time.Millisecond

// Attach connects to the session and serves it until the process has ended, v.In
// fails, or ctx ends. A connection that breaks is made again, for v.Patience, and
// goes on at the byte where it broke. Errors: what v.In or v.Out returned,
// ErrTakenOver, ErrLost if the connection did not come back, or what the daemon says.
func (t *Terminal) Attach(ctx context.Context, v View) (Exit, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	a := &attachment{t: t, view: v, offset: v.Since, typed: make(chan []byte), left: make(chan struct{})}
	a.begin = sync.OnceFunc(func() { // not before there is somebody to type to
		if v.In != nil {
			go a.read(ctx, cancel)
		}
	})
	takeover, broken := v.Takeover, time.Time{}
	for {
		exit, err := a.connect(ctx, takeover)
		if err == nil {
			return exit, nil
		}
		select {
		case <-a.left:
			return Exit{}, a.why
		default:
		}
		switch {
		case ctx.Err() != nil:
			return Exit{}, context.Cause(ctx)
		case a.joined: // the first error since it was connected
			a.joined, broken = false, time.Now()
		case broken.IsZero():
			return Exit{}, err
		}
		if !errors.Is(err, errBroke) && !errs.Is(err, errs.Unavailable) {
			return Exit{}, err
		}
		if time.Since(broken) > v.Patience {
			return Exit{}, fmt.Errorf("%w (%w)", ErrLost, err)
		}
		if v.Lost != nil && !a.lost {
			a.lost = true
			v.Lost(err)
		}
		takeover = true // the agent may not know yet that the old connection is gone
		select {
		case <-ctx.Done():
		case <-time.After(retryEvery):
		}
	}
}

// dial makes the WebSocket. It calls pinged for each ping of the agent.
func (t *Terminal) dial(ctx context.Context, pipe, takeover bool, since int64, pinged func()) (*websocket.Conn, error) {
	q := url.Values{"since": {strconv.FormatInt(since, 10)}}
	if pipe {
		q.Set("pty", "0")
	}
	if takeover {
		q.Set("takeover", "1")
	}
	h := http.Header{}
	if t.in.key != "" {
		h.Set(wire.HeaderAPIKey, t.in.key)
	}
	hold, cancel := context.WithTimeoutCause(ctx, t.in.answer, errSilent)
	defer cancel()
	ws, resp, err := websocket.Dial(hold, t.in.base+"/v1"+t.in.agentPath("/pty/"+t.ID+"/ws")+"?"+q.Encode(),
		&websocket.DialOptions{HTTPClient: t.in.http, HTTPHeader: h, OnPingReceived: func(context.Context, []byte) bool {
			pinged()
			return true
		}})
	switch {
	case err == nil:
		ws.SetReadLimit(2 * agent.MaxPtyReplay)
		return ws, nil
	case resp != nil && resp.StatusCode != http.StatusSwitchingProtocols:
		return nil, fromResponse(resp)
	case context.Cause(hold) == errSilent: //nolint:errorlint // it is passed through unwrapped
		return nil, errs.Wrap(err, errs.Unavailable, "%s did not answer within %s", t.in.host, t.in.answer)
	}
	return nil, t.in.lost(ctx, err)
}
