package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

func volumePath(name string) string { return "/volumes/" + url.PathEscape(name) }

// CreateVolume makes a named volume. An empty size is the host's default.
func (c *Client) CreateVolume(ctx context.Context, name, size string) (v wire.Volume, err error) {
	err = c.do(ctx, request{method: http.MethodPost, path: "/volumes", json: wire.VolumeRequest{Name: name, Size: size}}, &v)
	return v, err
}

// Volumes lists the named volumes there are, by name.
func (c *Client) Volumes(ctx context.Context) ([]wire.Volume, error) {
	var l wire.VolumeList
	err := c.do(ctx, request{method: http.MethodGet, path: "/volumes"}, &l)
	return l.Items, err
}

// Volume returns one named volume.
func (c *Client) Volume(ctx context.Context, name string) (v wire.Volume, err error) {
	err = c.do(ctx, request{method: http.MethodGet, path: volumePath(name)}, &v)
	return v, err
}

// RemoveVolume deletes a volume with all that is in it, unless a sandbox has it
// mounted.
func (c *Client) RemoveVolume(ctx context.Context, name string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: volumePath(name)}, nil)
}

// PruneVolumes deletes every volume that no sandbox has mounted.
func (c *Client) PruneVolumes(ctx context.Context) (p wire.VolumePruneReport, err error) {
	err = c.do(ctx, request{method: http.MethodPost, path: "/volumes/prune"}, &p)
	return p, err
}
