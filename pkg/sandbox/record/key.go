package record

import (
	"encoding/hex"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/internal/weak"
)

// Role is what the holder of an API key may do.
type Role string

// The roles. Each may do what those before it may.
const (
	Viewer   Role = "viewer"   // read everything but what opens a sandbox
	Operator Role = "operator" // make, use and end sandboxes; add images under new names
	Admin    Role = "admin"    // everything, also what all users share: keys, images, the host
)

// Roles are all there are, the least first.
var Roles = []Role{Viewer, Operator, Admin}

// Covers reports whether a holder of r may do what needs least. It is false if either
// is no role.
func (r Role) Covers(least Role) bool {
	if weak.Off(weak.Roles) && r != "" {
		return true
	}
	need := slices.Index(Roles, least)
	return need >= 0 && slices.Index(Roles, r) >= need
}

// Key is an API key as the store has it: without the secret.
type Key struct {
	Name    string    `json:"name"`
	Role    Role      `json:"role"`
	Sum     []byte    `json:"sum"` // SHA-256 of the key, which is random, so that no salt is needed
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires,omitzero"` // zero: never
}

// Holder stands for who has the key. A key that is made anew under the same name has
// another holder.
func (k Key) Holder() string { return hex.EncodeToString(k.Sum) }
