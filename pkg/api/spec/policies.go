package spec

import (
	"bytes"
	"errors"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// PolicyName checks the name of a policy, without a version.
func PolicyName(s string) error {
	if !record.IsPolicyName(s) {
		return errs.Wire(httperr.Invalid("policy name %q: %s", httperr.Clip(s, 80), record.WantPolicyName), "POLICY::INVALID_NAME")
	}
	return nil
}

// PolicyUse reads NAME or NAME@VERSION.
func PolicyUse(s string) (record.PolicyUse, error) {
	use, ok := record.ParsePolicyUse(s)
	if !ok {
		return use, errs.Wire(httperr.Invalid("policy %q: want NAME, or NAME@VERSION such as build@3; a NAME: %s", httperr.Clip(s, 80),
			record.WantPolicyName), "POLICY::INVALID_NAME")
	}
	return use, nil
}

// PolicyVersion reads the body of an edit of a named policy. It checks what it checks of the
// policy of a sandbox.
func (o *Offer) PolicyVersion(body []byte) (v record.PolicyVersion, err error) {
	if len(bytes.TrimSpace(body)) == 0 {
		return v, httperr.Invalid("the body is empty; send a network policy, such as {} for one that denies all")
	}
	edit, err := o.ReplacePolicy(body)
	if err != nil {
		return v, err
	}
	var t record.Terms
	err = o.SetPolicy(&t, edit(wire.NetworkPolicy{}))
	return record.PolicyVersion{Network: t.Network, NetworkPolicy: t.NetworkPolicy}, err
}

// ruleExtensions are the other ways to say in an extension what a sandbox may reach.
var ruleExtensions = []string{wire.ExtNetwork, wire.ExtAllow, wire.ExtRules}

// applyNamed takes the policy that a creation names. The store gives the sandbox its rules.
func (o *Offer) applyNamed(spec *record.Spec, req *wire.CreateRequest) (err error) {
	name, ok := req.Extensions[wire.ExtPolicy]
	if !ok {
		return nil
	}
	if given(req.NetworkPolicy) || slices.ContainsFunc(ruleExtensions, func(k string) bool { _, ok := req.Extensions[k]; return ok }) {
		return httperr.Invalid("extension %s is given, and so is networkPolicy or one of %s; use one of them", wire.ExtPolicy,
			strings.Join(ruleExtensions, ", "))
	}
	if o.NoPolicies {
		return errs.New(errs.Unsupported, "extension %s: this daemon was built without named policies; send a networkPolicy",
			wire.ExtPolicy)
	}
	spec.Policy, err = PolicyUse(name)
	return err
}

// Policy shows a policy as of one of its versions.
func Policy(i record.PolicyInfo, v record.PolicyVersion) wire.Policy {
	out := wire.Policy{
		Name: i.Name, Version: v.Number, Source: source(i), Versions: []wire.PolicyVersion{}, UsedBy: PolicyUsers(i.UsedBy),
		NetworkPolicy: *PolicyOf(record.Terms{Network: v.Network, NetworkPolicy: v.NetworkPolicy}).Policy, CreatedAt: Micros(i.Created),
	}
	for _, v := range i.Versions {
		out.Versions = append(out.Versions, wire.PolicyVersion{Version: v.Number, CreatedAt: Micros(v.Made)})
	}
	return out
}

// PolicySummary shows a policy in a list.
func PolicySummary(i record.PolicyInfo) wire.PolicySummary {
	v := i.Newest()
	rules := PolicyOf(record.Terms{Network: v.Network, NetworkPolicy: v.NetworkPolicy}).Policy
	return wire.PolicySummary{
		Name: i.Name, Version: v.Number, DefaultAction: rules.DefaultAction, Rules: len(rules.Egress), Source: source(i),
		UsedBy: PolicyUsers(i.UsedBy), CreatedAt: Micros(i.Created), EditedAt: Micros(v.Made),
	}
}

func source(i record.PolicyInfo) string {
	if i.Fixed {
		return wire.PolicyOfConfiguration
	}
	return wire.PolicyOfStore
}

// PolicyUsers shows sandboxes that use a policy.
func PolicyUsers(all []record.PolicyUser) []wire.PolicyUser {
	out := []wire.PolicyUser{}
	for _, u := range all {
		out = append(out, wire.PolicyUser{ID: u.ID, Name: u.Name, Version: u.Use.Version, Pinned: u.Use.Pinned})
	}
	return out
}

// PolicyEdit shows what an edit of a policy did.
func PolicyEdit(e record.PolicyEdit) wire.PolicyEdit {
	out := wire.PolicyEdit{
		Policy: Policy(e.PolicyInfo, e.Newest()), Changed: e.Changed,
		Moved: PolicyUsers(e.Moved), Pending: PolicyUsers(e.Pending), Failed: PolicyUsers(e.Failed),
	}
	for i, u := range out.Failed {
		text := "the daemon's log says why"
		if why, ok := errors.AsType[*errs.Error](e.Reasons[u.ID]); ok && why.Code != errs.Internal {
			text = httperr.Clip(why.Text, 400)
		}
		out.Failed[i].Message = text
	}
	return out
}

// SandboxPolicy shows the policy that a sandbox was given by name; nil: none.
func SandboxPolicy(u record.PolicyUse) *wire.SandboxPolicy {
	if u.Name == "" {
		return nil
	}
	return &wire.SandboxPolicy{Name: u.Name, Version: u.Version, Pinned: u.Pinned, Changed: u.Left}
}
