package wire

import "time"

// The states of a snapshot.
const (
	SnapshotCreating = "Creating"
	SnapshotReady    = "Ready"
	SnapshotFailed   = "Failed"
	SnapshotDeleting = "Deleting"
)

// CreateSnapshotRequest is the body of POST /sandboxes/{id}/snapshots, which
// may be left out.
type CreateSnapshotRequest struct {
	Name *string `json:"name,omitempty"` // not empty
}

// Snapshot is a frozen copy of the files of a sandbox.
type Snapshot struct {
	ID        string    `json:"id"`
	SandboxID string    `json:"sandboxId"` // its source, which may be gone
	Name      string    `json:"name,omitempty"`
	Status    Status    `json:"status"`
	CreatedAt time.Time `json:"createdAt"`
}

// SnapshotList is one page of snapshots, newest first.
type SnapshotList struct {
	Items      []Snapshot `json:"items"`
	Pagination Pagination `json:"pagination"`
}

// SnapshotInspection answers GET /snapshots/{id}/inspect: what OpenSandbox's
// Snapshot has no room for. (ours)
type SnapshotInspection struct {
	Snapshot
	Image       string   `json:"image"`              // its name at the time
	Security    string   `json:"security,omitempty"` // the level of the sandbox; absent: an older daemon
	ImageDigest string   `json:"imageDigest,omitempty"`
	Layers      []string `json:"layers,omitempty"`
	Bytes       int64    `json:"bytes,omitempty"` // on the pool, shared ones included; absent: the pool does not count

	Memory *SnapshotMemory `json:"memory,omitempty"` // absent: it has the files alone
}

// SnapshotMemory is what a snapshot has of the memory of its sandbox. (ours)
type SnapshotMemory struct {
	Bytes int64  `json:"bytes"`
	Build string `json:"build"` // SHA-256 of the runsc that can restore it
	CPU   string `json:"cpu"`   // the model that it was made on
}

// Change is one line of a diff: what happened to a path, as `docker diff` has it. Only
// the last line may have an Error, and has nothing else then. (ours)
type Change struct {
	Kind  string `json:"kind,omitempty"` // A, C or D
	Path  string `json:"path,omitempty"` // absolute; what is no UTF-8 is replaced
	Error *Error `json:"error,omitempty"`
}
