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

// Prune deletes every volume that no sandbox has mounted.
func (c Volumes) Prune(ctx context.Context) (wire.VolumePruneReport, error) {
	return ask[wire.VolumePruneReport](ctx, c.daemon, request{method: http.MethodPost, path: "/volumes/prune"})
}
