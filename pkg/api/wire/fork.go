package wire

import (
	"encoding/json"
	"time"
)

// ForkRequest is the body of POST /sandboxes/{id}/fork. (ours, as all of this file)
type ForkRequest struct {
	Count   int    `json:"count"`             // 1 to 256
	Mode    string `json:"mode,omitempty"`    // ForkMemory or ForkFiles, the default
	Timeout *int64 `json:"timeout,omitempty"` // seconds that each copy lives; required, or ExtTimeout in Overrides
	// Overrides is what the copies have otherwise than the source.
	Overrides *ForkOverrides `json:"overrides,omitempty"`
}

// What a fork copies.
const (
	ForkMemory = "memory" // files, memory and processes
	ForkFiles  = "files"
)

// ForkOverrides are the fields of CreateRequest that a copy may have for itself. The name, as
// ExtName, gets the number of the copy: NAME-1.
type ForkOverrides struct {
	ResourceLimits map[string]string  `json:"resourceLimits,omitempty"`
	Env            map[string]*string `json:"env,omitempty"` // beside that of the source
	Metadata       map[string]string  `json:"metadata,omitempty"`
	NetworkPolicy  json.RawMessage    `json:"networkPolicy,omitempty"`
	Extensions     map[string]string  `json:"extensions,omitempty"`
}

// Fork answers POST /sandboxes/{id}/fork and GET /forks/{id}.
type Fork struct {
	ID        string      `json:"id"`
	SandboxID string      `json:"sandboxId"` // the source, which may be gone
	Mode      string      `json:"mode"`
	Count     int         `json:"count"`
	Status    Status      `json:"status"` // Creating, Ready or Failed
	Sandboxes []ForkChild `json:"sandboxes"`
	CreatedAt time.Time   `json:"createdAt"`
}

// The states of a fork.
const (
	ForkCreating = "Creating"
	ForkReady    = "Ready"
	ForkFailed   = "Failed" // not all copies came up
)

// ForkOf says of which fork a sandbox is a copy.
type ForkOf struct {
	ID     string `json:"id"`
	Source string `json:"source"` // ID of the sandbox that was copied; it may be gone
	Mode   string `json:"mode"`
	Index  int    `json:"index"` // from 1
}

// ForkChild is a copy.
type ForkChild struct {
	ID    string `json:"id"`
	Name  string `json:"name,omitempty"`
	State string `json:"state"` // as of a sandbox; Deleted: it is gone
}
