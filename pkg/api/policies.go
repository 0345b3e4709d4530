package api

import (
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// namedHandlers serve the routes of named policies.
type namedHandlers struct {
	policies Policies
	offer    *spec.Offer
}

func (h *namedHandlers) list(w http.ResponseWriter, r *http.Request) error {
	all, err := h.policies.List(r.Context())
	if err != nil {
		return err
	}
	out := wire.PolicyList{Items: []wire.Policy{}}
	for _, i := range all {
		out.Items = append(out.Items, spec.Policy(i, i.Newest()))
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// get shows the newest version of NAME, or the one of NAME@VERSION.
func (h *namedHandlers) get(w http.ResponseWriter, r *http.Request) error {
	use, err := spec.PolicyUse(segmentOf(r, "name"))
	if err != nil {
		return err
	}
	i, err := h.policies.Get(r.Context(), use.Name)
	if err != nil {
		return err
	}
	v, ok := i.Version(use.Version)
	if !ok {
		return errs.Wire(errs.New(errs.NotFound, "policy %s has no version %d; the versions %d to %d are kept", use.Name, use.Version,
			i.Versions[0].Number, i.Newest().Number), "POLICY::NOT_FOUND")
	}
	writeJSON(w, http.StatusOK, spec.Policy(i, v))
	return nil
}

// put makes a policy, or adds a version to it and moves the sandboxes that follow it. The
// answer comes when the version is durable and the sandboxes have moved.
func (h *namedHandlers) put(w http.ResponseWriter, r *http.Request) error {
	name := segmentOf(r, "name")
	if err := spec.PolicyName(name); err != nil {
		return err
	}
	body, err := readBody(w, r)
	if err != nil {
		return err
	}
	v, err := h.offer.PolicyVersion(body)
	if err != nil {
		return err
	}
	e, err := h.policies.Put(r.Context(), name, v)
	if err != nil {
		return err
	}
	status := http.StatusOK
	if e.Added {
		status = http.StatusCreated
	}
	writeJSON(w, status, spec.PolicyEdit(e))
	return nil
}

func (h *namedHandlers) remove(w http.ResponseWriter, r *http.Request) error {
	name := segmentOf(r, "name")
	if spec.PolicyName(name) != nil {
		return errs.Wire(errs.New(errs.NotFound, "no policy %q; `sandboxctl policy ls` lists the policies of this host",
			httperr.Clip(name, 80)), "POLICY::NOT_FOUND")
	}
	if err := h.policies.Delete(r.Context(), name); err != nil {
		return err
	}
	writeEmpty(w, http.StatusNoContent)
	return nil
}
