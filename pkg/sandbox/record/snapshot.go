package record

import (
	"cmp"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// snapshotPrefix tells the ID of a snapshot from that of a sandbox, on sight
// and on disk.
const snapshotPrefix = "snap-"

// NewSnapshotID draws the ID of a snapshot.
func NewSnapshotID(i instance.Instance) string { return snapshotPrefix + NewID(i) }

// IsSnapshotID reports whether s has the form of a snapshot's ID. Any other string must
// never reach a path.
func IsSnapshotID(s string) bool {
	id, ok := strings.CutPrefix(s, snapshotPrefix)
	return ok && IsID(id)
}

// SnapshotOf reports whether id is the ID of a snapshot of instance i.
func SnapshotOf(i instance.Instance, id string) bool {
	return IsSnapshotID(id) && strings.HasPrefix(id, snapshotPrefix+i.String())
}

// Level is the level of security of the sandbox.
func (s *Snapshot) Level() Security { return cmp.Or(s.Security, SecurityDefault) }

// SnapshotRequest says what snapshot to take.
type SnapshotRequest struct {
	Name   string
	Unique bool // refuse it if another snapshot has the name
	// Temporary is one without a name that the caller deletes. If the daemon ends first, the
	// next one deletes it.
	Temporary bool
	Memory    bool // also of what the sandbox has in memory
}

// SnapshotState is the durable state of a snapshot.
type SnapshotState string

// The states of a snapshot.
const (
	SnapshotCreating SnapshotState = "creating" // intent; recovery thaws the source and ends it as failed
	SnapshotReady    SnapshotState = "ready"
	SnapshotFailed   SnapshotState = "failed"   // it has a record, and nothing on the pool
	SnapshotDeleting SnapshotState = "deleting" // intent; recovery deletes
)

// Snapshot is what the store keeps for one snapshot: the frozen disk of a sandbox,
// which is on the pool under its ID, and the image below that disk.
type Snapshot struct {
	ID   string `json:"id"`
	Name string `json:"name,omitempty"` // of any form; several snapshots may have the same
	// Temporary is one that its maker deletes. The next daemon does if that one cannot.
	Temporary bool `json:"temporary,omitempty"`

	Source  string        `json:"source"` // ID of the sandbox; it may be long gone
	State   SnapshotState `json:"state"`
	Message string        `json:"message,omitempty"` // why it failed, for people
	Image   Image         `json:"image"`

	Security Security `json:"security,omitempty"` // of the sandbox; empty in old records, see Level

	Memory *Memory `json:"memory,omitempty"` // nil: it has the files alone

	Bytes   int64     `json:"bytes,omitempty"` // of files on the pool when it was taken; 0: the pool does not count
	Created time.Time `json:"created"`
	Changed time.Time `json:"changed"` // last transition
}

// HeldBytes is what the snapshot takes on the host's disks, as far as it was counted. Limits
// and reports use it.
func (s *Snapshot) HeldBytes() int64 {
	if s.Memory == nil {
		return s.Bytes
	}
	return s.Bytes + s.Memory.Bytes()
}
