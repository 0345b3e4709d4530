package wire

import "time"

// VolumeMount is storage in a sandbox: exactly one of Host, PVC and OSSFS says
// which.
type VolumeMount struct {
	Name      string    `json:"name"` // DNS label, unique in the sandbox
	Host      *HostPath `json:"host,omitempty"`
	PVC       *PVC      `json:"pvc,omitempty"`
	OSSFS     *OSSFS    `json:"ossfs,omitempty"`
	MountPath string    `json:"mountPath"`
	ReadOnly  bool      `json:"readOnly"`
	SubPath   string    `json:"subPath,omitempty"` // relative, below what is named
}

// HostPath is a directory or file of the host that the configuration allows to mount.
type HostPath struct {
	Path string `json:"path"`
}

// PVC is a named volume. The last three of OpenSandbox's fields are hints for
// Kubernetes; sandboxd uses Storage only.
type PVC struct {
	ClaimName                  string  `json:"claimName"`
	CreateIfNotExists          *bool   `json:"createIfNotExists,omitempty"` // nil: true
	DeleteOnSandboxTermination bool    `json:"deleteOnSandboxTermination,omitempty"`
	Storage                    *string `json:"storage,omitempty"` // how much a new one holds, as 10Gi
}

// OSSFS is a bucket of Alibaba's object storage.
type OSSFS struct{}

// Volume is a named volume. (ours)
type Volume struct {
	Name      string    `json:"name"`
	ID        string    `json:"id"`                  // of its directory on the pool
	SizeBytes int64     `json:"sizeBytes"`           // how much it may hold; 0: no limit
	UsedBytes *int64    `json:"usedBytes,omitempty"` // absent: the pool does not count
	UsedBy    []string  `json:"usedBy"`              // sandboxes that have it mounted, in whatever state
	SandboxID string    `json:"sandboxId,omitempty"` // it is deleted with this sandbox
	CreatedAt time.Time `json:"createdAt"`
}

// VolumeList answers GET /volumes, by name. (ours)
type VolumeList struct {
	Items []Volume `json:"items"`
}

// VolumeRequest is the body of POST /volumes. (ours)
type VolumeRequest struct {
	Name string `json:"name"`
	Size string `json:"size,omitempty"` // as 10Gi; absent: the host's default
}

// VolumePruneReport answers POST /volumes/prune. (ours)
type VolumePruneReport struct {
	Volumes []string `json:"volumes"` // names
}
