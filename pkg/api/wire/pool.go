package wire

import (
	"encoding/json"
	"time"
)

// PoolRequest is the body of POST /pools and PUT /pools/{name}.
type PoolRequest struct {
	Name         string          `json:"name"`     // of a new pool
	Template     json.RawMessage `json:"template"` // a PoolTemplate; of a change: as it is if absent
	CapacitySpec *PoolCapacity   `json:"capacitySpec"`
}

// PoolTemplate is the part of a CreateRequest that the members of a pool are made from. (ours;
// upstream has the template of a Kubernetes pod)
type PoolTemplate struct {
	Image          *Image            `json:"image,omitempty"`
	ResourceLimits map[string]string `json:"resourceLimits,omitempty"`
	Extensions     map[string]string `json:"extensions,omitempty"` // runtime, security, readonly, tmpfs, prestart, pool.warm, pool.max-age
}

// PoolCapacity bounds a pool: see record.Capacity.
type PoolCapacity struct {
	BufferMax int `json:"bufferMax"`
	BufferMin int `json:"bufferMin"`
	PoolMax   int `json:"poolMax"`
	PoolMin   int `json:"poolMin"`
}

// Pool is a pool of sandboxes that are kept ready.
type Pool struct {
	Name         string          `json:"name"`
	Template     json.RawMessage `json:"template"` // (ours)
	CapacitySpec PoolCapacity    `json:"capacitySpec"`
	Status       PoolStatus      `json:"status"`
	Source       string          `json:"source"` // PolicyOfStore, PolicyOfConfiguration (ours)
	CreatedAt    time.Time       `json:"createdAt"`
}

// PoolStatus is the present state of a pool.
type PoolStatus struct {
	Total     int    `json:"total"`     // members and sandboxes
	Allocated int    `json:"allocated"` // sandboxes
	Available int    `json:"available"` // ready members
	Revision  string `json:"revision"`  // of what members are made from; empty: not known yet
	// The rest is ours: why no member can be made, and what happened since the daemon started.
	Message string `json:"message,omitempty"`
	Hits    uint64 `json:"hits"`    // sandboxes that took a member
	Misses  uint64 `json:"misses"`  // sandboxes that named the pool and came up cold
	Refused uint64 `json:"refused"` // creations that were refused: the pool was full
}

// PoolList answers GET /pools, by name.
type PoolList struct {
	Items []Pool `json:"items"`
}

// PoolUse is the pool that a sandbox is of. (ours)
type PoolUse struct {
	Name string `json:"name"`
	Hit  bool   `json:"hit"`            // it took a member
	Miss string `json:"miss,omitempty"` // why it took none
}
