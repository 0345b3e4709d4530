package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// Volumes are the named volumes of a host.
type Volumes struct{ *daemon }

func volumePath(name string) string { return "/volumes/" + url.PathEscape(name) }

// Create makes a named volume. An empty size is the host's default.
func (c Volumes) Create(ctx context.Context, name, size string) (wire.Volume, error) {
	return ask[wire.Volume](ctx, c.daemon, request{
		method: http.MethodPost, path: "/volumes", json: wire.VolumeRequest{Name: name, Size: size},
	})
}

// List lists the named volumes there are, by name.
func (c Volumes) List(ctx context.Context) ([]wire.Volume, error) {
	var l wire.VolumeList
	err := c.do(ctx, get("/volumes"), &l)
	return l.Items, err
}

// Get returns one named volume.
func (c Volumes) Get(ctx context.Context, name string) (wire.Volume, error) {
	return ask[wire.Volume](ctx, c.daemon, get(volumePath(name)))
}

// Remove deletes a volume with all that is in it, unless a sandbox has it
// mounted.
func (c Volumes) Remove(ctx context.Context, name string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: volumePath(name)}, nil)
}

// PruneAll deletes every volume that no sandbox has mounted.
func (c Volumes) PruneAll(ctx context.Context) (wire.VolumePruneReport, error) {
	return ask[wire.VolumePruneReport](ctx, c.daemon, request{
		method: http.MethodPost, path: "/volumes/prune", query: url.Values{"all": {"true"}},
	})
}

// Pools are the pools of ready sandboxes of a host.
type Pools struct{ *daemon }

func poolPath(name string) string { return "/pools/" + url.PathEscape(name) }

// List lists the pools there are, by name.
func (c Pools) List(ctx context.Context) ([]wire.Pool, error) {
	var l wire.PoolList
	err := c.do(ctx, get("/pools"), &l)
	return l.Items, err
}

// Get returns a pool.
func (c Pools) Get(ctx context.Context, name string) (wire.Pool, error) {
	return ask[wire.Pool](ctx, c.daemon, get(poolPath(name)))
}

// Create makes a pool. Its members are made after the answer.
func (c Pools) Create(ctx context.Context, r wire.PoolRequest) (wire.Pool, error) {
	return ask[wire.Pool](ctx, c.daemon, request{method: http.MethodPost, path: "/pools", json: r})
}

// Update changes the capacity of a pool, and its template unless that is empty.
func (c Pools) Update(ctx context.Context, name string, r wire.PoolRequest) (wire.Pool, error) {
	return ask[wire.Pool](ctx, c.daemon, request{method: http.MethodPut, path: poolPath(name), json: r})
}

// Remove deletes a pool. Its sandboxes stay.
func (c Pools) Remove(ctx context.Context, name string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: poolPath(name)}, nil)
}
