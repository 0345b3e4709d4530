// Package record holds what the store keeps and the Manager moves: the Record
// of a sandbox, its Spec, its states. It imports nothing of sandboxd but names.
package record

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/base32"
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// IDLen is the length of an ID: with "sb-" before it, it fills IFNAMSIZ-1.
const IDLen = 12

// AgentTasks is how many tasks the agent may use beside Spec.Pids. It makes its 30
// threads before the guest runs (pkg/agent/proc). An agent that cannot make a thread
// dies: without this reserve a guest at its limit would kill it. One more task is for
// the shell ahead, so that it takes no place of the guest's, and one for a child that is
// being started. The kernel counts them together with the guest's, so a guest can use
// these two while the agent does not.
const AgentTasks = 32

// NewID draws the ID of a sandbox: the instance and 55 random bits in lower-case
// base32. Clients never choose an ID, and none is used twice.
func NewID(i instance.Instance) string {
	var b [8]byte
	rand.Read(b[:]) //nolint:errcheck // never fails since Go 1.24
	s := strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b[:]))
	return i.String() + s[:IDLen-1]
}

// IsID reports whether s has the form of an ID. Any other string must never reach a
// path, a link or a cgroup.
func IsID(s string) bool {
	return len(s) == IDLen && strings.Trim(s, instance.Alphabet) == ""
}

// State is the durable state of a sandbox. States ending in -ing, except Running, are
// intents: they are on disk before the first side effect of an operation and until its
// last, and each has exactly one recovery.
type State string

// The states.
const (
	Creating State = "creating" // intent; recovery ends it as failed
	Running  State = "running"
	Pausing  State = "pausing" // intent; recovery pauses
	Paused   State = "paused"
	Resuming State = "resuming" // intent; recovery resumes
	Stopping State = "stopping" // intent; recovery ends
	Ended    State = "ended"    // record and disk are kept, nothing else
	Starting State = "starting" // intent, from ended; recovery ends it again
	// Hibernating is the intent to put the memory of a sandbox on disk. Recovery begins anew, and
	// from Record.Hibernation on only has to end the processes.
	Hibernating State = "hibernating"
	Hibernated  State = "hibernated" // record, disk and memory image are kept, and published ports
	// Waking is the intent to bring the memory back. Recovery finishes it if the guest runs, and
	// undoes it if the guest never ran.
	Waking   State = "waking"
	Deleting State = "deleting" // intent; recovery erases
	// Prepared is the state of a prepared slot: an ID, a Slot and what depends on these
	// and Spec.Runtime alone, or with Record.Pool all that a sandbox of the pool's template
	// has. A create takes it and makes it Creating. No client sees it.
	Prepared State = "prepared" // intent; recovery releases it
)

// Beginning reports whether a sandbox in state s is being brought up.
func (s State) Beginning() bool { return s == Creating || s == Starting }

// Reason says why a sandbox ended, or is paused.
type Reason string

// The reasons. The set is closed.
const (
	Exited       Reason = "exited"        // its entrypoint exited by itself
	Killed       Reason = "killed"        // its entrypoint or init was killed by a signal
	Timeout      Reason = "timeout"       // it did not start in time
	Expired      Reason = "expired"       // its timeout passed
	OOM          Reason = "oom"           // it went over its memory limit, or the host had no memory left
	DiskFull     Reason = "disk_full"     // its entrypoint failed while its disk was full
	PidsLimit    Reason = "pids_limit"    // its entrypoint failed after it was refused processes
	KernelMemory Reason = "kernel_memory" // its sockets or locks held memory of the kernel that no limit counts
	HostReboot   Reason = "host_reboot"   // the host went down under it
	Restored     Reason = "restored"      // it ran when the backup was made from which the state was restored
	RuntimeCrash Reason = "runtime_crash" // runtime or agent died without a message
	CreateFailed Reason = "create_failed" // it never ran
	Stopped      Reason = "stopped"       // a client asked for it; it is kept until it expires or is deleted
	StartFailed  Reason = "start_failed"  // it ran before, and could not be started again
	DiskLost     Reason = "disk_lost"     // the storage pool with its disk is lost, and an operator has accepted that
	Unhealthy    Reason = "unhealthy"     // it failed its probe, and its policy starts it anew
	// ReasonIdle is that of a sandbox which its idle policy has paused (Asleep) or is deleting. One
	// that the policy stops is Stopped.
	ReasonIdle Reason = "idle"
)

// Record is what the store keeps for one sandbox.
type Record struct {
	ID    string `json:"id"`
	State State  `json:"state"`
	Slot  int    `json:"slot"` // index into address pool and user-id ranges; unique among live records
	Spec  Spec   `json:"spec"`
	// Prepared says that the sandbox took a prepared slot: when its creation began, the
	// host held a part of what it needs already.
	Prepared bool `json:"prepared,omitempty"`
	// Pool is the pool of a member, which is a prepared slot that runs, or of a sandbox.
	Pool  PoolUse `json:"pool,omitzero"`
	Token string  `json:"token"` // the agent's; leaves the host only in Endpoint.headers
	// MemberToken is the token that the agent of a member has until the sandbox that took it
	// runs.
	MemberToken string `json:"memberToken,omitempty"`
	BootID      string `json:"bootId"`
	// Userspace is where it came up, within BootID: a soft reboot begins another one. Empty: not known.
	Userspace string `json:"userspace,omitempty"`

	Created time.Time `json:"created"`
	Changed time.Time `json:"changed"` // last transition
	Expires time.Time `json:"expires"` // zero: never
	// Updated is when its limits last changed while it ran; zero: never.
	Updated time.Time `json:"updated,omitzero"`
	// Started is when its present, or last, life came up; zero: it did not.
	Started time.Time `json:"started,omitzero"`
	// Restarts counts the restarts by its policy since a client created or started it,
	// QuickRestarts those of them in a row that did not last.
	Restarts      int `json:"restarts,omitempty"`
	QuickRestarts int `json:"quickRestarts,omitempty"`
	// How a sandbox ended, or why it is paused.
	Reason     Reason `json:"reason,omitempty"`
	Message    string `json:"message,omitempty"` // cause and step, for people
	ExitCode   *int   `json:"exitCode,omitempty"`
	LastOutput string `json:"lastOutput,omitempty"` // last lines of the entrypoint, ≤ 8 KiB
	// Hibernation is the memory image of a sandbox that is Hibernated or Waking, or Hibernating and
	// only has to be ended.
	Hibernation *MemoryImage `json:"hibernation,omitempty"`
}

// LastLines stands before the last output of a sandbox that did not come up, at the end
// of its Message. No log repeats what follows.
const LastLines = "; its last lines:\n"

// Hostname is what the sandbox is called inside.
func (r *Record) Hostname() string { return cmp.Or(r.Spec.Hostname, r.Spec.Name, r.ID) }

// OK reports whether an ended sandbox ended well: Terminated, not Failed.
func (r *Record) OK() bool {
	return r.Reason == Expired || r.Reason == Stopped || r.Reason == Exited && r.ExitCode != nil && *r.ExitCode == 0
}

// Failed reports whether a sandbox has ended, or is about to, other than well and for
// good.
func (r *Record) Failed() bool {
	end := *r
	if end.State == Stopping {
		end.State = Ended
	}
	return end.State == Ended && !end.OK() && !end.Restarting()
}

// NeverRan reports whether the creation of an ended sandbox failed, so that it
// may have no disk, or half of one.
func (r *Record) NeverRan() bool { return r.Reason == CreateFailed || r.Reason == Timeout }

// Diskless reports whether an ended sandbox has no files that could be used.
func (r *Record) Diskless() bool { return r.NeverRan() || r.Reason == DiskLost }

// LoseDisk notes that the disk of a sandbox, which has no processes that could use it, is lost. The
// daemon finishes the end of one that had not ended.
func (r *Record) LoseDisk(at time.Time) {
	why := "its disk was lost with the storage pool while it was " + string(r.State)
	if r.State == Ended {
		why = "its disk was lost with the storage pool, after it had ended (" + string(r.Reason) + ")"
	} else {
		r.State = Stopping
	}
	r.Reason, r.Message, r.Changed, r.Hibernation = DiskLost, why+"; what it wrote is gone: delete it, and create another", at, nil
}

// Spec is what the caller asked for, resolved and checked.
type Spec struct {
	Name string `json:"name,omitempty"` // unique among live records, or empty
	// Hostname is that of the UTS namespace; empty: the name, or the ID.
	Hostname string `json:"hostname,omitempty"`
	Image    Image  `json:"image"` // without layers while it is pulled
	// ImageURI is the image as the client wrote it, perhaps an alias. It is empty if the
	// client gave none, and in old records.
	ImageURI string `json:"imageUri,omitempty"`
	// ImageNote says, for people, that Image is another version than ImageURI names.
	ImageNote string `json:"imageNote,omitempty"`
	Snapshot  string `json:"snapshot,omitempty"` // ID of the snapshot its disk began as, of the same image
	// Memory says that it begins with the memory of Snapshot, too: its programs run on.
	Memory     bool     `json:"memory,omitempty"`
	Runtime    string   `json:"runtime"`            // "runsc" or "runc"
	Security   Security `json:"security,omitempty"` // empty in old records; see Level
	Entrypoint []string `json:"entrypoint"`
	Literal    bool     `json:"literal,omitempty"` // an Entrypoint of one element is never split into words
	// ImageCommand makes the Entrypoint arguments of the image's own: see TakeImage.
	ImageCommand bool              `json:"imageCommand,omitempty"`
	Env          map[string]string `json:"env,omitempty"`
	Labels       map[string]string `json:"labels,omitempty"` // OpenSandbox calls them metadata
	Timeout      time.Duration     `json:"timeout,omitempty"`
	OneShot      bool              `json:"oneShot,omitempty"` // `run --rm`: a host crash may lose the upper

	Limits
	ReadOnly bool    `json:"readOnly,omitempty"` // mount the root file system read-only
	Tmpfs    []Tmpfs `json:"tmpfs,omitempty"`

	Volumes []VolumeMount `json:"volumes,omitempty"`

	Prestart []string `json:"prestart,omitempty"` // languages of code contexts that start with it

	Network Network `json:"network"`
	// Inspect says that the policy may decrypt hosts: the guest trusts an authority of its own.
	// It holds for its whole life. Without it the sandbox gets neither rules about requests
	// (Admits) nor a vault.
	Inspect bool      `json:"inspect,omitempty"`
	Publish []Publish `json:"publish,omitempty"`
	// SecureAccess makes every listener require the tokens of its ports.
	SecureAccess bool `json:"secureAccess,omitempty"`
	// StopSignal asks the entrypoint to end, in place of the image's: see StopWith.
	StopSignal string  `json:"stopSignal,omitempty"`
	Restart    Restart `json:"restart,omitzero"`
	Ready      Probe   `json:"ready,omitzero"`
	Idle       Idle    `json:"idle,omitzero"`

	Request Request `json:"request,omitzero"`

	// Returned to OpenSandbox clients as they sent them.
	ResourceLimits map[string]string `json:"resourceLimits,omitempty"`
	Platform       map[string]string `json:"platform,omitempty"`
	Extensions     map[string]string `json:"extensions,omitempty"`
	NetworkPolicy  []byte            `json:"networkPolicy,omitempty"` // raw JSON as sent

	Fork Fork `json:"fork,omitzero"`

	// Policy is where Network and NetworkPolicy are from, if a client named a policy.
	Policy PolicyUse `json:"policy,omitzero"`

	// Pool is the pool that the client named (poolRef).
	Pool string `json:"pool,omitempty"`
}

// Level is its level of security.
func (s *Spec) Level() Security { return cmp.Or(s.Security, SecurityDefault) }

// Away reports whether the image has yet to be pulled.
func (s *Spec) Away() bool { return s.ImageURI != "" && s.Snapshot == "" && len(s.Image.Layers) == 0 }

// TakeImage sets the image, once its config is known, without its labels. If the client
// has asked for the image's own command, that becomes the entrypoint, which is never split
// into words; TakeImage is false if there is none.
func (s *Spec) TakeImage(i Image) bool {
	i.Config.Labels, i.Unused = nil, nil // they are the image's; no record of a sandbox repeats them
	s.Image = i
	if !s.ImageCommand {
		return true
	}
	s.Entrypoint, s.Literal = i.Config.Command(s.Entrypoint), true
	return len(s.Entrypoint) > 0
}

// NoCommand is why TakeImage is false.
const NoCommand = "has neither ENTRYPOINT nor CMD (an image that an older sandboxd imported has to be imported again): give a command"

// Publish is a TCP port of the sandbox that is served at an address of the host.
type Publish struct {
	Host netip.AddrPort `json:"host"`
	Port uint16         `json:"port"`
}

// Overlap reports whether two addresses of the host cannot be listened on at once.
func Overlap(a, b netip.AddrPort) bool {
	x, y := a.Addr(), b.Addr()
	return a.Port() == b.Port() && (x == y || x.Is4() == y.Is4() && (x.IsUnspecified() || y.IsUnspecified()))
}

// Terms are the parts of a Spec that may change while its sandbox lives.
type Terms struct {
	Limits
	Network       Network
	NetworkPolicy []byte // see Spec
	Policy        PolicyUse
}

// Terms returns those of s. They share its slices: replace a slice, never write into
// it.
func (s *Spec) Terms() Terms { return Terms{s.Limits, s.Network, s.NetworkPolicy, s.Policy} }

// SameNetwork reports whether t and o allow the same and show the same.
func (t Terms) SameNetwork(o Terms) bool {
	return t.Network.Mode == o.Network.Mode && reflect.DeepEqual(t.Network.Rules, o.Network.Rules) &&
		bytes.Equal(t.NetworkPolicy, o.NetworkPolicy)
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

// AboutRequests reports whether a rule is about requests: such rules take effect only where
// Spec.Inspect is set.
func (n Network) AboutRequests() bool {
	return slices.ContainsFunc(n.Rules, func(r Rule) bool { return r.Requests != nil })
}

// Clone copies n and all that it refers to.
func (n Network) Clone() Network {
	n.Rules = slices.Clone(n.Rules)
	for i, r := range n.Rules {
		if q := r.Requests; q != nil {
			n.Rules[i].Requests = &Requests{slices.Clone(q.Methods), slices.Clone(q.Paths)}
		}
	}
	return n
}

// Rule allows or denies flows to a name or to addresses. Zero Ports: every port. Empty
// Proto: every protocol.
type Rule struct {
	Allow bool `json:"allow"`
	// Name is a domain name in lower case, or "*." and the name above those it means. Then
	// Prefix is the zero Prefix.
	Name   string       `json:"name,omitempty"`
	Prefix netip.Prefix `json:"prefix"`
	Ports  [2]uint16    `json:"ports"` // first and last
	Proto  string       `json:"proto,omitempty"`
	// Requests, if not nil, narrows a rule by name to some requests of HTTP.
	Requests *Requests `json:"requests,omitempty"`
}

// Requests are requests of HTTP: those with one of the methods and a path that one of the
// patterns matches (pkg/egress/paths). No methods: every method. No paths: every path. A rule
// that denies some is no wall if the server knows other ways to say the same: /ADMIN, or a
// header such as X-HTTP-Method-Override.
type Requests struct {
	Methods []string `json:"methods,omitempty"`
	Paths   []string `json:"paths,omitempty"`
}

func (q *Requests) String() string {
	s := "requests"
	if len(q.Methods) > 0 {
		s = strings.Join(q.Methods, ",")
	}
	if len(q.Paths) > 0 {
		s += " " + strings.Join(q.Paths, ",")
	}
	return s
}

func (r Rule) String() string {
	s := "deny "
	if r.Allow {
		s = "allow "
	}
	s += r.Target()
	switch {
	case r.Ports[0] != r.Ports[1]:
		s += fmt.Sprintf(":%d-%d", r.Ports[0], r.Ports[1])
	case r.Ports[0] != 0:
		s += fmt.Sprintf(":%d", r.Ports[0])
	}
	if r.Proto != "" {
		s += "/" + r.Proto
	}
	if r.Requests != nil {
		s += " " + r.Requests.String()
	}
	return s
}

// Target is what the rule is about: a name, or a CIDR.
func (r Rule) Target() string {
	if r.Name != "" {
		return r.Name
	}
	return r.Prefix.String()
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
	// Sources are the digests that the registry it was pulled from has for it: of its
	// index, if there is one, and of its manifest.
	Sources []string `json:"sources,omitempty"`
	// Unused are the fields of its config that sandboxd does not use, by docker's names, for
	// people and exports. No record of a sandbox has them.
	Unused map[string]json.RawMessage `json:"unused,omitempty"`
}

// Ref is name:tag.
func (i Image) Ref() string { return i.Name + ":" + i.Tag }

// ImageConfig is the part of an image's config that a sandbox takes over.
type ImageConfig struct {
	Env     []string          `json:"env,omitempty"` // KEY=VALUE
	Workdir string            `json:"workdir,omitempty"`
	User    string            `json:"user,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"` // of the image; those of a sandbox are Spec.Labels
	// What the image runs by itself, for a Spec with ImageCommand only.
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"` // its default arguments, or the program
	// StopSignal is as the image says it, perhaps no signal; empty: SIGTERM. See Spec.StopWith.
	StopSignal string `json:"stopSignal,omitempty"`
	// Platform, as linux/arm64, is that of an image for another machine than this host; empty:
	// it is for this one.
	Platform string `json:"platform,omitempty"`
}

// Command is what an image runs with these arguments, as docker does: its ENTRYPOINT,
// and the arguments or else its CMD. It is empty if the image has neither, and there are
// no arguments.
func (c ImageConfig) Command(args []string) []string {
	if len(args) == 0 {
		args = c.Cmd
	}
	return slices.Concat(c.Entrypoint, args)
}
