package wire

import "time"

// The health of a sandbox, by its probe.
const (
	HealthStarting  = "starting" // it has not been ready yet
	HealthHealthy   = "healthy"
	HealthUnhealthy = "unhealthy"
)

// Health is what the probe of a sandbox has found. (ours)
type Health struct {
	State      string     `json:"state"`
	Failures   int        `json:"failures"`             // in a row
	LastOutput string     `json:"lastOutput,omitempty"` // of the last try, and why it failed
	CheckedAt  *time.Time `json:"checkedAt,omitempty"`  // absent: not yet
}

// Idle is the idle policy of a sandbox. (ours)
type Idle struct {
	After  string `json:"after"` // a Go duration
	Action string `json:"action"`
	// Asleep: the policy has paused or hibernated it, and the next use wakes it.
	Asleep bool `json:"asleep,omitempty"`
}
