package api

import (
	"context"
	"fmt"
	"net/http"
	"slices"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// policy is OpenSandbox's egress API at port 18080, answered here and never
// from inside a sandbox. Its errors are text/plain, unlike all others.
func (s *Server) policy(w http.ResponseWriter, r *http.Request, rec record.Record, path string) {
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
	if err := s.authorisePolicy(r, rec); err != nil {
		fail(err)
		return
	}
	read := r.Method == http.MethodGet || r.Method == http.MethodHead
	switch {
	case path == "/healthz" && read:
		writeText(w, http.StatusOK, "ok")
	case path == "/policy" && (read || slices.Contains(policyMethods, r.Method)):
		st, err := s.policyCall(w, r, rec)
		if err != nil {
			fail(err)
			return
		}
		writeJSON(w, http.StatusOK, st)
	case path == "/policy" || path == "/healthz":
		w.Header().Set("Allow", "GET, POST, PUT, PATCH, DELETE")
		writeText(w, http.StatusMethodNotAllowed, httperr.Clip(r.Method, 20)+" is not allowed here")
	default:
		writeText(w, http.StatusNotFound, "the egress API has /policy and /healthz here; the credential vault comes with a later release")
	}
}

// policyMethods change a policy at port 18080.
var policyMethods = []string{http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}

// authorisePolicy lets a request in that has the token of this sandbox's egress API, or
// the key of an operator.
func (s *Server) authorisePolicy(r *http.Request, rec record.Record) error {
	token := r.Header.Get(wire.HeaderEgressToken)
	if infoOf(r).role.Covers(record.Operator) || s.guard.Role(token).Covers(record.Operator) {
		return nil
	}
	if err := s.guard.FromPage(r); err != nil { // a page that has the token got it where it should not have
		return err
	}
	if s.gateway.Opens(token, rec.ID, wire.EgressPort) {
		return nil
	}
	return httperr.New(http.StatusUnauthorized, "UNAUTHORIZED", errs.Denied,
		"unauthorized: send the headers that GET /v1/sandboxes/{id}/endpoints/18080 returns")
}

// networkPolicy is the same as a route of the lifecycle API.
func (s *Server) networkPolicy(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	st, err := s.policyCall(w, r, rec)
	if err == nil {
		writeJSON(w, http.StatusOK, st)
	}
	return err
}

// policyCall shows the policy of a sandbox, or changes it while the sandbox
// lives. A change is durable before it is answered, and then holds for every
// flow that opens; those that are open go on.
func (s *Server) policyCall(w http.ResponseWriter, r *http.Request, rec record.Record) (wire.PolicyStatus, error) {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return spec.PolicyOf(rec.Spec.Terms()), nil
	}
	b, err := readBody(w, r)
	if err != nil {
		return wire.PolicyStatus{}, err
	}
	var edit spec.Edit
	switch r.Method {
	case http.MethodPatch:
		edit, err = s.cfg.MergeRules(b)
	case http.MethodDelete:
		edit, err = spec.RemoveTargets(b)
	default:
		edit, err = s.cfg.ReplacePolicy(b)
	}
	if err != nil {
		return wire.PolicyStatus{}, err
	}
	found := true
	rec, err = s.sandboxes.Update(context.WithoutCancel(r.Context()), rec.ID, func(t *record.Terms) error {
		was := spec.PolicyOf(*t).Policy
		next := edit(*was)
		if r.Method == http.MethodDelete && len(next.Egress) == len(was.Egress) {
			found = false
			return nil
		}
		return s.cfg.SetPolicy(t, next)
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
