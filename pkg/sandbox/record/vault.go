package record

import (
	"bytes"
	"time"
)

// Vault is what the state file keeps of the credentials of a sandbox: one encrypted value,
// which package internal/sealed makes. A sandbox has one vault or none.
type Vault struct {
	Sandbox  string    `json:"sandbox"`  // the ID
	Revision int       `json:"revision"` // from 1; each edit adds 1
	Changed  time.Time `json:"changed"`
	Sealed   []byte    `json:"sealed"` // for Purpose
}

// The vaults of a host are kept in memory and in the state file.
const (
	MaxVaultBytes  = 1 << 20  // of one, sealed
	MaxVaultsBytes = 64 << 20 // of all, as JSON, which takes a third more than what is sealed
)

// Purpose is what a vault is sealed for: a value of one sandbox does not open as that of
// another.
func (v Vault) Purpose() string { return "vault/" + v.Sandbox }

// Same reports whether o is v and not an edit of it: what is sealed twice differs, even if
// it is the same secret.
func (v Vault) Same(o Vault) bool {
	return v.Sandbox == o.Sandbox && v.Revision == o.Revision && bytes.Equal(v.Sealed, o.Sealed)
}
