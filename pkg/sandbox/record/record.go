// Package record holds what the store keeps and the Manager moves: the Record
// of a sandbox, its Spec, its states. It imports nothing of sandboxd but names.
package record

import (
	"crypto/rand"
	"encoding/base32"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// IDLen is the length of an ID: with "sb-" before it, it fills IFNAMSIZ-1.
const IDLen = 12

// NewID draws the ID of a sandbox: the instance and 55 random bits in
// lower-case base32. No client chooses one and none is used twice.
func NewID(i instance.Instance) string {
	var b [8]byte
	rand.Read(b[:]) //nolint:errcheck // never fails since Go 1.24
	s := strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b[:]))
	return i.String() + s[:IDLen-1]
}

// IsID reports whether s has the form of an ID. What it does not accept must
// never reach a path, a link or a cgroup.
func IsID(s string) bool {
	return len(s) == IDLen && strings.Trim(s, instance.Alphabet) == ""
}

// State is the durable state of a sandbox. States ending in -ing, Running
// apart, are intents: they are on disk before the first side effect of an
// operation and until its last, and each has exactly one recovery.
type State string

// The states.
const (
	Creating State = "creating" // intent; recovery ends it as failed
	Running  State = "running"
	Pausing  State = "pausing" // intent; recovery pauses
	Paused   State = "paused"
	Resuming State = "resuming" // intent; recovery resumes
	Stopping State = "stopping" // intent; recovery ends
	Ended    State = "ended"    // record and upper are kept, nothing else
	Deleting State = "deleting" // intent; recovery erases
)

// Reason says why a sandbox ended.
type Reason string

// The reasons. The set is closed.
const (
	Exited       Reason = "exited"        // its entrypoint exited by itself
	Killed       Reason = "killed"        // its entrypoint or init was killed by a signal
	Expired      Reason = "expired"       // its timeout passed
	OOM          Reason = "oom"           // it went over its memory limit
	HostReboot   Reason = "host_reboot"   // the host went down under it
	RuntimeCrash Reason = "runtime_crash" // runtime or agent died without a word
	CreateFailed Reason = "create_failed" // it never ran
)

// Record is what the store keeps for one sandbox.
type Record struct {
	ID      string    `json:"id"`
	State   State     `json:"state"`
	Slot    int       `json:"slot"` // index into address pool and user-id ranges; unique among live records
	Spec    Spec      `json:"spec"`
	Token   string    `json:"token"` // the agent's; never leaves the host but by Endpoint.headers
	BootID  string    `json:"bootId"`
	Created time.Time `json:"created"`
	Changed time.Time `json:"changed"` // last transition
	Expires time.Time `json:"expires"` // zero: never
	// What an ended sandbox is remembered by.
	Reason     Reason `json:"reason,omitempty"`
	Message    string `json:"message,omitempty"` // cause and step, for people
	ExitCode   *int   `json:"exitCode,omitempty"`
	LastOutput string `json:"lastOutput,omitempty"` // last lines of the entrypoint, ≤ 8 KiB
}

// OK reports whether an ended sandbox ended well: Terminated, not Failed.
func (r *Record) OK() bool {
	return r.Reason == Expired || r.Reason == Exited && r.ExitCode != nil && *r.ExitCode == 0
}

// Spec is what the caller asked for, resolved and checked.
type Spec struct {
	Name       string            `json:"name,omitempty"` // unique among live records, or empty
	Image      Image             `json:"image"`
	Runtime    string            `json:"runtime"` // "runsc" or "runc"
	Entrypoint []string          `json:"entrypoint"`
	Env        map[string]string `json:"env,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"` // OpenSandbox calls them metadata
	Timeout    time.Duration     `json:"timeout,omitempty"`
	OneShot    bool              `json:"oneShot,omitempty"` // `run --rm`: the upper need not survive a host crash

	MemoryBytes int64 `json:"memoryBytes"`
	CPUMillis   int64 `json:"cpuMillis"` // thousandths of a core
	Pids        int64 `json:"pids"`
	DiskBytes   int64 `json:"diskBytes"` // 0: the pool can not limit

	Network Network `json:"network"`

	// Echoed to OpenSandbox clients as they came in.
	ResourceLimits map[string]string `json:"resourceLimits,omitempty"`
	Platform       map[string]string `json:"platform,omitempty"`
	Extensions     map[string]string `json:"extensions,omitempty"`
	NetworkPolicy  []byte            `json:"networkPolicy,omitempty"` // raw JSON as sent
}

// NetworkMode is what a sandbox may reach in general.
type NetworkMode string

// The network modes. None of them opens the host, metadata services, other
// sandboxes or, unless a rule names them, private ranges.
const (
	NetworkNone  NetworkMode = "none"  // nothing
	NetworkRules NetworkMode = "rules" // what the rules allow; the default
	NetworkOpen  NetworkMode = "open"  // any public address, but what the rules deny
)

// Network is the network policy of a sandbox: first matching rule decides,
// else the mode.
type Network struct {
	Mode  NetworkMode `json:"mode"`
	Rules []Rule      `json:"rules,omitempty"`
}

// Rule allows or denies flows to addresses. Zero Ports: every port. Empty
// Proto: every protocol.
type Rule struct {
	Allow  bool         `json:"allow"`
	Prefix netip.Prefix `json:"prefix"`
	Ports  [2]uint16    `json:"ports"` // first and last
	Proto  string       `json:"proto,omitempty"`
}

func (r Rule) String() string {
	s := "deny "
	if r.Allow {
		s = "allow "
	}
	s += r.Prefix.String()
	switch {
	case r.Ports[0] != r.Ports[1]:
		s += fmt.Sprintf(":%d-%d", r.Ports[0], r.Ports[1])
	case r.Ports[0] != 0:
		s += fmt.Sprintf(":%d", r.Ports[0])
	}
	if r.Proto != "" {
		s += "/" + r.Proto
	}
	return s
}

// Image is a root file system on this host.
type Image struct {
	Name    string      `json:"name"`   // "python"
	Tag     string      `json:"tag"`    // "latest"
	Digest  string      `json:"digest"` // "sha256:…" of the manifest: names layers and config
	Layers  []string    `json:"layers"` // digests of the uncompressed layer tars, lowest first
	Bytes   int64       `json:"bytes"`
	Created time.Time   `json:"created"`
	Config  ImageConfig `json:"config"`
}

// Ref is name:tag.
func (i Image) Ref() string { return i.Name + ":" + i.Tag }

// ImageConfig is what of an image's config a sandbox takes over.
type ImageConfig struct {
	Env     []string `json:"env,omitempty"` // KEY=VALUE
	Workdir string   `json:"workdir,omitempty"`
	User    string   `json:"user,omitempty"`
}
