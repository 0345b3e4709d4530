package client

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// Keys are the API keys of a daemon.
type Keys struct{ *daemon }

// Create makes an API key, whose Secret is returned this once. An empty role is
// an operator's; expires zero is never.
func (c Keys) Create(ctx context.Context, name, role string, expires time.Time) (k wire.NewKey, err error) {
	req := wire.KeyRequest{Name: name, Role: role}
	if !expires.IsZero() {
		req.ExpiresAt = expires.UTC().Format(time.RFC3339Nano)
	}
	err = c.do(ctx, request{method: http.MethodPost, path: "/keys", json: req}, &k)
	return k, err
}

// List lists the API keys there are, those of the configuration first.
func (c Keys) List(ctx context.Context) ([]wire.Key, error) {
	var l wire.KeyList
	err := c.do(ctx, get("/keys"), &l)
	return l.Items, err
}

// Remove removes an API key; from then on it opens nothing.
func (c Keys) Remove(ctx context.Context, name string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: "/keys/" + url.PathEscape(name)}, nil)
}
