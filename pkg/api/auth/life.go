package auth

import (
	"context"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A life lasts as long as something admits requests: a key, a signed address, or that no key is
// asked for. Its cause is the refusal that the next request would get, as a Revocation (httperr).
//
//	WhoIs ─▶ role, life ─▶ httperr.During: the request's context ─▶ handler, stream, WebSocket
//
// So nothing that lasts asks again whether it may: all of it hangs on the context of its request.
type life struct {
	context.Context
	end context.CancelCauseFunc
}

func newLife() life {
	ctx, cancel := context.WithCancelCause(context.Background())
	return life{ctx, cancel}
}

// forever is the life of what nobody can take back.
var forever = context.Background()

func refused(format string, args ...any) error {
	return httperr.New(http.StatusUnauthorized, "INVALID_API_KEY", errs.Denied, format, args...)
}

func errRemoved(k record.Key) error {
	return httperr.Revoke(refused("API key %s was removed; ask an admin for a new one (`sandboxctl key create`)", k.Name))
}

func errExpired(k record.Key) error {
	return httperr.Revoke(refused("API key %s expired at %s; ask an admin for a new one (`sandboxctl key create`)", k.Name,
		k.Expires.Format(time.RFC3339)))
}

func errKeyNeeded() error {
	return httperr.Revoke(refused("an admin has made the first API key of this daemon, so requests need one from now on: send it as "+
		"header %s (the SDKs take it from OPEN_SANDBOX_API_KEY), or use the Unix socket", wire.HeaderAPIKey))
}
