// Package wire holds the JSON of the lifecycle API: what the server writes and
// the client reads, defined once. It imports nothing but time and encoding/json.
//
// The shapes without a remark are OpenSandbox's (specs/sandbox-lifecycle.yml);
// what OpenSandbox does not have is marked "ours" and described in
// api/openapi.yaml. Absent means omitted: nothing is ever null, because
// generated Python clients crash on null.
package wire

import (
	"encoding/json"
	"time"
)

// The ports of a sandbox that the daemon knows by number.
const (
	AgentPort  = 44772 // execd's API, served by sandbox-agent
	EgressPort = 18080 // the egress API, served by the daemon
)

// The headers that carry a secret or a name.
const (
	HeaderAPIKey        = "OPEN-SANDBOX-API-KEY"
	HeaderAPIKeyOther   = "X-API-Key" // what Go's E2E tests send through the proxy
	HeaderAgentToken    = "X-EXECD-ACCESS-TOKEN"
	HeaderEgressToken   = "OPENSANDBOX-EGRESS-AUTH"
	HeaderEndpointToken = "X-Sandboxd-Endpoint-Token" // ours: for every other port
	HeaderRequestID     = "X-Request-ID"
)

// The states a client sees.
const (
	Pending    = "Pending"
	Running    = "Running"
	Pausing    = "Pausing"
	Paused     = "Paused"
	Resuming   = "Resuming"
	Stopping   = "Stopping"
	Terminated = "Terminated" // ended well
	Failed     = "Failed"     // ended otherwise; Status says why
)

// The keys of CreateRequest.Extensions that are ours. OpenSandbox's SDKs pass
// the map through, so that unmodified they can use all of it.
const (
	ExtName    = "sandboxd.name"    // unique; accepted wherever an id is
	ExtRuntime = "sandboxd.runtime" // "runsc" or "runc"
	ExtNetwork = "sandboxd.network" // "none", "rules" or "open"
	ExtAllow   = "sandboxd.allow"   // comma-separated CIDR[:port[/proto]]
	ExtTimeout = "sandboxd.timeout" // a Go duration ≥ 1s, instead of Timeout
	ExtOneShot = "sandboxd.oneshot" // "true": the disk need not survive a crash of the host
	ExtIdle    = "sandboxd.idle"    // "true": no entrypoint, the agent idles
	ExtRenew   = "access.renew.extend.seconds"
	ExtPool    = "poolRef"
)

// CreateRequest is the body of POST /sandboxes.
type CreateRequest struct {
	Image           *Image             `json:"image,omitempty"`
	SnapshotID      string             `json:"snapshotId,omitempty"`
	Platform        *Platform          `json:"platform,omitempty"`
	Timeout         *int64             `json:"timeout,omitempty"` // seconds ≥ 60; nil: never
	ResourceLimits  map[string]string  `json:"resourceLimits,omitempty"`
	Env             map[string]*string `json:"env,omitempty"` // null values are skipped
	Metadata        map[string]string  `json:"metadata,omitempty"`
	Entrypoint      []string           `json:"entrypoint,omitempty"`
	NetworkPolicy   json.RawMessage    `json:"networkPolicy,omitempty"` // a NetworkPolicy; raw, so that no field of it is overlooked
	CredentialProxy *CredentialProxy   `json:"credentialProxy,omitempty"`
	SecureAccess    bool               `json:"secureAccess,omitempty"`
	Volumes         []any              `json:"volumes,omitempty"`
	Extensions      map[string]string  `json:"extensions,omitempty"`
}

// Image names a root file system: name[:tag][@digest].
type Image struct {
	URI string `json:"uri"`
}

// Platform is the wanted system and architecture.
type Platform struct {
	OS   string `json:"os"`
	Arch string `json:"arch"`
}

// CredentialProxy asks for a credential vault.
type CredentialProxy struct {
	Enabled bool `json:"enabled"`
}

// NetworkPolicy decides by the first rule whose target matches, else by
// DefaultAction; empty is "deny".
type NetworkPolicy struct {
	DefaultAction string        `json:"defaultAction,omitempty"`
	Egress        []NetworkRule `json:"egress"`
}

// NetworkRule allows or denies a target. Ports and Protocol are ours.
type NetworkRule struct {
	Action   string `json:"action"`
	Target   string `json:"target"`
	Ports    []any  `json:"ports,omitempty"`    // 443 or "8000-8100"; absent: all
	Protocol string `json:"protocol,omitempty"` // tcp, udp or icmp; absent: all
}

// PolicyStatus answers GET /policy on port 18080.
type PolicyStatus struct {
	Status          string        `json:"status"`
	Mode            string        `json:"mode"` // allow_all, deny_all, enforcing
	EnforcementMode string        `json:"enforcementMode"`
	Policy          NetworkPolicy `json:"policy"`
}

// Sandbox is a sandbox as clients see it. The answer to create has no Image.
type Sandbox struct {
	ID         string            `json:"id"`
	Image      *Image            `json:"image,omitempty"`
	Platform   map[string]string `json:"platform,omitempty"`
	Status     Status            `json:"status"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	Extensions map[string]string `json:"extensions,omitempty"`
	Entrypoint []string          `json:"entrypoint"`
	ExpiresAt  *time.Time        `json:"expiresAt,omitempty"`
	CreatedAt  time.Time         `json:"createdAt"`
	Sandboxd   *Info             `json:"sandboxd,omitempty"` // ours
}

// Status is the state of a sandbox and why.
type Status struct {
	State            string     `json:"state"`
	Reason           string     `json:"reason,omitempty"`
	Message          string     `json:"message,omitempty"`
	LastTransitionAt *time.Time `json:"lastTransitionAt,omitempty"`
}

// Info is what sandboxd knows of a sandbox beyond OpenSandbox. (ours)
type Info struct {
	Name        string `json:"name,omitempty"`
	Runtime     string `json:"runtime"`
	ImageDigest string `json:"imageDigest,omitempty"`
	MemoryBytes int64  `json:"memoryBytes"`
	CPUMillis   int64  `json:"cpuMillis"`
	Pids        int64  `json:"pids"`
	DiskBytes   int64  `json:"diskBytes,omitempty"` // absent: the pool can not limit
	Network     string `json:"network"`
	OneShot     bool   `json:"oneShot,omitempty"`
	ExitCode    *int   `json:"exitCode,omitempty"`
}

// Inspection answers GET /sandboxes/{id}/inspect: everything but secrets. (ours)
type Inspection struct {
	Sandbox
	Env        []string          `json:"env,omitempty"`   // names only
	Rules      []string          `json:"rules,omitempty"` // in order
	Layers     []string          `json:"layers,omitempty"`
	Slot       int               `json:"slot"`
	State      string            `json:"internalState"`
	LastOutput string            `json:"lastOutput,omitempty"`
	Host       map[string]string `json:"host,omitempty"` // address, link, cgroup, …
}

// List is one page of sandboxes, newest first.
type List struct {
	Items      []Sandbox  `json:"items"`
	Pagination Pagination `json:"pagination"`
}

// Pagination says where in the whole a page lies; all five keys are always there.
type Pagination struct {
	Page        int  `json:"page"`
	PageSize    int  `json:"pageSize"`
	TotalItems  int  `json:"totalItems"`
	TotalPages  int  `json:"totalPages"`
	HasNextPage bool `json:"hasNextPage"`
}

// Renewal is request and answer of POST /sandboxes/{id}/renew-expiration.
type Renewal struct {
	ExpiresAt time.Time `json:"expiresAt"`
}

// Endpoint says where a port of a sandbox is reached and which headers that needs.
type Endpoint struct {
	Endpoint string            `json:"endpoint"` // host[:port]/path, without a scheme
	Headers  map[string]string `json:"headers,omitempty"`
}

// Error is the body of every answer that is not 2xx.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// Event is something that happened to a sandbox. (ours)
type Event struct {
	Time    time.Time `json:"time"`
	Type    string    `json:"type"` // the state entered: "running", "ended", …, or "renewed", …
	ID      string    `json:"id"`
	Name    string    `json:"name,omitempty"`
	Reason  string    `json:"reason,omitempty"`
	Message string    `json:"message,omitempty"`
}

// ImageInfo is an image on the host. (ours)
type ImageInfo struct {
	Name    string    `json:"name"`
	Tag     string    `json:"tag"`
	Digest  string    `json:"digest"`
	Bytes   int64     `json:"bytes"`
	Created time.Time `json:"created"`
}

// ImageList answers GET /images. (ours)
type ImageList struct {
	Items []ImageInfo `json:"items"`
}

// BuildRequest is the body of POST /images/build. (ours)
type BuildRequest struct {
	Name string `json:"name"` // of a recipe in rootfs/
}

// BuildLine is one line of the answer to a build; the last has Image or Error. (ours)
type BuildLine struct {
	Line  string     `json:"line,omitempty"`
	Image *ImageInfo `json:"image,omitempty"`
	Error *Error     `json:"error,omitempty"`
}

// Usage is what a sandbox uses now and has used. (ours)
type Usage struct {
	Time             time.Time `json:"time"`
	MemoryBytes      int64     `json:"memoryBytes"`
	MemoryPeakBytes  int64     `json:"memoryPeakBytes"`
	MemoryLimitBytes int64     `json:"memoryLimitBytes"`
	CPUMicros        int64     `json:"cpuMicros"` // since the sandbox started
	CPULimitMillis   int64     `json:"cpuLimitMillis"`
	Pids             int64     `json:"pids"`
	PidsLimit        int64     `json:"pidsLimit"`
	OOMKills         int64     `json:"oomKills"`
	DiskBytes        int64     `json:"diskBytes"`
	DiskLimitBytes   int64     `json:"diskLimitBytes"`
	RxBytes          int64     `json:"rxBytes"` // received by the sandbox
	TxBytes          int64     `json:"txBytes"`
}

// Version answers GET /version. (ours)
type Version struct {
	Version  string   `json:"version"`
	Commit   string   `json:"commit,omitempty"`
	Go       string   `json:"go"`
	Instance string   `json:"instance"`
	Runtimes []string `json:"runtimes"`
}
