package record

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Pool says which sandboxes to keep ready before somebody asks for them. Its members are
// prepared slots that run already: see Record.Pool.
type Pool struct {
	Name     string    `json:"name"`
	Fixed    bool      `json:"fixed,omitempty"` // it is in the configuration, and only edited there
	Created  time.Time `json:"created"`
	Template []byte    `json:"template"` // raw JSON: the part of a creation that members are made from
	// Warm is a line for the shell, run once in each member. A member in which it fails is
	// not kept. Empty: none.
	Warm string `json:"warm,omitempty"`
	// Ready is a line for the shell, tried in each member until it succeeds. A member in which
	// it does not is not kept. Empty: none.
	Ready    string        `json:"ready,omitempty"`
	MaxAge   time.Duration `json:"maxAge,omitempty"` // of a member that nobody took; 0: none
	Capacity Capacity      `json:"capacity"`
}

// Capacity bounds a pool. Ready members are those that nobody took yet; sandboxes are
// those that took a member, or were created with the name of the pool.
type Capacity struct {
	BufferMin int `json:"bufferMin"` // with fewer ready members, members are made
	BufferMax int `json:"bufferMax"` // until there are so many
	PoolMin   int `json:"poolMin"`   // members and sandboxes together
	PoolMax   int `json:"poolMax"`
}

// The pools of a host.
const (
	MaxPools        = 64
	MaxPoolTemplate = 64 << 10 // bytes
	maxPoolLine     = 16 << 10 // bytes
)

// CodePoolFull marks the refusal of a sandbox of a pool that has neither a ready member nor
// room for another. It is answered with the status 429.
const CodePoolFull = "POOL::EXHAUSTED"

// NoPool is the error of every look-up of a pool that is not there.
func NoPool(name string) error {
	return errs.Wire(errs.New(errs.NotFound, "no pool %.80q; `sandboxctl pool ls` lists the pools of this host", name), "POOL::NOT_FOUND")
}

// Check says why c is no capacity, or nothing.
func (c Capacity) Check() string {
	switch {
	case c.BufferMin < 0 || c.PoolMin < 0:
		return "bufferMin and poolMin must not be negative"
	case c.PoolMax < 1:
		return "poolMax must be at least 1"
	case c.BufferMax < 1:
		return "bufferMax must be at least 1"
	case c.BufferMin > c.BufferMax:
		return fmt.Sprintf("bufferMin %d is more than bufferMax %d", c.BufferMin, c.BufferMax)
	case c.PoolMin > c.PoolMax:
		return fmt.Sprintf("poolMin %d is more than poolMax %d", c.PoolMin, c.PoolMax)
	case c.BufferMax > c.PoolMax:
		return fmt.Sprintf("bufferMax %d is more than poolMax %d", c.BufferMax, c.PoolMax)
	}
	return ""
}

// CheckPoolLine says why a line cannot be run in the members of a pool, or nothing. None is
// empty.
func CheckPoolLine(line string) string {
	if len(line) > maxPoolLine || strings.ContainsRune(line, 0) || line != "" && strings.TrimSpace(line) == "" {
		return fmt.Sprintf("want a line for the shell of at most %d KiB, without NUL", maxPoolLine>>10)
	}
	return ""
}

// Revision stands for all that the members of a pool are made from: s is what its template
// is today.
func (p *Pool) Revision(s *Spec) string {
	h := sha256.New()
	fmt.Fprintf(h, "%q %q %q %q %q", p.Template, p.Warm, p.Ready, s.Image.Digest, s.Image.Layers)
	return hex.EncodeToString(h.Sum(nil)[:6])
}

// PoolUse is the pool of a member, or of a sandbox. The zero PoolUse is none.
type PoolUse struct {
	Name     string `json:"name,omitempty"`
	Revision string `json:"revision,omitempty"` // of the member; empty: the sandbox took none
	// Miss is why a sandbox that names a pool took no member of it.
	Miss string `json:"miss,omitempty"`
}

// Claims reports whether a sandbox that is being created takes a member of a pool.
func (r *Record) Claims() bool { return r.State == Creating && r.MemberToken != "" }

// Unfit says why a sandbox with the specification want cannot take a member with the
// specification s, or nothing. It names all that a member has from its start and that
// cannot be bound later. What it does not name is bound when a member is taken: name,
// environment, labels, entrypoint, timeout, network policy, published ports, restart
// policy, probe, and limits other than these.
func (s *Spec) Unfit(want *Spec) string {
	fixed := s.Runtime == "runsc" // gVisor takes what it shows to its guest when it starts
	for _, c := range []struct {
		bad bool
		why string
	}{
		{want.Snapshot != "", "it begins as a snapshot"},
		{want.Away() || want.Image.Digest != s.Image.Digest || !slices.Equal(want.Image.Layers, s.Image.Layers), "another image"},
		{want.Runtime != s.Runtime, "another runtime"},
		{want.Level() != s.Level(), "another level of security"},
		{want.ReadOnly != s.ReadOnly, "a read-only root file system, or none"},
		{!slices.Equal(want.Tmpfs, s.Tmpfs), "other file systems in memory"},
		{len(want.Volumes) > 0, "volumes are mounted before the start"},
		{want.Inspect, "inspected requests need an authority that is mounted before the start"},
		{want.ShmBytes != s.ShmBytes, "another size of /dev/shm"},
		{want.LogBytes != s.LogBytes, "another limit of kept output"},
		{want.DiskBytes == 0 && s.DiskBytes != 0, "no limit of the disk"},
		{fixed && want.MemoryBytes != s.MemoryBytes, "gVisor shows its guest the memory limit that it started with"},
		{fixed && want.CPUMillis != s.CPUMillis, "gVisor shows its guest the CPUs that it started with"},
		{fixed && want.Pids != s.Pids, "gVisor keeps the limit of processes that it started with"},
		{fixed && (want.Name != "" || want.Hostname != ""), "gVisor keeps the hostname that it started with, which is the id"},
		{!contains(s.Prestart, want.Prestart), "other code contexts"},
	} {
		if c.bad {
			return c.why
		}
	}
	return ""
}

func contains(all, some []string) bool {
	return !slices.ContainsFunc(some, func(s string) bool { return !slices.Contains(all, s) })
}

// PoolInfo is a pool and its present state.
type PoolInfo struct {
	Pool
	Revision  string // what members are made from; empty: not known yet, or its image is not on this host
	Available int    // ready members
	Allocated int    // sandboxes of the pool that have not ended
	Trouble   string // why no member can be made; empty: none
	Work      map[string]PoolWork
}

// PoolWork counts what a pool did since the daemon started.
type PoolWork struct {
	N uint64
	// Took is how long members took to be made, or creations until their sandboxes ran: of
	// those that came up.
	Took time.Duration
}

// The results that are counted for a pool.
const (
	PoolHit     = "hit"     // a creation took a member
	PoolMiss    = "miss"    // a creation that named the pool came up cold
	PoolRefused = "refused" // a creation that named the pool was refused: the pool is full
	PoolLost    = "lost"    // a member that was taken could not be used, and the sandbox came up cold
	PoolMade    = "made"    // a member was made
	PoolDropped = "dropped" // a member was released that nobody took
)
