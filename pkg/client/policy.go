package client

import (
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// Policy is what a sandbox may reach.
type Policy struct{ sandbox }

// Get returns what a sandbox may reach. The first rule that fits a flow decides;
// where none fits, the default does.
func (c Policy) Get(ctx context.Context) (wire.PolicyStatus, error) {
	return ask[wire.PolicyStatus](ctx, c.daemon, get(c.path("/networkpolicy")))
}

// Patch puts rules before those that a sandbox has, and drops old ones that they
// cover. They hold when it has returned; open flows that they deny have ended.
// The answer has no Policy.
func (c Policy) Patch(ctx context.Context, rules []wire.NetworkRule) (wire.PolicyStatus, error) {
	return ask[wire.PolicyStatus](ctx, c.daemon, request{method: http.MethodPatch, path: c.path("/networkpolicy"), json: rules})
}

// Remove takes away all rules for some targets, as 203.0.113.0/24, whatever
// their ports. Where there are none PolicyStatus.Reason says so. The answer has no
// Policy.
func (c Policy) Remove(ctx context.Context, targets []string) (wire.PolicyStatus, error) {
	return ask[wire.PolicyStatus](ctx, c.daemon, request{method: http.MethodDelete, path: c.path("/networkpolicy"), json: targets})
}
