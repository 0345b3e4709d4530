package record

import (
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Policy is a named network policy, of which sandboxes use a version. An edit adds a
// version. The sandboxes that follow the policy then move to it.
type Policy struct {
	Name    string    `json:"name"`
	Fixed   bool      `json:"fixed,omitempty"` // it is in the configuration, and only edited there
	Created time.Time `json:"created"`
	// Versions are the newest ones, oldest first and never none: see PolicyVersions.
	Versions []PolicyVersion `json:"versions"`
}

// PolicyVersion is one version of a policy. It never changes.
type PolicyVersion struct {
	Number        int       `json:"number"` // from 1
	Made          time.Time `json:"made"`
	Network       Network   `json:"network"`
	NetworkPolicy []byte    `json:"networkPolicy,omitempty"` // raw JSON as sent; empty if it is of the configuration
}

// Same reports whether two versions allow the same and show the same.
func (v PolicyVersion) Same(o PolicyVersion) bool {
	if len(v.Network.Rules) == 0 && len(o.Network.Rules) == 0 { // nil or not
		v.Network.Rules, o.Network.Rules = nil, nil
	}
	return Terms{Network: v.Network, NetworkPolicy: v.NetworkPolicy}.SameNetwork(
		Terms{Network: o.Network, NetworkPolicy: o.NetworkPolicy})
}

// PolicyVersions is how many versions of a policy are kept, fewer at MaxPolicyBytes. A
// sandbox has a copy of the version that it uses, so it loses nothing when that is no
// longer kept.
const PolicyVersions = 10

// The policies of a host are kept in memory and in the state file. Each may have as many
// rules as a sandbox, so their number alone bounds little.
const (
	MaxPolicies    = 256
	MaxPolicyBytes = 64 << 20 // of all kept versions, as JSON; 4,096 rules by name take some 1 MiB
)

// Newest is the version that holds.
func (p *Policy) Newest() PolicyVersion { return p.Versions[len(p.Versions)-1] }

// Version finds a version that is kept; 0 is the newest.
func (p *Policy) Version(number int) (v PolicyVersion, ok bool) {
	if number == 0 {
		return p.Newest(), true
	}
	for _, v := range p.Versions {
		if v.Number == number {
			return v, true
		}
	}
	return v, false
}

// PolicyUse is the policy that a sandbox was given by name. The zero PolicyUse is none.
type PolicyUse struct {
	Name    string `json:"name,omitempty"`
	Version int    `json:"version,omitempty"` // the one in Spec.Network
	Pinned  bool   `json:"pinned,omitempty"`  // the client asked for this version
	// Left says that somebody has changed the policy of the sandbox itself since. It then
	// no longer uses the named one.
	Left bool `json:"left,omitempty"`
}

// Uses reports whether the sandbox has a version of the policy with that name.
func (u PolicyUse) Uses(name string) bool { return u.Name != "" && u.Name == name && !u.Left }

// Follows reports whether the sandbox moves when its policy is edited.
func (u PolicyUse) Follows() bool { return u.Name != "" && !u.Pinned && !u.Left }

// PolicyUser is a sandbox that uses a policy.
type PolicyUser struct {
	ID, Name string
	Use      PolicyUse
}

// PolicyInfo is a policy with the sandboxes that use it.
type PolicyInfo struct {
	Policy
	UsedBy []PolicyUser // by ID
}

// PolicyEdit is what an edit of a policy did.
type PolicyEdit struct {
	PolicyInfo
	Added   bool         // the policy is new
	Changed bool         // it has a new version
	Moved   []PolicyUser // to the newest version; it holds for them
	Pending []PolicyUser // another operation holds them: they move when that ends
	Failed  []PolicyUser // they keep the version they have until the sweep succeeds; see Reasons
	Reasons map[string]error
}

// policyName has no dot, so that no name looks like a file, and no "@".
var policyName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_-]{0,62}$`)

// IsPolicyName reports whether s can be the name of a policy.
func IsPolicyName(s string) bool { return policyName.MatchString(s) }

// WantPolicyName says what IsPolicyName accepts.
const WantPolicyName = "want 1 to 63 characters of A-Z a-z 0-9 _ - that begin with a letter or digit"

// ParsePolicyUse reads NAME, which follows the policy, or NAME@VERSION, which is pinned.
func ParsePolicyUse(s string) (u PolicyUse, ok bool) {
	name, version, pinned := strings.Cut(s, "@")
	u = PolicyUse{Name: name, Pinned: pinned}
	if !IsPolicyName(name) {
		return u, false
	}
	if pinned {
		n, err := strconv.Atoi(version)
		if err != nil || n < 1 || strconv.Itoa(n) != version {
			return u, false
		}
		u.Version = n
	}
	return u, true
}
