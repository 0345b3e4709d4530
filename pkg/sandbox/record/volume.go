package record

import (
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// volumePrefix tells the ID of a volume from those of sandboxes and snapshots,
// on sight and on disk.
const volumePrefix = "vol-"

// NewVolumeID draws the ID of a volume, which is the name of its directory on the pool.
// None is used twice.
func NewVolumeID(i instance.Instance) string { return volumePrefix + NewID(i) }

// IsVolumeID reports whether s has the form of a volume's ID. Any other string must
// never reach a path.
func IsVolumeID(s string) bool {
	id, ok := strings.CutPrefix(s, volumePrefix)
	return ok && IsID(id)
}

// VolumeState is the durable state of a volume.
type VolumeState string

// The states of a volume.
const (
	VolumeReady    VolumeState = "ready"
	VolumeDeleting VolumeState = "deleting" // intent; recovery deletes
)

// Volume is what the store keeps for one named volume. Its files lie on the pool
// under its ID, once a sandbox has mounted it.
type Volume struct {
	ID    string      `json:"id"`
	Name  string      `json:"name"` // unique
	State VolumeState `json:"state"`
	Bytes int64       `json:"bytes,omitempty"` // how much it may hold; 0: no limit
	// Owner is the sandbox it was made for and is deleted with; empty: it stays.
	Owner   string    `json:"owner,omitempty"`
	Made    bool      `json:"made,omitempty"` // its files are on the pool
	Created time.Time `json:"created"`
}

// VolumeInfo is a volume and the IDs of the sandboxes that have it mounted, or
// will again.
type VolumeInfo struct {
	Volume
	UsedBy []string
}

// VolumeMount is a volume, or a directory or file of the host, in a sandbox.
type VolumeMount struct {
	Name     string `json:"name"` // as its client calls it; unique in the sandbox
	Path     string `json:"path"` // in the sandbox; absolute and clean
	ReadOnly bool   `json:"readOnly,omitempty"`
	Sub      string `json:"sub,omitempty"` // path below the source of what is mounted; clean
	// Source is a path of the host; empty: a named volume.
	Source string `json:"source,omitempty"` // absolute and clean
	Claim  string `json:"claim,omitempty"`  // name of the volume
	Volume string `json:"volume,omitempty"` // its ID

	// For a volume that does not exist yet.
	Create bool  `json:"create,omitempty"` // make it
	Bytes  int64 `json:"bytes,omitempty"`  // see Volume.Bytes
	Owned  bool  `json:"owned,omitempty"`  // it is deleted with the sandbox
}

// Private are the trees of a sandbox that hold files of the runtime or of sandboxd: no
// mount may hide them, or lie in them.
var Private = []string{"/proc", "/sys", "/dev", "/opt/opensandbox", "/.sandboxd", "/etc/resolv.conf", "/etc/hosts", "/etc/hostname"}

// IsPrivate reports whether a mount at p would hide a Private tree or lie in one. p is
// absolute and clean.
func IsPrivate(p string) bool {
	return p == "/" || slices.ContainsFunc(Private, func(o string) bool { return Within(p, o) || Within(o, p) })
}

// Within reports whether p is dir or lies below it; both are clean.
func Within(p, dir string) bool {
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}

// Outer returns for each mount the index of the innermost mount that it lies in, or -1.
func Outer(all []VolumeMount) []int {
	outer := make([]int, len(all))
	for i := range all {
		outer[i] = -1
		for j := range all {
			if i == j || !Within(all[i].Path, all[j].Path) {
				continue
			}
			if outer[i] < 0 || len(all[j].Path) > len(all[outer[i]].Path) {
				outer[i] = j
			}
		}
	}
	return outer
}
