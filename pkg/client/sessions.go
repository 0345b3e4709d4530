package client

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// NewSession starts a shell, in dir or, if that is empty, in the image's WORKDIR.
func (c *Client) NewSession(ctx context.Context, idOrName, dir string) (s agent.SessionCreated, err error) {
	err = c.do(ctx, request{method: http.MethodPost, path: agentPath(idOrName, "/session"), json: agent.SessionRequest{Cwd: dir}, patient: true}, &s)
	return s, err
}

// RemoveSession ends a shell and all that it has started.
func (c *Client) RemoveSession(ctx context.Context, idOrName, session string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: agentPath(idOrName, "/session/"+url.PathEscape(session))}, nil)
}

// Line is what to run in a session.
type Line struct {
	Shell   string        // read as if it was typed
	Dir     string        // of this line only
	Timeout time.Duration // the line is ended after it, the session is not; 0: never
}

// RunInSession runs a line in a session, which runs one at a time. It goes on when
// this client leaves. Whatever its Signal is called with, it ends the line: what
// the line has started is killed, and the session lives on.
func (c *Client) RunInSession(ctx context.Context, idOrName, session string, line Line) (*Process, error) {
	p, err := c.begin(ctx, idOrName, "/session/"+url.PathEscape(session)+"/run", agent.SessionRun{
		Command: line.Shell, Cwd: line.Dir, Timeout: line.Timeout.Milliseconds(),
	})
	if err == nil {
		p.session = true
	}
	return p, err
}
