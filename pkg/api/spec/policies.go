package spec

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

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

// templated are the extensions that a template of a pool may have and that its sandboxes take
// over: what a member has from its start.
var templated = []string{wire.ExtRuntime, wire.ExtSecurity, wire.ExtReadOnly, wire.ExtTmpfs, wire.ExtPrestart}

// ofPools are those that are for the pool alone.
var ofPools = []string{wire.ExtPoolWarm, wire.ExtPoolReady, wire.ExtPoolMaxAge}

func badPool(format string, args ...any) error {
	return errs.Wire(httperr.Invalid(format, args...), "POOL::INVALID")
}

// PoolName checks the name of a pool. It has the form of that of a policy.
func PoolName(s string) error {
	if !record.IsPolicyName(s) {
		return badPool("pool name %q: %s", httperr.Clip(s, 80), record.WantPolicyName)
	}
	return nil
}

// Pool makes of a request a pool, or changes one: what the request leaves out stays as it is.
func (o *Offer) Pool(p *record.Pool, req *wire.PoolRequest) error {
	if req.CapacitySpec == nil {
		return badPool("capacitySpec is missing; send " +
			"{\"bufferMin\":1,\"bufferMax\":2,\"poolMin\":0,\"poolMax\":10}")
	}
	p.Capacity = record.Capacity{
		BufferMin: req.CapacitySpec.BufferMin, BufferMax: req.CapacitySpec.BufferMax,
		PoolMin: req.CapacitySpec.PoolMin, PoolMax: req.CapacitySpec.PoolMax,
	}
	if why := p.Capacity.Check(); why != "" {
		return badPool("capacitySpec: %s", why)
	}
	if given(req.Template) {
		p.Template = slices.Clone(req.Template)
	}
	return o.poolTemplate(p)
}

// poolTemplate checks the template of p, and sets what of p is in it.
func (o *Offer) poolTemplate(p *record.Pool) error {
	if len(p.Template) == 0 {
		return badPool("template is missing; send the part of a creation that members are made from, such as " +
			"{\"image\":{\"uri\":\"python\"}}")
	}
	if len(p.Template) > record.MaxPoolTemplate {
		return badPool("template is larger than %d KiB", record.MaxPoolTemplate>>10)
	}
	t, err := templateOf(p)
	if err != nil {
		return err
	}
	for _, k := range slices.Sorted(maps.Keys(t.Extensions)) {
		if !slices.Contains(templated, k) && !slices.Contains(ofPools, k) {
			return badPool("template: extension %q is bound when a sandbox is created; a template may have %s, %s",
				httperr.Clip(k, 60), strings.Join(templated, ", "), strings.Join(ofPools, ", "))
		}
	}
	for k, line := range map[string]*string{wire.ExtPoolWarm: &p.Warm, wire.ExtPoolReady: &p.Ready} {
		*line = t.Extensions[k]
		if why := record.CheckPoolLine(*line); why != "" {
			return badPool("template: extension %s: %s", k, why)
		}
	}
	p.MaxAge = 0
	if text, ok := t.Extensions[wire.ExtPoolMaxAge]; ok {
		if p.MaxAge, err = time.ParseDuration(text); err != nil || p.MaxAge < time.Minute {
			return badPool("template: extension %s %q: want a duration of at least 1m, such as 1h", wire.ExtPoolMaxAge,
				httperr.Clip(text, 40))
		}
	}
	_, _, err = o.Member(p)
	return err
}

// templateOf reads the template of a pool. Unknown fields are refused: nothing of them would
// be in a member.
func templateOf(p *record.Pool) (t wire.PoolTemplate, err error) {
	d := json.NewDecoder(bytes.NewReader(p.Template))
	d.DisallowUnknownFields()
	if err := d.Decode(&t); err != nil {
		return t, badPool("template: want the image, resourceLimits and extensions of a creation: %s", httperr.Clip(err.Error(), 200))
	}
	if t.Image == nil || t.Image.Auth != nil {
		return t, badPool("template.image: want {\"uri\":\"NAME\"} of an image of this host, without auth")
	}
	return t, nil
}

// Member is what the members of a pool are made from: a creation without an image, which the
// caller looks up by its name.
func (o *Offer) Member(p *record.Pool) (s record.Spec, image string, err error) {
	t, err := templateOf(p)
	if err != nil {
		return s, "", err
	}
	req := wire.CreateRequest{Image: t.Image, ResourceLimits: t.ResourceLimits, Extensions: startOf(&t)}
	req.Extensions[wire.ExtIdle] = "true"
	if s, err = o.Spec(&req); err != nil {
		return s, "", err
	}
	// Nobody sees these of a member.
	s.Extensions, s.ResourceLimits, s.Timeout = nil, nil, 0
	return s, t.Image.URI, nil
}

// startOf are the extensions of a template that sandboxes take over.
func startOf(t *wire.PoolTemplate) map[string]string {
	all := map[string]string{}
	for _, k := range templated {
		if v, ok := t.Extensions[k]; ok {
			all[k] = v
		}
	}
	return all
}

// FromPool adds to a creation what the template of its pool has and the creation does not say.
func FromPool(req *wire.CreateRequest, p *record.Pool) error {
	if req.SnapshotID != "" {
		return httperr.Invalid("snapshotId and extensions.%s are both given; leave one out", wire.ExtPool)
	}
	t, err := templateOf(p)
	if err != nil {
		return err
	}
	ext := startOf(&t)
	maps.Copy(ext, req.Extensions)
	if req.Image == nil {
		req.Image = t.Image
	}
	if len(req.ResourceLimits) == 0 {
		req.ResourceLimits = t.ResourceLimits
	}
	if len(req.Entrypoint) == 0 && ext[wire.ExtImageCommand] != "true" {
		ext[wire.ExtIdle] = "true"
	}
	req.Extensions = ext
	return nil
}

// PoolOf shows a pool.
func PoolOf(i record.PoolInfo) wire.Pool {
	source := wire.PolicyOfStore
	if i.Fixed {
		source = wire.PolicyOfConfiguration
	}
	return wire.Pool{
		Name: i.Name, Template: json.RawMessage(i.Template), Source: source, CreatedAt: i.Created,
		CapacitySpec: wire.PoolCapacity{
			BufferMin: i.Capacity.BufferMin, BufferMax: i.Capacity.BufferMax, PoolMin: i.Capacity.PoolMin, PoolMax: i.Capacity.PoolMax,
		},
		Status: wire.PoolStatus{
			Total: i.Available + i.Allocated, Allocated: i.Allocated, Available: i.Available, Revision: i.Revision, Message: i.Trouble,
			Hits: i.Work[record.PoolHit].N, Misses: i.Work[record.PoolMiss].N, Refused: i.Work[record.PoolRefused].N,
		},
	}
}

// PoolUse shows the pool of a sandbox; nil: none.
func PoolUse(u record.PoolUse) *wire.PoolUse {
	if u.Name == "" {
		return nil
	}
	return &wire.PoolUse{Name: u.Name, Hit: u.Miss == "", Miss: u.Miss}
}
