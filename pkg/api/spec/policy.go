package spec

import (
	"bytes"
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

const (
	maxRules  = 4096    // of a policy (OpenSandbox's egress)
	maxPolicy = 1 << 20 // bytes of a networkPolicy that are kept
)

// An Edit turns the present policy of a sandbox into its next one.
type Edit func(wire.NetworkPolicy) wire.NetworkPolicy

// SetPolicy puts p into t, if p is a policy that this host can enforce.
func (o *Offer) SetPolicy(t *record.Terms, p wire.NetworkPolicy) error {
	if n := len(p.Egress); n > maxRules {
		return httperr.New(http.StatusRequestEntityTooLarge, "SANDBOX::INVALID_PARAMETER", errs.Invalid,
			"the policy would have %d rules; at most %d are allowed: join ranges into one CIDR", n, maxRules)
	}
	raw, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("encode the policy: %w", err)
	}
	if len(raw) > maxPolicy {
		return httperr.Invalid("the policy would have %d bytes; at most %d are allowed", len(raw), maxPolicy)
	}
	n, err := o.parsePolicy(raw)
	if err != nil {
		return err
	}
	t.Network, t.NetworkPolicy = n, raw
	return nil
}

// parseSent parses a policy that a client sent. In difference to parsePolicy it refuses
// rules that allow an address of this host: a policy of long ago may have such rules,
// because the host got the address since.
func (o *Offer) parseSent(raw []byte) (record.Network, error) {
	n, err := o.parsePolicy(raw)
	for i := 0; i < len(n.Rules) && err == nil; i++ {
		if err = o.reachable(n.Rules[i]); err != nil {
			err = errs.New(errs.Invalid, "networkPolicy: %s", err.Error())
		}
	}
	return n, err
}

// reachable refuses a rule that allows nothing but an address of this host. Ranges that
// contain one are fine: they open the rest.
func (o *Offer) reachable(r record.Rule) error {
	if a := r.Prefix.Addr(); r.Allow && r.Prefix.IsSingleIP() && o.HostAddress(a) {
		return errs.New(errs.Invalid, "%s is an address of this host, and a sandbox never reaches its host, whatever its rules say; "+
			"run the service on another machine, or let a program of this host connect to a port of the sandbox", a)
	}
	return nil
}

func (o *Offer) parsePolicy(raw []byte) (record.Network, error) {
	n, err := o.ParsePolicy(raw)
	if err == nil && o.NoInspect && n.AboutRequests() {
		err = errNoInspect
	}
	if err != nil {
		err = errs.New(errs.CodeOf(err), "networkPolicy: %s", httperr.Clip(err.Error(), 400)) // it repeats what was sent
	}
	return n, err
}

// ReplacePolicy reads a whole policy. An empty body, null and {} deny all.
func (o *Offer) ReplacePolicy(b []byte) (Edit, error) {
	var p wire.NetworkPolicy
	if b = bytes.TrimSpace(b); len(b) > 0 && string(b) != "null" {
		if err := Decode(b, &p); err != nil {
			return nil, err
		}
		if len(p.Egress) <= maxRules { // else SetPolicy says so
			if _, err := o.parseSent(b); err != nil { // it knows no field that p does not
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

// MergeRules reads rules and puts them before the present ones. The first rule for a
// target counts, so the present rules that it covers wholly are dropped: those for the same
// ports and protocol, or of the same target if it is for all of them, and for the same
// requests if it is not for all of them.
func (o *Offer) MergeRules(b []byte) (Edit, error) {
	var rules []wire.NetworkRule
	if err := Decode(b, &rules); err != nil {
		return nil, err
	}
	if len(rules) == 0 {
		return nil,
			httperr.Invalid("the body has no rules; want an array such as [{\"action\":\"allow\",\"target\":\"203.0.113.0/24\"}]")
	}
	if len(rules) <= maxRules {
		if _, err := o.parseSent(fmt.Appendf(nil, `{"egress":%s}`, b)); err != nil {
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
			whole, part := o.targetKey(r.Target), o.rangeKey(r)
			narrow := part + requestsKey(r.HTTP)
			if covered[whole] || covered[part] || covered[narrow] {
				continue
			}
			covered[narrow] = true
			merged.Egress = append(merged.Egress, r)
		}
		return merged
	}, nil
}

// RemoveTargets reads targets and removes their rules. A target without a rule is no
// error.
func (o *Offer) RemoveTargets(b []byte) (Edit, error) {
	var targets []string
	if err := Decode(b, &targets); err != nil {
		return nil, err
	}
	if len(targets) == 0 {
		return nil, httperr.Invalid("the body has no targets; want an array such as [\"203.0.113.0/24\"]")
	}
	if len(targets) > maxRules {
		return nil, httperr.New(http.StatusRequestEntityTooLarge, "SANDBOX::INVALID_PARAMETER", errs.Invalid,
			"the body has %d targets; no policy has more than %d rules", len(targets), maxRules)
	}
	gone := map[string]bool{}
	for _, t := range targets {
		gone[o.targetKey(t)] = true
	}
	return func(p wire.NetworkPolicy) wire.NetworkPolicy {
		left := wire.NetworkPolicy{DefaultAction: p.DefaultAction, Egress: []wire.NetworkRule{}}
		for _, r := range p.Egress {
			if !gone[o.targetKey(r.Target)] {
				left.Egress = append(left.Egress, r)
			}
		}
		return left
	}, nil
}

// targetKey is the same for two spellings of one target.
func (o *Offer) targetKey(target string) string {
	t := strings.ToLower(strings.TrimSpace(target))
	if a, err := netip.ParseAddr(t); err == nil {
		return netip.PrefixFrom(a, a.BitLen()).String()
	}
	if _, err := netip.ParsePrefix(t); err == nil {
		return t
	}
	if name, err := o.NormalName(t); err == nil {
		return name
	}
	return t
}

// rangeKey is targetKey for a rule that covers all of its target, else a key with ports
// and protocol.
func (o *Offer) rangeKey(r wire.NetworkRule) string {
	if len(r.Ports) == 0 && r.Protocol == "" {
		return o.targetKey(r.Target)
	}
	return fmt.Sprintf("%s %v %s", o.targetKey(r.Target), r.Ports, r.Protocol)
}

// requestsKey is the same for two ways to write the same methods and patterns, and "" for all
// requests.
func requestsKey(q *wire.HTTPRequests) string {
	if q == nil {
		return ""
	}
	set := func(list []string) []string { return slices.Compact(slices.Sorted(slices.Values(list))) }
	return fmt.Sprintf(" %q %q", set(q.Methods), set(q.Paths))
}

// PolicyOf shows the policy as it was sent, or else the rules as they are enforced.
func PolicyOf(t record.Terms) wire.PolicyStatus {
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
			rule := wire.NetworkRule{Action: action, Target: r.Target(), Ports: portsOf(r), Protocol: r.Proto}
			if q := r.Requests; q != nil {
				rule.HTTP = &wire.HTTPRequests{Methods: q.Methods, Paths: q.Paths}
			}
			p.Egress = append(p.Egress, rule)
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

// applyPolicy reads OpenSandbox's networkPolicy. An absent default is deny, so {}
// denies all. null means absent: then the host's default holds.
func (o *Offer) applyPolicy(spec *record.Spec, raw json.RawMessage) error {
	spec.Network.Mode = o.Network
	if !given(raw) {
		return nil
	}
	n, err := o.parseSent(raw)
	if err != nil {
		return err
	}
	var kept bytes.Buffer
	if err := json.Compact(&kept, raw); err != nil || kept.Len() > maxPolicy {
		return httperr.Invalid("networkPolicy has %d bytes; at most %d are allowed", kept.Len(), maxPolicy)
	}
	spec.Network, spec.NetworkPolicy = n, kept.Bytes()
	return nil
}

func given(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }
