package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Egress is the rules of the host: they stand before those of each sandbox.
type Egress struct {
	AlwaysDeny  []string `toml:"always_deny"`
	AlwaysAllow []string `toml:"always_allow"`
	MaskSecrets bool     `toml:"mask_secrets"`

	Host policy.Host `toml:"-"` // both, checked
}

// Policy is a named network policy.
type Policy struct {
	Default string   `toml:"default"` // deny, also if it is empty, or allow
	Rules   []string `toml:"rules"`   // "allow TARGET" or "deny TARGET"
}

// Networks are Policies as sandboxes have them.
// Preconditions: the configuration is valid.
func (c *Config) Networks() map[string]record.Network {
	all := map[string]record.Network{}
	for name, p := range c.Policies {
		all[name], _ = p.network(func(string, ...any) {})
	}
	return all
}

func (c *Config) validatePolicies(bad func(string, ...any)) {
	rules := func(key string, list []string) (all []record.Rule) {
		for _, text := range list {
			r, err := policy.ParseRule(text)
			if err != nil {
				bad("%s: %w", key, err)
				continue
			}
			all = append(all, r)
		}
		return all
	}
	c.Egress.Host = policy.Host{
		Deny: rules("egress.always_deny", c.Egress.AlwaysDeny), Allow: rules("egress.always_allow", c.Egress.AlwaysAllow),
	}
	if _, err := policy.Compile(c.Egress.Host, record.Network{Mode: record.NetworkRules}); err != nil {
		bad("egress: %w", err)
	}
	if n := len(c.Policies); n > record.MaxPolicies {
		bad("policies: there are %d tables [policies.NAME]: want at most %d", n, record.MaxPolicies)
	}
	size := 0
	for _, name := range slices.Sorted(maps.Keys(c.Policies)) {
		key := "policies." + name
		if !record.IsPolicyName(name) {
			bad("%s: name of a policy: %s", key, record.WantPolicyName)
			continue
		}
		n, ok := c.Policies[name].network(func(format string, args ...any) { bad(key+"."+format, args...) })
		if !ok {
			continue
		}
		if _, err := policy.Compile(policy.Host{}, n); err != nil {
			bad("%s.rules: %w", key, err)
		}
		b, _ := json.Marshal(n) //nolint:errcheck // rules are plain values
		size += len(b)
	}
	if size > record.MaxPolicyBytes {
		bad("policies: their rules take %d MiB: want at most %d", size>>20, record.MaxPolicyBytes>>20)
	}
}

// network is p as a sandbox has it. ok is false if bad was called.
func (p Policy) network(bad func(string, ...any)) (n record.Network, ok bool) {
	ok = true
	no := func(format string, args ...any) { ok = false; bad(format, args...) }
	switch p.Default {
	case "", "deny":
		n.Mode = record.NetworkRules
	case "allow":
		n.Mode = record.NetworkOpen
	default:
		no("default = %.60q: want deny or allow", p.Default)
	}
	for _, text := range p.Rules {
		action, target, _ := strings.Cut(strings.TrimSpace(text), " ")
		if action != "allow" && action != "deny" {
			no("rules: %.80q: want \"allow TARGET\" or \"deny TARGET\", such as \"allow pypi.org:443\"", text)
			continue
		}
		r, err := policy.ParseRule(strings.TrimSpace(target))
		if err != nil {
			no("rules: %w", fmt.Errorf("%.80q: %w", text, err))
			continue
		}
		r.Allow = action == "allow"
		n.Rules = append(n.Rules, r)
	}
	return n, ok
}
