package spec

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestStored: what a creation keeps in the state is bounded in all, and not only each part of
// it. As many variables and rules as OpenSandbox allows fit.
func TestStored(t *testing.T) {
	o := &Offer{ParseRule: policy.ParseRule, ParsePolicy: policy.FromJSON, NormalName: policy.NormalName, NoVolumes: true}
	o.Complete()
	rules := func(host string) json.RawMessage {
		var all []string
		for i := range maxRules {
			all = append(all, fmt.Sprintf(`{"action":"allow","target":"host-%d.%s"}`, i, host))
		}
		return json.RawMessage(`{"defaultAction":"deny","egress":[` + strings.Join(all, ",") + `]}`)
	}
	many, long := rules("example.com"), rules(strings.Repeat("a-part-of-it.", 12)+"example.com")
	value := func(s string) map[string]*string { return map[string]*string{"A": &s} }
	for name, c := range map[string]struct {
		env     map[string]*string
		policy  json.RawMessage
		refused string
	}{
		"the largest environment": {env: value(strings.Repeat("x", maxEnvBytes-3))},
		"a byte more":             {env: value(strings.Repeat("x", maxEnvBytes-2)), refused: "env is larger than 256 KiB"},
		"the most rules":          {policy: many},
		"both":                    {env: value(strings.Repeat("x", maxEnvBytes-3)), policy: many},
		"rules with long names":   {policy: long, refused: "named policy"},
		"what JSON makes longer":  {env: value(strings.Repeat("<\x01&\x7f\"\\", (maxEnvBytes-3)/6))},
	} {
		req := &wire.CreateRequest{Image: &wire.Image{URI: "python"}, Env: c.env, NetworkPolicy: c.policy, Extensions: map[string]string{
			wire.ExtIdle: "true",
		}}
		s, err := o.Spec(req)
		b, merr := json.Marshal(s)
		if merr != nil {
			t.Fatal(merr)
		}
		if c.refused == "" && err != nil || c.refused != "" && (!errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), c.refused)) {
			t.Errorf("%s, %d bytes as JSON: %v", name, len(b), err)
		}
	}
	for text, want := range map[string]int{"<\x01\"\\é": 8, `\u0001\n`: 10} {
		if b, err := json.Marshal(text); err != nil || plainSize(b) != want {
			t.Errorf("%s counts as %d bytes, want %d (%v)", b, plainSize(b), want, err)
		}
	}
	// A copy has the environment of its source, too: that of an earlier commit may have 1 MiB of it
	// beside the rest. Copies of copies that each add some do not grow without an end.
	source := &record.Record{ID: "daaaaaaaaaaa", Spec: record.Spec{
		Runtime: "runc", Env: map[string]string{"A": strings.Repeat("x", 1100<<10)},
	}}
	copies := 0
	var err error
	for ; err == nil && copies < 20; copies++ {
		req := &wire.ForkRequest{Count: 1, Timeout: new(int64(600)), Overrides: &wire.ForkOverrides{Env: map[string]*string{
			fmt.Sprint("B", copies): new(strings.Repeat("x", 250<<10)),
		}}}
		var specs []record.Spec
		if specs, _, err = o.Forked(req, source, false); err == nil {
			source = &record.Record{ID: "daaaaaaaaaaa", Spec: specs[0]}
		}
	}
	if copies != 8 || !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "of the daemon's state") {
		t.Errorf("copy %d of a copy: %v", copies, err)
	}
}
