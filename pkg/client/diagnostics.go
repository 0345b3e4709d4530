package client

import (
	"context"
	"io"
	"net/http"
	"net/url"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// Diagnostics say what is wrong with a sandbox, in any state.
type Diagnostics struct{ sandbox }

// Get asks what is wrong with a sandbox. kind is "logs", with the scopes
// container, lifecycle and all, or "events", with the scopes lifecycle, runtime,
// network and all.
func (c Diagnostics) Get(ctx context.Context, kind, scope string) (wire.Diagnostic, error) {
	return ask[wire.Diagnostic](ctx, c.daemon, request{
		method: http.MethodGet, path: c.path("/diagnostics/" + url.PathEscape(kind)), query: url.Values{"scope": {scope}},
	})
}

// Text returns the same as text for people: kind is "inspect", "summary", "logs" or
// "events". Query may bound it: tail and, of a summary, event_limit.
func (c Diagnostics) Text(ctx context.Context, kind string, query url.Values) (string, error) {
	resp, err := c.stream(ctx, request{method: http.MethodGet, path: c.path("/diagnostics/" + url.PathEscape(kind)), query: query})
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxReply))
	if err != nil {
		return "", c.lost(ctx, err)
	}
	return string(b), nil
}
