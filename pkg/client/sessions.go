package client

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// Sessions are the shells of a sandbox that live from run to run and keep what a
// shell keeps: variables, functions, the directory.
type Sessions struct{ sandbox }

// Create starts a shell, in dir or, if that is empty, in the image's WORKDIR.
func (c Sessions) Create(ctx context.Context, dir string) (agent.SessionCreated, error) {
	return ask[agent.SessionCreated](ctx, c.daemon, request{
		method: http.MethodPost, path: c.agentPath("/session"), json: agent.SessionRequest{Cwd: dir}, patient: true,
	})
}

// Remove ends a shell and all that it has started.
func (c Sessions) Remove(ctx context.Context, session string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: c.agentPath("/session/" + url.PathEscape(session))}, nil)
}

// Line is what to run in a session.
type Line struct {
	Shell   string        // read as if it was typed
	Dir     string        // of this line only
	Timeout time.Duration // the line is ended after it, the session is not; 0: never
}

// Run runs a line in a session, which runs one at a time. It goes on when this client
// leaves. Its Signal ends the line, whichever signal is given: the processes that the
// line has started are killed, and the session lives on.
func (c Sessions) Run(ctx context.Context, session string, line Line) (*Process, error) {
	p, err := c.begin(ctx, "/session/"+url.PathEscape(session)+"/run", agent.SessionRun{
		Command: line.Shell, Cwd: line.Dir, Timeout: line.Timeout.Milliseconds(),
	})
	if err == nil {
		p.session = true
	}
	return p, err
}
