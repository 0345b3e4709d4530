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
		"what JSON makes longer":  {env: value(strings.Repeat("\x01", maxEnvBytes-3)), refused: "put data into files"},
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
	// A copy has the environment of its source, too.
	source := &record.Record{ID: "daaaaaaaaaaa", Spec: record.Spec{Runtime: "runc", Env: map[string]string{}}}
	for i := range 10 {
		source.Spec.Env[fmt.Sprint("B", i)] = strings.Repeat("x", 120<<10)
	}
	if _, _, err := o.Forked(&wire.ForkRequest{Count: 1, Timeout: new(int64(600))}, source, false); !errs.Is(err, errs.Invalid) ||
		!strings.Contains(err.Error(), "of the daemon's state") {
		t.Errorf("a copy of a source that an older release made: %v", err)
	}
}
