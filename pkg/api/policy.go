package api

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/gateway"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// policyHandlers show and change network policies.
type policyHandlers struct {
	sandboxes Sandboxes
	offer     *spec.Offer
	guard     *auth.Guard
	gateway   *gateway.Gateway
	vaults    *vaultHandlers
}

// port serves OpenSandbox's egress API at port 18080: here, and never from inside a
// sandbox. Its errors are text/plain, unlike all others.
func (h *policyHandlers) port(w http.ResponseWriter, r *http.Request, rec *record.Record, path string) {
	in := infoOf(r)
	in.route = namePolicy // and not path, which is the client's
	fail := func(err error) {
		in.err = err
		status, body := httperr.Body(err, in.requestID)
		if status == http.StatusServiceUnavailable {
			w.Header().Set("Retry-After", httperr.RetryAfter(err))
		}
		writeText(w, status, body.Message)
	}
	if err := h.authorise(r, *rec); err != nil {
		fail(err)
		return
	}
	read := r.Method == http.MethodGet || r.Method == http.MethodHead
	switch {
	case path == "/healthz" && read:
		writeText(w, http.StatusOK, "ok")
	case path == "/policy" && (read || slices.Contains(policyMethods, r.Method)):
		st, err := h.call(w, r, *rec)
		if err != nil {
			fail(err)
			return
		}
		writeJSON(w, http.StatusOK, st)
	case path == "/policy" || path == "/healthz":
		w.Header().Set("Allow", "GET, POST, PUT, PATCH, DELETE")
		writeText(w, http.StatusMethodNotAllowed, httperr.Clip(r.Method, 20)+" is not allowed here")
	case h.offer.NoInspect:
		writeText(w, http.StatusNotFound, "the egress API serves /policy and /healthz here; this daemon was built without "+
			"credential vaults")
	case path == vaultPath || strings.HasPrefix(path, vaultPath+"/"):
		if err := h.vaults.port(w, r, *rec, path); err != nil {
			fail(err)
		}
	default:
		writeText(w, http.StatusNotFound, "the egress API serves /policy, "+vaultPath+" and /healthz here")
	}
}

// policyMethods change a policy at port 18080.
var policyMethods = []string{http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}

// authorise admits a request that has the token of this sandbox's egress API, or the
// key of an operator.
func (h *policyHandlers) authorise(r *http.Request, rec record.Record) error {
	token := r.Header.Get(wire.HeaderEgressToken)
	role, _ := h.guard.Role(token) // no answer of this port goes on
	if infoOf(r).role.Covers(record.Operator) || role.Covers(record.Operator) {
		return nil
	}
	if err := h.guard.FromPage(r); err != nil { // a page that has the token got it where it should not have
		return err
	}
	if h.gateway.Opens(token, rec.ID, wire.EgressPort) {
		return nil
	}
	return httperr.New(http.StatusUnauthorized, "UNAUTHORIZED", errs.Denied,
		"unauthorized: send the headers that GET /v1/sandboxes/{id}/endpoints/18080 returns")
}

// route serves the policy as a route of the lifecycle API.
func (h *policyHandlers) route(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	st, err := h.call(w, r, rec)
	if err == nil {
		writeJSON(w, http.StatusOK, st)
	}
	return err
}

// call shows the policy of a sandbox, or changes it while the sandbox lives. A change is
// durable before it is answered, and in force: open flows that it denies have ended.
func (h *policyHandlers) call(w http.ResponseWriter, r *http.Request, rec record.Record) (wire.PolicyStatus, error) {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return spec.PolicyOf(rec.Spec.Terms()), nil
	}
	b, done, err := readBody(w, r)
	if err != nil {
		return wire.PolicyStatus{}, err
	}
	defer done()
	var edit spec.Edit
	switch r.Method {
	case http.MethodPatch:
		edit, err = h.offer.MergeRules(b)
	case http.MethodDelete:
		edit, err = h.offer.RemoveTargets(b)
	default:
		edit, err = h.offer.ReplacePolicy(b)
	}
	if err != nil {
		return wire.PolicyStatus{}, err
	}
	found := true
	rec, err = h.sandboxes.Update(context.WithoutCancel(r.Context()), rec.ID, func(t *record.Terms) error {
		was := spec.PolicyOf(*t).Policy
		next := edit(*was)
		if r.Method == http.MethodDelete && len(next.Egress) == len(was.Egress) {
			found = false
			return nil
		}
		whole := r.Method != http.MethodPatch && r.Method != http.MethodDelete
		if whole && t.Policy.Name != "" { // it keeps this policy, also if the named one says the same now
			t.Policy.Left = true
		}
		return h.offer.SetPolicy(t, next)
	})
	if err != nil {
		return wire.PolicyStatus{}, fmt.Errorf("change the network policy of sandbox %s: %w", rec.ID, err)
	}
	st := spec.PolicyOf(rec.Spec.Terms())
	st.Policy = nil // as upstream answers a change
	if !found {
		st.Reason = "no matching targets found"
	}
	return st, nil
}

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
	out := wire.PolicyList{Items: []wire.PolicySummary{}}
	for _, i := range all {
		out.Items = append(out.Items, spec.PolicySummary(i))
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
	body, done, err := readBody(w, r)
	if err != nil {
		return err
	}
	defer done()
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

// use gives a sandbox a policy by name in the place of its own.
func (h *namedHandlers) use(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	var req wire.PolicyRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	use, err := spec.PolicyUse(req.Name)
	if err != nil {
		return err
	}
	if rec, err = h.policies.Use(context.WithoutCancel(r.Context()), rec.ID, use); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, spec.SandboxPolicy(rec.Spec.Policy))
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

// poolHandlers serve the routes of pools.
type poolHandlers struct {
	pools Pools
	offer *spec.Offer
}

func (h *poolHandlers) list(w http.ResponseWriter, r *http.Request) error {
	all, err := h.pools.List(r.Context())
	if err != nil {
		return err
	}
	out := wire.PoolList{Items: []wire.Pool{}}
	for _, i := range all {
		out.Items = append(out.Items, spec.PoolOf(i))
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func (h *poolHandlers) get(w http.ResponseWriter, r *http.Request) error {
	i, err := h.pools.Get(r.Context(), segmentOf(r, "name"))
	if err == nil {
		writeJSON(w, http.StatusOK, spec.PoolOf(i))
	}
	return err
}

// create answers when the pool is durable. Its members follow.
func (h *poolHandlers) create(w http.ResponseWriter, r *http.Request) error {
	var req wire.PoolRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	p := record.Pool{Name: req.Name}
	if err := spec.PoolName(req.Name); err != nil {
		return err
	}
	if err := h.offer.Pool(&p, &req); err != nil {
		return err
	}
	i, err := h.pools.Create(r.Context(), p)
	if err == nil {
		writeJSON(w, http.StatusCreated, spec.PoolOf(i))
	}
	return err
}

// update changes the capacity of a pool, and its template if the body has one.
func (h *poolHandlers) update(w http.ResponseWriter, r *http.Request) error {
	var req wire.PoolRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	i, err := h.pools.Update(r.Context(), segmentOf(r, "name"), func(p *record.Pool) error { return h.offer.Pool(p, &req) })
	if err == nil {
		writeJSON(w, http.StatusOK, spec.PoolOf(i))
	}
	return err
}

func (h *poolHandlers) remove(w http.ResponseWriter, r *http.Request) error {
	if err := h.pools.Delete(r.Context(), segmentOf(r, "name")); err != nil {
		return err
	}
	writeEmpty(w, http.StatusNoContent)
	return nil
}
