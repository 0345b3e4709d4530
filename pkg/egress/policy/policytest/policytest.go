// Package policytest makes policies for tests.
package policytest

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Network is a policy of that mode. specs are its rules, as sandboxctl takes them; one that
// begins with "!" denies. parse is policy.ParseRule, whose own tests are of those that call this.
func Network(
	t testing.TB, parse func(string) (record.Rule, error), mode record.NetworkMode, specs ...string,
) record.Network {
	t.Helper()
	n := record.Network{Mode: mode}
	for _, s := range specs {
		spec, deny := strings.CutPrefix(s, "!")
		r, err := parse(spec)
		if err != nil {
			t.Fatal(err)
		}
		r.Allow = !deny
		n.Rules = append(n.Rules, r)
	}
	return n
}
