package client

import (
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// Policy returns what a sandbox may reach. Of its rules the first that fits a flow
// decides, else the default does.
func (c *Client) Policy(ctx context.Context, idOrName string) (p wire.PolicyStatus, err error) {
	err = c.do(ctx, request{method: http.MethodGet, path: sandboxPath(idOrName, "/networkpolicy")}, &p)
	return p, err
}

// PatchPolicy puts rules before those that a sandbox has, of which it drops what
// they cover. They hold for flows that open when it has returned; those that are
// open go on. The answer has no Policy.
func (c *Client) PatchPolicy(ctx context.Context, idOrName string, rules []wire.NetworkRule) (p wire.PolicyStatus, err error) {
	err = c.do(ctx, request{method: http.MethodPatch, path: sandboxPath(idOrName, "/networkpolicy"), json: rules}, &p)
	return p, err
}

// RemoveTargets takes away all rules for some targets, as 203.0.113.0/24, whatever
// their ports. Where there are none PolicyStatus.Reason says so. The answer has no
// Policy.
func (c *Client) RemoveTargets(ctx context.Context, idOrName string, targets []string) (p wire.PolicyStatus, err error) {
	err = c.do(ctx, request{method: http.MethodDelete, path: sandboxPath(idOrName, "/networkpolicy"), json: targets}, &p)
	return p, err
}
