package api

import (
	"cmp"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// keyHandlers list, make and remove API keys.
type keyHandlers struct {
	guard *auth.Guard
}

func (h *keyHandlers) list(w http.ResponseWriter, _ *http.Request) error {
	out := wire.KeyList{Items: []wire.Key{}}
	for _, k := range h.guard.Keys() {
		out.Items = append(out.Items, toWireKey(k))
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func toWireKey(k record.Key) wire.Key {
	source := wire.KeyOfStore
	if strings.HasPrefix(k.Name, auth.FixedPrefix) {
		source = wire.KeyOfConfiguration
	}
	return wire.Key{
		Name: k.Name, Role: cmp.Or(string(k.Role), "none"), Source: source, CreatedAt: spec.Moment(k.Created),
		ExpiresAt: spec.Moment(k.Expires),
	}
}

// create makes a key. Its answer is the only place that ever has the secret.
func (h *keyHandlers) create(w http.ResponseWriter, r *http.Request) error {
	var req wire.KeyRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	role := record.Role(cmp.Or(req.Role, string(record.Operator)))
	switch {
	case !h.guard.KeepsKeys():
		return errs.New(errs.Unsupported, "this daemon was built without a store for API keys")
	case !spec.IsName(req.Name) || strings.HasPrefix(req.Name, auth.FixedPrefix):
		return httperr.Invalid("name %q: want 1 to 63 characters of A-Z a-z 0-9 _ . - that begin with a letter or digit, without two "+
			"dots in a row, and not with the prefix %s", httperr.Clip(req.Name, 80), auth.FixedPrefix)
	case !slices.Contains(record.Roles, role):
		return httperr.Invalid("role %q: want viewer, operator or admin", httperr.Clip(req.Role, 40))
	}
	secret, sum := auth.NewSecret()
	key := record.Key{Name: req.Name, Role: role, Sum: sum, Created: time.Now().UTC()}
	if req.ExpiresAt != "" {
		t, err := spec.ParseTime(req.ExpiresAt)
		if err != nil || !t.After(key.Created) {
			return httperr.Invalid("expiresAt %q: want a future time such as 2030-01-02T15:04:05Z, or none",
				httperr.Clip(req.ExpiresAt, 60))
		}
		key.Expires = t.UTC()
	}
	if err := h.guard.AddKey(r.Context(), key); err != nil {
		return err
	}
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, http.StatusCreated, wire.NewKey{Key: toWireKey(key), Secret: secret})
	return nil
}

func (h *keyHandlers) remove(w http.ResponseWriter, r *http.Request) error {
	name := segmentOf(r, "name")
	switch {
	case strings.HasPrefix(name, auth.FixedPrefix):
		return errs.New(errs.WrongState,
			"API key %s is in the file that listen.api_key_file names; remove it there and restart sandboxd", httperr.Clip(name, 80))
	case !h.guard.KeepsKeys(), !spec.IsName(name):
		return errs.Wire(errs.New(errs.NotFound, "there is no API key %q; `sandboxctl key ls` lists them", httperr.Clip(name, 80)),
			"KEY::NOT_FOUND")
	}
	if err := h.guard.RemoveKey(r.Context(), name); err != nil {
		return httperr.Recode(err, errs.NotFound, "KEY::NOT_FOUND")
	}
	writeEmpty(w, http.StatusNoContent)
	return nil
}
