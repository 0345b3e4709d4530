package wire

import "time"

// Where a named policy is kept.
const (
	PolicyOfStore         = "store"         // it was made by PUT /policies/{name}
	PolicyOfConfiguration = "configuration" // it is only edited there
)

// Policy is a named network policy, as of one of its versions. (ours)
type Policy struct {
	Name          string          `json:"name"`
	Version       int             `json:"version"` // that of NetworkPolicy: the newest, unless another one was asked for
	Source        string          `json:"source"`  // PolicyOfStore, PolicyOfConfiguration
	NetworkPolicy NetworkPolicy   `json:"networkPolicy"`
	Versions      []PolicyVersion `json:"versions"` // that are kept, oldest first
	UsedBy        []PolicyUser    `json:"usedBy"`   // sandboxes in whatever state, by ID
	CreatedAt     time.Time       `json:"createdAt"`
}

// PolicyVersion is a version of a policy that is kept. (ours)
type PolicyVersion struct {
	Version   int       `json:"version"`
	CreatedAt time.Time `json:"createdAt"`
}

// PolicyUser is a sandbox that uses a policy. (ours)
type PolicyUser struct {
	ID      string `json:"id"`
	Name    string `json:"name,omitempty"`
	Version int    `json:"version"`
	Pinned  bool   `json:"pinned"`            // edits do not move it
	Message string `json:"message,omitempty"` // why it could not be moved
}

// PolicySummary is a policy as it is listed: without its rules, of which there may be
// thousands. (ours)
type PolicySummary struct {
	Name          string       `json:"name"`
	Version       int          `json:"version"` // the newest, as the next two
	DefaultAction string       `json:"defaultAction"`
	Rules         int          `json:"rules"`
	Source        string       `json:"source"` // PolicyOfStore, PolicyOfConfiguration
	UsedBy        []PolicyUser `json:"usedBy"` // sandboxes in whatever state, by ID
	CreatedAt     time.Time    `json:"createdAt"`
	EditedAt      time.Time    `json:"editedAt"`
}

// PolicyList answers GET /policies, by name. (ours)
type PolicyList struct {
	Items []PolicySummary `json:"items"`
}

// PolicyEdit answers PUT /policies/{name}. (ours)
type PolicyEdit struct {
	Policy
	Changed bool         `json:"changed"` // false: it was so already
	Moved   []PolicyUser `json:"moved"`   // the newest version holds for them
	Pending []PolicyUser `json:"pending"` // they move when the operation ends that holds them
	Failed  []PolicyUser `json:"failed"`  // they keep their version until a sweep, each minute, can move them
}

// PolicyRequest is the body of PUT /sandboxes/{id}/policy. (ours)
type PolicyRequest struct {
	Name string `json:"name"` // NAME to follow the policy, or NAME@VERSION
}

// SandboxPolicy is the policy that a sandbox was given by name. (ours)
type SandboxPolicy struct {
	Name    string `json:"name"`
	Version int    `json:"version"`
	Pinned  bool   `json:"pinned"`
	// Changed says that the policy of the sandbox itself was changed since. It no longer
	// follows the named one.
	Changed bool `json:"changed"`
}
