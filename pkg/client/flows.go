package client

import (
	"context"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// Network is what a sandbox sent, received and connected to. It is known also after the
// sandbox has ended.
type Network struct{ sandbox }

// Flows counts the connections of a sandbox by destination, the latest first.
func (c Network) Flows(ctx context.Context) (wire.NetworkFlows, error) {
	return ask[wire.NetworkFlows](ctx, c.daemon, get(c.path("/network/flows")))
}

// Stats counts the bytes, packets and connections of a sandbox.
func (c Network) Stats(ctx context.Context) (wire.NetworkStats, error) {
	return ask[wire.NetworkStats](ctx, c.daemon, get(c.path("/network/stats")))
}
