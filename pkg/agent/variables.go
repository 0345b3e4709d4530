package agent

import (
	"context"
	"net/http"
	"strings"
	"sync"
)

// variables are those that the host gives the guest beside its own, and may change while the
// guest runs. The agent is told them when it is asked to start a program, and not when they change:
// one that is paused, or hangs, keeps nobody who changes them waiting.
type variables struct {
	read func(context.Context) (map[string]string, error) // nil: there are none

	mu sync.Mutex
	// How often they have changed, and how often they had when they were last told; guarded by mu.
	changed, told uint64
	telling       telling // the last one; guarded by mu
}

// A telling is one message with variables to the agent. All requests that need it wait for the
// same one, so that an agent that does not answer keeps them waiting once.
type telling struct {
	changed uint64          // of variables, when they were read
	over    <-chan struct{} // closed when the agent has answered, or has not for Client.patience; nil: there was none
}

// GiveVariables has the agent know the variables that read returns before it gets the next request
// that starts a program, which has them. If that fails, or takes longer than 10 s, the request is
// sent all the same, and the next one tries again. It is called before the client is used.
func (c *Client) GiveVariables(read func(context.Context) (map[string]string, error)) {
	c.variables.read = read
	c.VariablesChanged()
}

// VariablesChanged says that read returns others from now on. It does not wait.
func (c *Client) VariablesChanged() {
	c.variables.mu.Lock()
	defer c.variables.mu.Unlock()
	c.variables.changed++
}

// startsProgram reports whether the agent may start a program for r that gets the variables. The
// shell of a session has those with which the session began.
func startsProgram(r *http.Request) bool {
	switch p := r.URL.Path; r.Method {
	case http.MethodPost:
		return p == "/command" || p == "/session" || p == "/pty" || p == "/code" || p == "/code/context"
	case http.MethodGet:
		return strings.HasPrefix(p, "/pty/") && strings.HasSuffix(p, "/ws")
	}
	return false
}

// tellVariables returns when the agent knows the variables of the moment of its call, or one
// telling of them has failed, or ctx has ended. It waits for two tellings at most: one that had
// begun before they changed, and its own.
func (c *Client) tellVariables(ctx context.Context) {
	v := &c.variables
	if v.read == nil {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for want := v.changed; v.told < want && ctx.Err() == nil; {
		if v.telling.isOver() {
			v.telling = c.tell(v.changed)
		}
		t := v.telling
		v.mu.Unlock()
		select {
		case <-t.over:
		case <-ctx.Done():
		}
		v.mu.Lock()
		if t.changed >= want {
			return
		}
	}
}

func (t telling) isOver() bool {
	if t.over == nil {
		return true
	}
	select {
	case <-t.over:
		return true
	default:
		return false
	}
}

// tell begins a telling. It belongs to no request: others may wait for it, too. The caller holds mu.
func (c *Client) tell(changed uint64) telling {
	ctx, end := context.WithTimeout(context.Background(), c.patience)
	go func() {
		defer end()
		if c.putVariables(ctx) {
			c.variables.mu.Lock()
			defer c.variables.mu.Unlock()
			c.variables.told = max(c.variables.told, changed)
		}
	}()
	return telling{changed, ctx.Done()}
}

// putVariables reports whether the agent has answered. One of an older release does not know the
// request, and need not be asked again: a start tells it.
func (c *Client) putVariables(ctx context.Context) bool {
	all, err := c.variables.read(ctx)
	if err != nil {
		return false
	}
	if all == nil {
		all = map[string]string{} // null would leave those that were
	}
	status, err := c.put(ctx, "/variables", all)
	return err == nil && (status == http.StatusOK || status == http.StatusNotFound)
}
