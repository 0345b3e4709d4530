package record

import (
	"reflect"
	"slices"
)

// MemoryImage is what the store keeps of a memory image: how to know that it is whole, and what
// restoring it needs.
type MemoryImage struct {
	Files []MemoryFile `json:"files"` // sorted by name
	Needs MemoryNeeds  `json:"needs"`
}

// Memory is the memory image of a snapshot.
type Memory struct {
	MemoryImage
	// Spec and Token are of the sandbox when the image was made: a sandbox that begins with it
	// has a bundle like that one's, and the agent in it answers to its token.
	Spec  Spec   `json:"spec"`
	Token string `json:"token"`
}

// MemoryFile is a file of a memory image.
type MemoryFile struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
	Sum   uint32 `json:"sum"` // CRC-32C
}

// MemoryNeeds is what a host must have to restore a memory image.
type MemoryNeeds struct {
	Build string `json:"build"` // SHA-256 of the runtime
	// Agent is the SHA-256 of the agent's program; "": of an older release, which did not say.
	Agent string `json:"agent,omitempty"`
	// CPU is the model that it was made on, for people, and Features are the flags of that CPU,
	// sorted, as /proc/cpuinfo writes them.
	CPU      string   `json:"cpu"`
	Features []string `json:"features"`
}

// Bytes is the size of the image.
func (m *MemoryImage) Bytes() (n int64) {
	for _, f := range m.Files {
		n += f.Bytes
	}
	return n
}

// Differs names what must be the same for a sandbox to run on with the memory of one that had
// the specification was, and is not.
func (s *Spec) Differs(was *Spec) (names []string) {
	same := func(name string, a, b any) {
		if !reflect.DeepEqual(a, b) {
			names = append(names, name)
		}
	}
	same("runtime", s.Runtime, was.Runtime)
	same("security", s.Level(), was.Level())
	same("image", s.Image.Digest, was.Image.Digest)
	if !slices.Equal(s.Entrypoint, was.Entrypoint) || s.Literal != was.Literal && len(was.Entrypoint) == 1 {
		names = append(names, "entrypoint")
	}
	same("read-only root", s.ReadOnly, was.ReadOnly)
	if !slices.Equal(s.Tmpfs, was.Tmpfs) {
		names = append(names, "tmpfs")
	}
	if !slices.EqualFunc(s.Volumes, was.Volumes, sameMount) {
		names = append(names, "volumes")
	}
	same("credential proxy", s.Inspect, was.Inspect)
	same("limit of processes", s.Pids, was.Pids)
	same("size of /dev/shm", s.ShmBytes, was.ShmBytes)
	return names
}

// sameMount reports whether two mounts are of the same files at the same place. A named volume
// counts by its name.
func sameMount(a, b VolumeMount) bool {
	return a.Path == b.Path && a.ReadOnly == b.ReadOnly && a.Sub == b.Sub && a.Source == b.Source && a.Claim == b.Claim
}

// Recalls reports whether r comes up with memory: with that of a snapshot, or with its own. Once it
// has ended, it starts as any other.
func (r *Record) Recalls() bool {
	return r.State == Waking || r.State == Creating && r.Spec.Memory
}
