package client

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// Policy is what a sandbox may reach, and what it has reached.
type Policy struct{ sandbox }

// Get returns what a sandbox may reach. The first rule that fits a flow decides;
// where none fits, the default does.
func (c Policy) Get(ctx context.Context) (wire.PolicyStatus, error) {
	return ask[wire.PolicyStatus](ctx, c.daemon, get(c.path("/networkpolicy")))
}

// Put replaces the policy by a wire.NetworkPolicy in JSON. It holds as after Patch. The
// answer has no Policy.
func (c Policy) Put(ctx context.Context, policy json.RawMessage) (wire.PolicyStatus, error) {
	return ask[wire.PolicyStatus](ctx, c.daemon, request{method: http.MethodPut, path: c.path("/networkpolicy"), json: policy})
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

// Use gives a sandbox the policy NAME to follow, or NAME@VERSION. It holds as after Patch.
func (c Policy) Use(ctx context.Context, name string) (wire.SandboxPolicy, error) {
	return ask[wire.SandboxPolicy](ctx, c.daemon, request{
		method: http.MethodPut, path: c.path("/policy"), json: wire.PolicyRequest{Name: name},
	})
}

// Denials returns what the network refused a sandbox.
func (c Policy) Denials(ctx context.Context) (wire.Denials, error) {
	return ask[wire.Denials](ctx, c.daemon, get(c.path("/network/denials")))
}

// Explain says what the policy makes of HOST:PORT[/PROTO].
func (c Policy) Explain(ctx context.Context, target string) (wire.Explanation, error) {
	return ask[wire.Explanation](ctx, c.daemon, request{
		method: http.MethodGet, path: c.path("/network/explain"), query: url.Values{"target": {target}},
	})
}

// Test has a sandbox try to reach HOST:PORT.
func (c Policy) Test(ctx context.Context, target string) (wire.NetworkTest, error) {
	return ask[wire.NetworkTest](ctx, c.daemon, request{
		method: http.MethodPost, path: c.path("/network/test"), query: url.Values{"target": {target}},
	})
}

// Policies are the named network policies of a host.
type Policies struct{ *daemon }

func policyPath(name string) string { return "/policies/" + url.PathEscape(name) }

// List lists the named policies there are, by name, without their rules.
func (c Policies) List(ctx context.Context) ([]wire.PolicySummary, error) {
	var l wire.PolicyList
	err := c.do(ctx, get("/policies"), &l)
	return l.Items, err
}

// Get returns the newest version of NAME, or the one of NAME@VERSION.
func (c Policies) Get(ctx context.Context, name string) (wire.Policy, error) {
	return ask[wire.Policy](ctx, c.daemon, get(policyPath(name)))
}

// Put makes a policy, or adds a version to it, and moves the sandboxes that follow it. The
// body is a wire.NetworkPolicy.
func (c Policies) Put(ctx context.Context, name string, body json.RawMessage) (wire.PolicyEdit, error) {
	return ask[wire.PolicyEdit](ctx, c.daemon, request{method: http.MethodPut, path: policyPath(name), json: body})
}

// Remove deletes a policy, unless a sandbox uses it.
func (c Policies) Remove(ctx context.Context, name string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: policyPath(name)}, nil)
}

// Flows counts the connections of a sandbox by destination, the latest first. It is known
// also after the sandbox has ended.
func (c Policy) Flows(ctx context.Context) (wire.NetworkFlows, error) {
	return ask[wire.NetworkFlows](ctx, c.daemon, get(c.path("/network/flows")))
}

// Traffic counts the bytes, packets and connections of a sandbox, as Flows.
func (c Policy) Traffic(ctx context.Context) (wire.NetworkStats, error) {
	return ask[wire.NetworkStats](ctx, c.daemon, get(c.path("/network/stats")))
}
