package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// maxRules is how many rules a policy may have. (OpenSandbox's egress)
const maxRules = 4096

// policy is OpenSandbox's egress API at port 18080, answered here and never
// from inside a sandbox. Its errors are text/plain, unlike all others.
func (s *Server) policy(w http.ResponseWriter, r *http.Request, rec record.Record, path string) {
	in := infoOf(r)
	in.route = "/sandboxes/{id}/proxy/18080" // and not path, which is the client's
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

// authorisePolicy lets in who has the token of this sandbox's egress API.
func (s *Server) authorisePolicy(r *http.Request, rec record.Record) error {
	token := r.Header.Get(wire.HeaderEgressToken)
	if infoOf(r).role.Covers(record.Operator) || s.keys.role(token).Covers(record.Operator) {
		return nil
	}
	if s.keyless() { // a page that got the token got it where none should have been given
		if err := s.fromPage(r); err != nil {
			return err
		}
	}
	if equal(token, s.endpointToken(rec.ID, wire.EgressPort)) {
		return nil
	}
	return httperr.New(http.StatusUnauthorized, "UNAUTHORIZED", errs.Denied, "unauthorized: send the headers that GET /v1/sandboxes/{id}/endpoints/18080 returns")
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
		return policyOf(rec.Spec.Terms()), nil
	}
	b, err := readBody(w, r)
	if err != nil {
		return wire.PolicyStatus{}, err
	}
	var edit func(wire.NetworkPolicy) wire.NetworkPolicy
	switch r.Method {
	case http.MethodPatch:
		edit, err = s.mergeRules(b)
	case http.MethodDelete:
		edit, err = removeTargets(b)
	default:
		edit, err = s.replacePolicy(b)
	}
	if err != nil {
		return wire.PolicyStatus{}, err
	}
	found := true
	rec, err = s.sandboxes.Update(context.WithoutCancel(r.Context()), rec.ID, func(t *record.Terms) error {
		was := policyOf(*t).Policy
		next := edit(*was)
		if r.Method == http.MethodDelete && len(next.Egress) == len(was.Egress) {
			found = false
			return nil
		}
		return s.setPolicy(t, next)
	})
	if err != nil {
		return wire.PolicyStatus{}, fmt.Errorf("change the network policy of sandbox %s: %w", rec.ID, err)
	}
	st := policyOf(rec.Spec.Terms())
	st.Policy = nil // as upstream answers a change
	if !found {
		st.Reason = "no matching targets found"
	}
	return st, nil
}

// setPolicy puts p into t, if it can be kept to.
func (s *Server) setPolicy(t *record.Terms, p wire.NetworkPolicy) error {
	if n := len(p.Egress); n > maxRules {
		return httperr.New(http.StatusRequestEntityTooLarge, "SANDBOX::INVALID_PARAMETER", errs.Invalid, "the policy would have %d rules; at most %d are taken: join ranges into one CIDR", n, maxRules)
	}
	raw, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("encode the policy: %w", err)
	}
	if len(raw) > maxPolicy {
		return httperr.Invalid("the policy would have %d bytes; at most %d are kept", len(raw), maxPolicy)
	}
	n, err := s.parsePolicy(raw)
	if err != nil {
		return err
	}
	t.Network, t.NetworkPolicy = n, raw
	return nil
}

func (s *Server) parsePolicy(raw []byte) (record.Network, error) {
	n, err := s.cfg.ParsePolicy(raw)
	if err != nil {
		err = errs.New(errs.CodeOf(err), "networkPolicy: %s", httperr.Clip(err.Error(), 400)) // which repeats what was sent
	}
	return n, err
}

// replacePolicy reads a whole policy. Nothing, null and {} deny all.
func (s *Server) replacePolicy(b []byte) (func(wire.NetworkPolicy) wire.NetworkPolicy, error) {
	var p wire.NetworkPolicy
	if b = bytes.TrimSpace(b); len(b) > 0 && string(b) != "null" {
		if err := unmarshal(b, &p); err != nil {
			return nil, err
		}
		if len(p.Egress) <= maxRules { // else setPolicy says so
			if _, err := s.parsePolicy(b); err != nil { // it knows no field that p does not
				return nil, err
			}
		}
	}
	if p.DefaultAction == "" {
		p.DefaultAction = "deny"
	}
	if p.Egress == nil {
		p.Egress = []wire.NetworkRule{}
	}
	return func(wire.NetworkPolicy) wire.NetworkPolicy { return p }, nil
}

// mergeRules reads rules that go before those there are. Of two for the same
// target the first counts: what it covers wholly is dropped.
func (s *Server) mergeRules(b []byte) (func(wire.NetworkPolicy) wire.NetworkPolicy, error) {
	var rules []wire.NetworkRule
	if err := unmarshal(b, &rules); err != nil {
		return nil, err
	}
	if len(rules) == 0 {
		return nil, httperr.Invalid("there are no rules in the body; want an array as [{\"action\":\"allow\",\"target\":\"203.0.113.0/24\"}]")
	}
	if len(rules) <= maxRules {
		if _, err := s.parsePolicy(fmt.Appendf(nil, `{"egress":%s}`, b)); err != nil {
			return nil, err
		}
	}
	for i := range rules {
		rules[i].Target = strings.ToLower(rules[i].Target)
	}
	return func(p wire.NetworkPolicy) wire.NetworkPolicy {
		merged := wire.NetworkPolicy{DefaultAction: p.DefaultAction, Egress: []wire.NetworkRule{}}
		covered := map[string]bool{}
		for _, r := range slices.Concat(rules, p.Egress) {
			whole, part := targetKey(r.Target), rangeKey(r)
			if covered[whole] || covered[part] {
				continue
			}
			covered[part] = true
			merged.Egress = append(merged.Egress, r)
		}
		return merged
	}, nil
}

// removeTargets reads targets whose rules go. One that has none is no error.
func removeTargets(b []byte) (func(wire.NetworkPolicy) wire.NetworkPolicy, error) {
	var targets []string
	if err := unmarshal(b, &targets); err != nil {
		return nil, err
	}
	if len(targets) == 0 {
		return nil, httperr.Invalid("there are no targets in the body; want an array as [\"203.0.113.0/24\"]")
	}
	if len(targets) > maxRules {
		return nil, httperr.New(http.StatusRequestEntityTooLarge, "SANDBOX::INVALID_PARAMETER", errs.Invalid, "the body has %d targets; no policy has more than %d rules", len(targets), maxRules)
	}
	gone := map[string]bool{}
	for _, t := range targets {
		gone[targetKey(t)] = true
	}
	return func(p wire.NetworkPolicy) wire.NetworkPolicy {
		left := wire.NetworkPolicy{DefaultAction: p.DefaultAction, Egress: []wire.NetworkRule{}}
		for _, r := range p.Egress {
			if !gone[targetKey(r.Target)] {
				left.Egress = append(left.Egress, r)
			}
		}
		return left
	}, nil
}

// targetKey is the same for two spellings of one target.
func targetKey(target string) string {
	t := strings.ToLower(strings.TrimSpace(target))
	if a, err := netip.ParseAddr(t); err == nil {
		return netip.PrefixFrom(a, a.BitLen()).String()
	}
	return t
}

// rangeKey is targetKey for a rule that covers all of its target, else one more
// exact.
func rangeKey(r wire.NetworkRule) string {
	if len(r.Ports) == 0 && r.Protocol == "" {
		return targetKey(r.Target)
	}
	return fmt.Sprintf("%s %v %s", targetKey(r.Target), r.Ports, r.Protocol)
}

// policyOf shows the rules as they were sent, or else as they are enforced.
func policyOf(t record.Terms) wire.PolicyStatus {
	p := wire.NetworkPolicy{}
	if len(t.NetworkPolicy) == 0 || json.Unmarshal(t.NetworkPolicy, &p) != nil {
		p = wire.NetworkPolicy{DefaultAction: "deny"}
		if t.Network.Mode == record.NetworkOpen {
			p.DefaultAction = "allow"
		}
		for _, r := range t.Network.Rules {
			action := "deny"
			if r.Allow {
				action = "allow"
			}
			p.Egress = append(p.Egress, wire.NetworkRule{Action: action, Target: r.Prefix.String(), Ports: portsOf(r), Protocol: r.Proto})
		}
	}
	if p.DefaultAction == "" {
		p.DefaultAction = "deny"
	}
	if p.Egress == nil {
		p.Egress = []wire.NetworkRule{}
	}
	out := wire.PolicyStatus{Status: "ok", Mode: "enforcing", EnforcementMode: "dns+nft", Policy: &p}
	if len(p.Egress) == 0 {
		out.Mode = map[string]string{"allow": "allow_all", "deny": "deny_all"}[p.DefaultAction]
	}
	return out
}

// portsOf writes the ports of r as a networkPolicy does; nil is all.
func portsOf(r record.Rule) []any {
	switch first, last := r.Ports[0], r.Ports[1]; {
	case last == 0:
		return nil
	case first == last:
		return []any{first}
	default:
		return []any{fmt.Sprintf("%d-%d", first, last)}
	}
}
