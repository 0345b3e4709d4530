package api

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// keyring is the API keys there are: those of the configuration, which are
// admins' and stay as long as the daemon, and those of the store, which come and
// go. Asking it takes no lock.
type keyring struct {
	store Keys
	all   atomic.Pointer[[]record.Key] // the configuration's first

	mu    sync.Mutex // around changes, so that all follows the store
	fixed []record.Key
}

// fixedPrefix begins the names of the configuration's keys.
const fixedPrefix = "configuration-"

func newKeyring(fixed []string, store Keys) (*keyring, error) {
	k := &keyring{store: store}
	for i, secret := range fixed {
		sum := sha256.Sum256([]byte(secret))
		k.fixed = append(k.fixed, record.Key{Name: fmt.Sprint(fixedPrefix, i+1), Role: record.Admin, Sum: sum[:]})
	}
	return k, k.read(context.Background())
}

// read takes over what is in the store.
// Preconditions: mu is held, or nobody else knows k.
func (k *keyring) read(ctx context.Context) error {
	all := slices.Clone(k.fixed)
	if k.store != nil {
		kept, err := k.store.Keys(ctx)
		if err != nil {
			return err
		}
		all = append(all, kept...)
	}
	k.all.Store(&all)
	return nil
}

// change changes the store and takes over what is in it then.
func (k *keyring) change(ctx context.Context, f func(context.Context) error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	ctx = context.WithoutCancel(ctx) // half of it would be a key that opens nothing, or one that still does
	if err := f(ctx); err != nil {
		return err
	}
	return k.read(ctx)
}

// find returns the key that a secret is; it may have expired. It compares in a
// time that depends on nothing secret.
func (k *keyring) find(secret string) (record.Key, bool) {
	if secret == "" {
		return record.Key{}, false
	}
	sum := sha256.Sum256([]byte(secret))
	all, found := *k.all.Load(), -1
	for i := range all {
		found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(sum[:], all[i].Sum), i, found)
	}
	if found < 0 {
		return record.Key{}, false
	}
	return all[found], true
}

// role is what a secret opens now; empty: nothing.
func (k *keyring) role(secret string) record.Role {
	key, ok := k.find(secret)
	if !ok || expired(key) {
		return ""
	}
	return key.Role
}

func expired(k record.Key) bool { return !k.Expires.IsZero() && !time.Now().Before(k.Expires) }

// keyRoutes are for who runs the daemon; seg[0] is "keys".
func (s *Server) keyRoutes(seg []string) (route, map[string]handler) {
	switch len(seg) {
	case 1:
		return route{name: "/keys"}, map[string]handler{http.MethodGet: s.listKeys, http.MethodPost: s.createKey}
	case 2:
		name := unescape(seg[1])
		return route{name: "/keys/{name}"}, only(http.MethodDelete, func(w http.ResponseWriter, r *http.Request) error { return s.removeKey(w, r, name) })
	}
	return route{}, nil
}

func (s *Server) listKeys(w http.ResponseWriter, _ *http.Request) error {
	out := wire.KeyList{Items: []wire.Key{}}
	for _, k := range *s.keys.all.Load() {
		out.Items = append(out.Items, toWireKey(k))
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func toWireKey(k record.Key) wire.Key {
	source := wire.KeyOfStore
	if strings.HasPrefix(k.Name, fixedPrefix) {
		source = wire.KeyOfConfiguration
	}
	return wire.Key{Name: k.Name, Role: cmp.Or(string(k.Role), "none"), Source: source, CreatedAt: spec.Moment(k.Created), ExpiresAt: spec.Moment(k.Expires)}
}

// createKey makes a key and tells it, this once.
func (s *Server) createKey(w http.ResponseWriter, r *http.Request) error {
	var req wire.KeyRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	role := record.Role(cmp.Or(req.Role, string(record.Operator)))
	switch {
	case s.keys.store == nil:
		return errs.New(errs.Unsupported, "this daemon was built without a place for API keys")
	case !spec.IsName(req.Name) || strings.HasPrefix(req.Name, fixedPrefix):
		return httperr.Invalid("name %q: want up to 63 of a-z A-Z 0-9 _ . -, the first a letter or digit, and not beginning with %s", httperr.Clip(req.Name, 80), fixedPrefix)
	case !slices.Contains(record.Roles, role):
		return httperr.Invalid("role %q: want viewer, operator or admin", httperr.Clip(req.Role, 40))
	}
	secret := "sbk_" + rand.Text() + rand.Text() // 260 random bits
	sum := sha256.Sum256([]byte(secret))
	key := record.Key{Name: req.Name, Role: role, Sum: sum[:], Created: time.Now().UTC()}
	if req.ExpiresAt != "" {
		t, err := spec.ParseTime(req.ExpiresAt)
		if err != nil || !t.After(key.Created) {
			return httperr.Invalid("expiresAt %q: want a time to come as 2030-01-02T15:04:05Z, or none", httperr.Clip(req.ExpiresAt, 60))
		}
		key.Expires = t.UTC()
	}
	err := s.keys.change(r.Context(), func(ctx context.Context) error { return s.keys.store.AddKey(ctx, key) })
	if err != nil {
		return err
	}
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, http.StatusCreated, wire.NewKey{Key: toWireKey(key), Secret: secret})
	return nil
}

func (s *Server) removeKey(w http.ResponseWriter, r *http.Request, name string) error {
	switch {
	case strings.HasPrefix(name, fixedPrefix):
		return errs.New(errs.WrongState, "API key %s stands in the file that listen.api_key_file names; take it out there and restart sandboxd", httperr.Clip(name, 80))
	case s.keys.store == nil, !spec.IsName(name):
		return errs.Wire(errs.New(errs.NotFound, "there is no API key %q; `sandboxctl key ls` lists them", httperr.Clip(name, 80)), "KEY::NOT_FOUND")
	}
	err := s.keys.change(r.Context(), func(ctx context.Context) error { return s.keys.store.RemoveKey(ctx, name) })
	if err != nil {
		return httperr.Recode(err, errs.NotFound, "KEY::NOT_FOUND")
	}
	writeEmpty(w, http.StatusNoContent)
	return nil
}
