// Package auth says who sends a request, and what that client may do:
//
//	connection ─▶ Listener ─▶ Peer: a user of the host, or an address
//	request ─▶ Guard: API key ─▶ record.Role ─▶ handler, or a refusal
//
// The table of routes (pkg/api/routes.go) says which role a route needs. The gateway
// checks the tokens of single ports.
//
// The surprise: a daemon may ask for no key at all (Config.Insecure). It refuses web
// pages all the same, because guests serve pages under the API's own address.
package auth

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Config is what the host's owner decides.
type Config struct {
	Keys     []string // of admins, for as long as the daemon runs
	Insecure bool     // no key is asked for, as long as there is none at all
	Store    Store    // keeps other keys; may be nil
	// ExternalHost is the name under which clients reach the API. It may carry a path.
	ExternalHost string
	// RequestsPerSecond is how many requests one client may send; 0: no bound.
	RequestsPerSecond int
	Now               func() time.Time // nil: time.Now
}

// A Guard knows the API keys and what they open. Make one with New.
type Guard struct {
	keys     *keyring
	rates    rates
	insecure bool
	external string // host, without a path; may be empty
}

// New makes a Guard. It fails if the keys of the store cannot be read.
func New(c Config) (*Guard, error) {
	if c.Now == nil {
		c.Now = time.Now
	}
	g := &Guard{insecure: c.Insecure, rates: rates{perSecond: c.RequestsPerSecond, now: c.Now, of: map[string]*rate.Limiter{}}}
	g.external, _, _ = strings.Cut(c.ExternalHost, "/")
	var err error
	if g.keys, err = newKeyring(c.Keys, c.Store); err != nil {
		return nil, fmt.Errorf("read API keys: %w", err)
	}
	return g, nil
}

// WhoIs names the sender of a request for the log, and says what it may do, and how long:
// life ends, with the reason as its cause, when WhoIs would answer otherwise. The empty
// role may do nothing. Whoever may open the Unix socket is an admin: the host's owner
// gives it to root and one group.
func (g *Guard) WhoIs(r *http.Request) (actor string, role record.Role, life context.Context) {
	p := PeerOf(r)
	key, ok := g.keys.find(givenKey(r))
	open := g.open()
	switch {
	case weak.Off(weak.Keys):
		return "anyone " + p.Actor, record.Admin, forever
	case p.Unix:
		return p.Actor, record.Admin, forever
	case ok && !expired(key.Key):
		return "key " + key.Name + " " + p.Actor, key.Role, key.life
	case open != nil && !p.Gateway:
		if g.Unauthorized(r) == nil {
			role = record.Admin
		}
		return "anyone " + p.Actor, role, open
	}
	return "anonymous " + p.Actor, "", forever
}

// Client names the client that a request counts for, where there are limits for each
// client: a user of the host, a key, or else an address.
func (g *Guard) Client(r *http.Request) string {
	p := PeerOf(r)
	if key, ok := g.keys.find(givenKey(r)); ok && !p.Unix {
		return "key " + key.Name
	}
	return p.user
}

// Holder is record.Key.Holder of the key that a request counts for; empty: it counts for
// none.
func (g *Guard) Holder(r *http.Request) string {
	if key, ok := g.keys.find(givenKey(r)); ok && !PeerOf(r).Unix {
		return key.Holder()
	}
	return ""
}

// givenKey is the key that a request carries, in whichever header, or "".
func givenKey(r *http.Request) string {
	for _, h := range []string{wire.HeaderAPIKey, wire.HeaderAPIKeyOther} {
		if k := r.Header.Get(h); k != "" {
			return k
		}
	}
	if scheme, k, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
		return strings.TrimSpace(k)
	}
	return ""
}

// Role is the role of a secret, and how long it has that; empty: it has none.
func (g *Guard) Role(secret string) (role record.Role, life context.Context) {
	key, ok := g.keys.find(secret)
	if !ok || expired(key.Key) {
		return "", forever
	}
	return key.Role, key.life
}

// Holds reports whether the value of a header is a key of the API, by itself or as a
// bearer token. A key that has expired counts: no guest may see it either.
func (g *Guard) Holds(value string) bool {
	if scheme, k, ok := strings.Cut(value, " "); ok && strings.EqualFold(scheme, "Bearer") {
		value = k
	}
	_, ok := g.keys.find(strings.TrimSpace(value))
	return ok
}

// Unauthorized is the refusal of a request without a role. Where the daemon asks for
// no key, it is nil for a request that no web page can have sent.
func (g *Guard) Unauthorized(r *http.Request) error {
	if g.Keyless() {
		if err := g.foreign(r); err != nil {
			return err
		}
		return g.FromPage(r)
	}
	if givenKey(r) == "" {
		return httperr.New(http.StatusUnauthorized, "MISSING_API_KEY", errs.Denied,
			"this request needs an API key: send it as header %s (the SDKs take it from OPEN_SANDBOX_API_KEY), or use the Unix socket",
			wire.HeaderAPIKey)
	}
	if err := g.past(r); err != nil {
		return err
	}
	return refused("this daemon does not know the API key; its keys are in the file that listen.api_key_file names, and " +
		"`sandboxctl key ls` lists the others")
}

// past says why the key of a request is one no more; nil: it never was, or still is.
func (g *Guard) past(r *http.Request) error {
	given := givenKey(r)
	if key, ok := g.keys.find(given); ok && expired(key.Key) {
		return errExpired(key.Key)
	}
	if key, ok := g.keys.removed(given); ok {
		return errRemoved(key)
	}
	return nil
}

// Refusal says why a request may not do what needs an operator: its role is too low, or
// the API asks for no key and the request may come from a web page, or the key is a key
// no more. It is nil for any other request without a role: then the answer may name
// another way in.
func (g *Guard) Refusal(r *http.Request, role record.Role) error {
	switch {
	case g.Keyless() && !PeerOf(r).Gateway:
		return g.Unauthorized(r)
	case role != "":
		return Forbidden(role, record.Operator)
	}
	return g.past(r)
}

// Public reports whether ports of guests are open to the sender of r without a token.
func (g *Guard) Public(r *http.Request) bool {
	p := PeerOf(r)
	return p.public || !p.Gateway && g.Keyless() && g.foreign(r) == nil
}

// Allow fails with the status 429 if the client of r has sent too many requests.
func (g *Guard) Allow(r *http.Request) error { return g.rates.allow(g.Client(r)) }

// Keys lists the keys, those of the configuration first. They hold no secrets.
func (g *Guard) Keys() []record.Key {
	var all []record.Key
	for _, h := range g.keys.all.Load().keys {
		all = append(all, h.Key)
	}
	return all
}

// KeepsKeys reports whether keys can be made.
func (g *Guard) KeepsKeys() bool { return g.keys.store != nil }

// Close ends what a Guard does by itself. It ends no request.
func (g *Guard) Close() { g.keys.close() }

// AddKey adds a key to the store. It is valid from then on.
func (g *Guard) AddKey(ctx context.Context, k record.Key) error {
	return g.keys.change(ctx, func(ctx context.Context) error { return g.keys.store.AddKey(ctx, k) })
}

// RemoveKey removes a key from the store. It is invalid from then on, and its requests end.
func (g *Guard) RemoveKey(ctx context.Context, name string) error {
	return g.keys.change(ctx, func(ctx context.Context) error { return g.keys.store.RemoveKey(ctx, name) })
}

// Forbidden is the refusal of a key whose role does not cover the one that is needed.
func Forbidden(have, need record.Role) error {
	return httperr.New(http.StatusForbidden, "SANDBOX::FORBIDDEN", errs.Denied,
		"this API key has the role %s, but the request needs %s; use another key (an admin runs `sandboxctl key create NAME --role %s`)",
		have, need, need)
}
