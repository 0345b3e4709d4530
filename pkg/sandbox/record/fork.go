package record

import "github.com/sandboxd/sandboxd/internal/instance"

// Fork says of which fork a sandbox is a copy.
type Fork struct {
	ID     string `json:"id"`
	Source string `json:"source"` // ID of the sandbox that was copied; it may be gone
	Count  int    `json:"count"`  // copies of this fork
	Index  int    `json:"index"`  // of this copy, from 1
	// Vault: the source had a credential vault when the fork began, so the copy gets one.
	Vault bool `json:"vault,omitempty"`
}

// NewForkID draws the ID of a fork.
func NewForkID(i instance.Instance) string { return "fork-" + NewID(i) }
