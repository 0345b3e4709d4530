package api

import (
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// policy is OpenSandbox's egress API at port 18080, answered here and never
// from inside a sandbox. Its errors are text/plain, unlike all others.
func (s *Server) policy(w http.ResponseWriter, r *http.Request, rec record.Record, path string) {
	in := infoOf(r)
	in.route = "/sandboxes/{id}/proxy/18080" + path
	token := r.Header.Get(wire.HeaderEgressToken)
	if !in.trusted && !equal(token, s.endpointToken(rec.ID, wire.EgressPort)) && !s.isKey(token) {
		writeText(w, http.StatusUnauthorized, "unauthorized: send the headers that GET /v1/sandboxes/{id}/endpoints/18080 returns")
		return
	}
	switch {
	case path == "/healthz" && (r.Method == http.MethodGet || r.Method == http.MethodHead):
		writeText(w, http.StatusOK, "ok")
	case path == "/policy" && (r.Method == http.MethodGet || r.Method == http.MethodHead):
		writeJSON(w, http.StatusOK, policyOf(rec.Spec))
	case path == "/policy":
		writeText(w, http.StatusNotImplemented, "changing the network policy of a running sandbox comes with a later release; create a sandbox with the policy it needs")
	default:
		writeText(w, http.StatusNotFound, "the egress API has GET /policy and GET /healthz here; the credential vault comes with a later release")
	}
}

func writeText(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	w.Write([]byte(text + "\n")) //nolint:errcheck // a client that left needs no answer
}

// policyOf shows the rules as they were sent, or else as they are enforced.
func policyOf(spec record.Spec) wire.PolicyStatus {
	p := wire.NetworkPolicy{}
	if len(spec.NetworkPolicy) == 0 || json.Unmarshal(spec.NetworkPolicy, &p) != nil {
		p = wire.NetworkPolicy{DefaultAction: "deny"}
		if spec.Network.Mode == record.NetworkOpen {
			p.DefaultAction = "allow"
		}
		for _, r := range spec.Network.Rules {
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
	out := wire.PolicyStatus{Status: "ok", Mode: "enforcing", EnforcementMode: "dns+nft", Policy: p}
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
