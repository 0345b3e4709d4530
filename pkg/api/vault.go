package api

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// vaultHandlers show and change the credential vaults of sandboxes, in two places:
//
//	/sandboxes/{id}/credential-vault…              with the placeholders and variables of credentials
//	/sandboxes/{id}/proxy/18080/credential-vault…  as OpenSandbox has it (policyHandlers.port)
//
// No body of theirs is kept or logged: it goes to vaults, whose errors never have a value.
type vaultHandlers struct {
	vaults Vaults
}

// vaultPath is where a vault is, in both places.
const vaultPath = "/credential-vault"

// The parts of a vault that can be read by themselves.
const (
	vaultCredentials = "credentials"
	vaultBindings    = "bindings"
)

// get shows a vault, or the part {kind} of it, or one {name} of that.
func (h *vaultHandlers) get(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	name := segmentOf(r, "name")
	if r.PathValue("name") != "" && name == "" {
		return httperr.Invalid("the name in the path is not encoded as a part of a URL")
	}
	out, err := h.read(r.Context(), &rec, r.PathValue("kind"), name, true)
	if err == nil {
		writeJSON(w, http.StatusOK, out)
	}
	return err
}

// read returns what can be shown of a vault: with native also placeholders and variables.
func (h *vaultHandlers) read(ctx context.Context, rec *record.Record, kind, name string, native bool) (any, error) {
	st, err := h.vaults.Get(ctx, rec)
	if err != nil {
		return nil, vaultError("read", rec.ID, err)
	}
	v := spec.Vault(st, native)
	switch {
	case kind == "":
		return v, nil
	case name == "" && kind == vaultCredentials:
		return v.CredentialList(), nil
	case name == "":
		return v.BindingList(), nil
	}
	if kind == vaultCredentials {
		for _, c := range v.Credentials {
			if c.Name == name {
				return c, nil
			}
		}
	} else {
		for _, b := range v.Bindings {
			if b.Name == name {
				return b, nil
			}
		}
	}
	return nil, errs.Wire(errs.New(errs.NotFound, "the credential vault of sandbox %s has no %s named %q; `sandboxctl secret ls %s` lists "+
		"what it has", rec.ID, strings.TrimSuffix(kind, "s"), httperr.Clip(name, vault.MaxName), rec.ID), wire.CodeNoVault)
}

// create makes a vault.
func (h *vaultHandlers) create(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	return h.change(w, r, rec, h.trusts(r), true)
}

// patch changes one.
func (h *vaultHandlers) patch(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	return h.change(w, r, rec, h.trusts(r), true)
}

// trusts reports whether a request may name files and commands of the host, which are read and
// run as root: by the Unix socket only, like a backup, since an API key gives nobody root.
func (h *vaultHandlers) trusts(r *http.Request) bool {
	return infoOf(r).role.Covers(record.Admin) && auth.PeerOf(r).Unix
}

// change makes a vault (POST) or changes it (PATCH). The answer comes when the change is durable
// and holds for the next request of the guest.
func (h *vaultHandlers) change(w http.ResponseWriter, r *http.Request, rec record.Record, trusted, native bool) error {
	if err := inspected(&rec); err != nil {
		return err
	}
	b, done, err := readBody(w, r)
	if err != nil {
		return err
	}
	defer done()
	do, what, status := h.vaults.Patch, "change", http.StatusOK
	switch {
	case r.Method == http.MethodPost && trusted:
		do, what, status = h.vaults.CreateTrusted, "create", http.StatusCreated
	case r.Method == http.MethodPost:
		do, what, status = h.vaults.Create, "create", http.StatusCreated
	case trusted:
		do = h.vaults.PatchTrusted
	}
	st, err := do(context.WithoutCancel(r.Context()), &rec, b)
	if err != nil {
		return vaultError(what, rec.ID, err)
	}
	writeJSON(w, status, spec.Vault(st, native))
	return nil
}

// inspected refuses a vault for a sandbox that was made without one in mind.
func inspected(rec *record.Record) error {
	if !rec.Spec.Inspect {
		return record.NotInspected(rec.ID, "a credential vault")
	}
	return nil
}

// delete removes a vault. From then on its placeholders are those of nobody.
func (h *vaultHandlers) delete(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	if err := h.vaults.Delete(context.WithoutCancel(r.Context()), &rec); err != nil {
		return vaultError("delete", rec.ID, err)
	}
	writeEmpty(w, http.StatusNoContent)
	return nil
}

func vaultError(what, id string, err error) error {
	return fmt.Errorf("%s the credential vault of sandbox %s: %w", what, id, httperr.Recode(err, errs.NotFound, wire.CodeNoVault))
}

// port serves the vault at port 18080. path begins with vaultPath. It returns an error for the
// caller to write, which is text there.
func (h *vaultHandlers) port(w http.ResponseWriter, r *http.Request, rec record.Record, path string) error {
	parts := strings.Split(strings.TrimPrefix(path, vaultPath), "/") // the first is empty
	kind, name := "", ""
	if len(parts) > 1 {
		kind = parts[1]
	}
	if len(parts) > 2 {
		name = unescape(parts[2])
	}
	whole := len(parts) == 1
	if !whole && (kind != vaultCredentials && kind != vaultBindings || len(parts) > 3 || len(parts) == 3 && name == "") {
		return errs.New(errs.NotFound, "the egress API serves %s, and below it /%s[/NAME] and /%s[/NAME]", vaultPath, vaultCredentials,
			vaultBindings)
	}
	switch {
	case r.Method == http.MethodGet || r.Method == http.MethodHead:
		out, err := h.read(r.Context(), &rec, kind, name, false)
		if err == nil {
			writeJSON(w, http.StatusOK, out)
		}
		return err
	case whole && (r.Method == http.MethodPost || r.Method == http.MethodPatch):
		return h.change(w, r, rec, false, false)
	case whole && r.Method == http.MethodDelete:
		return h.delete(w, r, rec)
	}
	allow := "GET"
	if whole {
		allow = "GET, POST, PATCH, DELETE"
	}
	w.Header().Set("Allow", allow)
	return httperr.New(http.StatusMethodNotAllowed, "GENERAL::METHOD_NOT_ALLOWED", errs.Invalid, "%s is not allowed here",
		httperr.Clip(r.Method, 20))
}
