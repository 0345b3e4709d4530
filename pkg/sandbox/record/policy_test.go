package record

import (
	"strings"
	"testing"
)

func TestParsePolicyUse(t *testing.T) {
	for text, want := range map[string]PolicyUse{
		"build": {Name: "build"}, "a": {Name: "a"}, "B-u_9": {Name: "B-u_9"}, "build@1": {Name: "build", Version: 1, Pinned: true},
		strings.Repeat("x", 63) + "@120": {Name: strings.Repeat("x", 63), Version: 120, Pinned: true},
	} {
		if got, ok := ParsePolicyUse(text); !ok || got != want {
			t.Errorf("%q: %+v, %v", text, got, ok)
		}
	}
	for _, text := range []string{
		"", "@", "@1", "build@", "build@0", "build@-1", "build@+1", "build@01", "build@1@2", "build@1 ", "build@99999999999999999999",
		"-a", "a.json", "a/b", "../a", "a b", "ä", "a\n", strings.Repeat("x", 64),
	} {
		if got, ok := ParsePolicyUse(text); ok {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

// TestPolicyUse: who moves with an edit, and who keeps a policy from being deleted.
func TestPolicyUse(t *testing.T) {
	for name, c := range map[string]struct {
		use           PolicyUse
		uses, follows bool
	}{
		"none":     {PolicyUse{}, false, false},
		"follower": {PolicyUse{Name: "build", Version: 2}, true, true},
		"pinned":   {PolicyUse{Name: "build", Version: 2, Pinned: true}, true, false},
		"left":     {PolicyUse{Name: "build", Version: 2, Left: true}, false, false},
	} {
		if c.use.Uses("build") != c.uses || c.use.Follows() != c.follows || c.use.Uses("other") || c.use.Uses("") {
			t.Errorf("%s: uses it: %v, follows: %v", name, c.use.Uses("build"), c.use.Follows())
		}
	}
}
