package agent

import (
	"context"
	"fmt"
	"sync/atomic"
)

// variables are those that the host gives the guest beside its own, and may change while the
// guest runs. The agent is told them when it is asked for something, and not when they change:
// one that is paused, or hangs, keeps nobody who changes them waiting.
type variables struct {
	read func(context.Context) (map[string]string, error) // nil: there are none
	turn chan struct{}                                    // has one while they are sent

	// How often they have changed, and how often they had when they were last sent.
	changed, told atomic.Uint64
}

// GiveVariables has the agent know the variables that read returns before it gets the next
// request: its commands have them. If read fails, the request is sent all the same, and the next one
// tries again. It is called before the client is used.
func (c *Client) GiveVariables(read func(context.Context) (map[string]string, error)) {
	c.variables.read = read
	c.VariablesChanged()
}

// VariablesChanged says that read returns others from now on. It does not wait.
func (c *Client) VariablesChanged() { c.variables.changed.Add(1) }

// tellVariables returns when the agent knows the variables of the moment of its call. An agent of
// an older release does not know the request, which is no error: a start tells it.
func (c *Client) tellVariables(ctx context.Context) error {
	v := &c.variables
	if v.read == nil || v.told.Load() == v.changed.Load() {
		return nil
	}
	select {
	case v.turn <- struct{}{}:
		defer func() { <-v.turn }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	changed := v.changed.Load()
	if v.told.Load() == changed { // by another request
		return nil
	}
	all, err := v.read(ctx)
	if err != nil {
		return nil //nolint:nilerr // see GiveVariables
	}
	if all == nil {
		all = map[string]string{} // null would leave those that were
	}
	if _, err := c.put(ctx, "/variables", all); err != nil {
		return fmt.Errorf("send the agent variables: %w", err)
	}
	v.told.Store(changed)
	return nil
}
