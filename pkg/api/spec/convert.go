package spec

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/fork"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// states has OpenSandbox's name for each of our states, and the reason that its
// Docker runtime gives. It has two states for Ended and none for Deleting.
var states = map[record.State][2]string{
	record.Creating: {wire.Pending, "CONTAINER_STARTING"},
	record.Starting: {wire.Pending, "CONTAINER_STARTING"},
	record.Running:  {wire.Running, "CONTAINER_RUNNING"},
	record.Pausing:  {wire.Pausing, "CONTAINER_PAUSING"},
	record.Paused:   {wire.Paused, "CONTAINER_PAUSED"},
	record.Resuming: {wire.Resuming, "CONTAINER_RESUMING"},
	record.Stopping: {wire.Stopping, "CONTAINER_STOPPING"},

	record.Hibernating: {wire.Pausing, "CONTAINER_PAUSING"},
	record.Hibernated:  {wire.Paused, "CONTAINER_PAUSED"},
	record.Waking:      {wire.Resuming, "CONTAINER_RESUMING"},
	record.Deleting:    {wire.Stopping, "CONTAINER_STOPPING"},
}

// StateOf is the state of r as clients see it.
func StateOf(r *record.Record) string {
	switch {
	case r.State != record.Ended:
		return states[r.State][0]
	case r.Restarting(): // this end is not the last
		return wire.Pending
	case r.OK():
		return wire.Terminated
	}
	return wire.Failed
}

func statusOf(r *record.Record) wire.Status {
	st := wire.Status{State: StateOf(r), Reason: states[r.State][1], Message: r.Message}
	if r.State == record.Ended {
		st.Reason = string(r.Reason)
	}
	if !r.Changed.IsZero() {
		t := Micros(r.Changed)
		st.LastTransitionAt = &t
	}
	return st
}

// Sandbox shows a record to a client, without its token and its environment. The
// findings of its probe are not in the record: the caller adds them.
func Sandbox(r record.Record) wire.Sandbox {
	out := wire.Sandbox{
		ID:         r.ID,
		Platform:   r.Spec.Platform,
		Status:     statusOf(&r),
		Metadata:   r.Spec.Labels,
		Extensions: r.Spec.Extensions,
		Entrypoint: r.Spec.Entrypoint,
		CreatedAt:  Micros(r.Created),
		Sandboxd: &wire.Info{
			Name: r.Spec.Name, Runtime: r.Spec.Runtime, Security: string(r.Spec.Level()),
			ImageName: ImageName(r.Spec.Image), ImageDigest: r.Spec.Image.Digest,
			ImageEntrypoint: r.Spec.Image.Config.Entrypoint, ImageCmd: r.Spec.Image.Config.Cmd,
			StopSignal:  cmp.Or(r.Spec.StopSignal, r.Spec.Image.Config.StopSignal),
			MemoryBytes: r.Spec.MemoryBytes, CPUMillis: r.Spec.CPUMillis, Pids: r.Spec.Pids, DiskBytes: r.Spec.DiskBytes,
			CPUShares: r.Spec.CPUShares, ShmBytes: r.Spec.ShmBytes, LogBytes: r.Spec.LogBytes, ReadOnly: r.Spec.ReadOnly,
			IOReadBps: r.Spec.IOReadBps, IOWriteBps: r.Spec.IOWriteBps, IOReadIOPS: r.Spec.IOReadIOPS, IOWriteIOPS: r.Spec.IOWriteIOPS,
			Ports: showPublish(r.Spec.Publish), Network: string(r.Spec.Network.Mode), OneShot: r.Spec.OneShot, ExitCode: r.ExitCode,
			Policy: SandboxPolicy(r.Spec.Policy), CredentialProxy: r.Spec.Inspect,
		},
	}
	for _, t := range r.Spec.Tmpfs {
		out.Sandboxd.Tmpfs = append(out.Sandboxd.Tmpfs,
			wire.Tmpfs{Path: t.Path, Bytes: t.Bytes, Mode: strconv.FormatUint(uint64(t.Mode), 8), Exec: t.Exec})
	}
	if f := r.Spec.Fork; f.ID != "" {
		out.Sandboxd.Fork = &wire.ForkOf{ID: f.ID, Source: f.Source, Mode: forkMode(r.Spec.Memory), Index: f.Index}
	}
	if r.Spec.Snapshot == "" {
		out.Image = &wire.Image{URI: cmp.Or(r.Spec.ImageURI, ImageName(r.Spec.Image))}
	} else {
		out.SnapshotID = r.Spec.Snapshot
	}
	if out.Entrypoint == nil {
		out.Entrypoint = []string{}
	}
	out.ExpiresAt = Moment(r.Expires)
	out.Sandboxd.Restarts, out.Sandboxd.NextStart = r.Restarts, Moment(r.NextStart())
	if i := r.Spec.Idle; i.Given() {
		out.Sandboxd.Idle = &wire.Idle{After: i.For(), Action: string(i.Action), Asleep: r.Asleep()}
	}
	if r.Hibernation != nil {
		out.Sandboxd.HibernatedBytes = r.Hibernation.Bytes()
	}
	if r.Restarts > 0 {
		out.Sandboxd.LastRestart = Moment(r.Started)
	}
	return out
}

// Notes says what a client that reads a sandbox may not expect of it.
func (o *Offer) Notes(r *record.Record) (notes []string) {
	if r.Spec.ImageNote != "" {
		notes = append(notes, r.Spec.ImageNote)
	}
	if n := r.Spec.Image.Config.Foreign(); n != "" {
		notes = append(notes, fmt.Sprintf("image %s: %s", ImageName(r.Spec.Image), n))
	}
	if r.Pool.Miss != "" {
		notes = append(notes, fmt.Sprintf("it took no member of pool %s: %s", r.Pool.Name, r.Pool.Miss))
	}
	if u := r.Spec.Policy; u.Left {
		notes = append(notes, fmt.Sprintf("its network policy was changed since it was created with policy %s, which it no longer follows",
			u.Name))
	}
	if n := r.Spec.MemoryBytes; o.HostMemoryBytes > 0 && n > o.HostMemoryBytes {
		notes = append(notes, fmt.Sprintf("the memory limit of %s is more than the %s that this host has: the host's memory "+
			"runs out first", record.Size(n), record.Mebibytes(o.HostMemoryBytes)))
	}
	return notes
}

// Moment is Micros for a field that is left out; nil for the zero time.
func Moment(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = Micros(t)
	return &t
}

// Micros is t as OpenSandbox writes times: in UTC, without nanoseconds, which not
// every parser takes.
func Micros(t time.Time) time.Time { return t.UTC().Truncate(time.Microsecond) }

// ImageName is name:tag of an image, or its digest if it has no name.
func ImageName(i record.Image) string {
	if i.Name == "" {
		return i.Digest
	}
	return i.Ref()
}

// snapshotStates has OpenSandbox's name for each of our states of a snapshot, with
// its reason and its message.
var snapshotStates = map[record.SnapshotState][3]string{
	record.SnapshotCreating: {wire.SnapshotCreating, "snapshot_accepted", "Snapshot creation accepted."},
	record.SnapshotReady:    {wire.SnapshotReady, "snapshot_runtime_ready", "Snapshot is ready."},
	record.SnapshotFailed:   {wire.SnapshotFailed, "snapshot_capture_failed", ""},
	record.SnapshotDeleting: {wire.SnapshotDeleting, "snapshot_deleting", "Snapshot deletion accepted."},
}

// SnapshotStateOf is the state of a snapshot as clients see it.
func SnapshotStateOf(s record.Snapshot) string { return snapshotStates[s.State][0] }

// Snapshot shows a snapshot to a client.
func Snapshot(s record.Snapshot) wire.Snapshot {
	st := snapshotStates[s.State]
	changed := Micros(s.Changed)
	out := wire.Snapshot{
		ID: s.ID, SandboxID: s.Source, Name: s.Name, CreatedAt: Micros(s.Created),
		Status: wire.Status{State: st[0], Reason: st[1], Message: st[2], LastTransitionAt: &changed},
	}
	if s.State == record.SnapshotFailed {
		out.Status.Message = s.Message
	}
	return out
}

// InspectSnapshot shows everything about a snapshot.
func InspectSnapshot(s record.Snapshot) wire.SnapshotInspection {
	out := wire.SnapshotInspection{
		Snapshot: Snapshot(s), Image: ImageName(s.Image), Security: string(s.Level()),
		ImageDigest: s.Image.Digest, Layers: s.Image.Layers, Bytes: s.Bytes,
	}
	if m := s.Memory; m != nil {
		out.Memory = &wire.SnapshotMemory{Bytes: m.Bytes(), Build: m.Needs.Build, CPU: m.Needs.CPU}
	}
	return out
}

func forkMode(memory bool) string {
	if memory {
		return wire.ForkMemory
	}
	return wire.ForkFiles
}

// Fork shows a fork to a client.
func Fork(s fork.State) wire.Fork {
	out := wire.Fork{
		ID: s.ID, SandboxID: s.Source, Mode: forkMode(s.Memory), Count: s.Count, Sandboxes: []wire.ForkChild{},
		CreatedAt: Micros(s.Created), Status: wire.Status{State: string(s.Phase), Message: s.Message},
	}
	for _, c := range s.Copies {
		state := "Deleted"
		if c.Now != nil {
			state = StateOf(c.Now)
		}
		out.Sandboxes = append(out.Sandboxes, wire.ForkChild{ID: c.ID, Name: c.Name, State: state})
	}
	return out
}

// Inspect shows everything about a sandbox except the values of its environment. Its
// names on the host are not in the record: the caller adds them.
func Inspect(r record.Record) wire.Inspection {
	out := wire.Inspection{
		Sandbox: Sandbox(r), Env: slices.Sorted(maps.Keys(r.Spec.Env)), Layers: r.Spec.Image.Layers,
		Slot: r.Slot, State: string(r.State), LastOutput: r.LastOutput, Pool: PoolUse(r.Pool),
	}
	for _, v := range r.Spec.Volumes {
		out.Volumes = append(out.Volumes, toWireMount(v))
	}
	for _, rule := range r.Spec.Network.Rules {
		out.Rules = append(out.Rules, rule.String())
	}
	return out
}

// Image shows an image and its other names.
func Image(i record.Image, aliases []string) wire.ImageInfo {
	return wire.ImageInfo{
		Name: i.Name, Tag: i.Tag, Digest: i.Digest, Bytes: i.Bytes, Created: i.Created.UTC().Truncate(time.Second), Aliases: aliases,
		Notes: i.Notes(),
	}
}

// InspectImage shows everything about an image.
func InspectImage(i record.Image, aliases []string) wire.ImageInspection {
	return wire.ImageInspection{
		ImageInfo: Image(i, aliases), Layers: i.Layers, Sources: i.Sources,
		Env: i.Config.Env, Workdir: i.Config.Workdir, User: i.Config.User, Labels: i.Config.Labels,
		Entrypoint: i.Config.Entrypoint, Cmd: i.Config.Cmd, StopSignal: i.Config.StopSignal, Platform: i.Config.Platform,
		Unused: i.Unused,
	}
}

// Volume shows a volume. How much is in it is not in the record: the caller adds that.
func Volume(v record.VolumeInfo) wire.Volume {
	out := wire.Volume{Name: v.Name, ID: v.ID, SizeBytes: v.Bytes, UsedBy: v.UsedBy, SandboxID: v.Owner, CreatedAt: Micros(v.Created)}
	if out.UsedBy == nil {
		out.UsedBy = []string{}
	}
	return out
}

// Vault shows a credential vault; native: also what OpenSandbox's does not have.
func Vault(st vault.State, native bool) wire.CredentialVault {
	out := wire.CredentialVault{Revision: st.Revision, Credentials: []wire.Credential{}, Bindings: []wire.CredentialBinding{}}
	for _, c := range st.Credentials {
		shown := wire.Credential{Name: c.Name, SourceType: string(c.SourceType), Revision: c.Revision}
		if native {
			shown.Placeholder, shown.Env = c.Placeholder, c.Env
		}
		out.Credentials = append(out.Credentials, shown)
	}
	for _, b := range st.Bindings {
		out.Bindings = append(out.Bindings, wire.CredentialBinding{
			Name: b.Name, Revision: b.Revision, Auth: wire.CredentialAuthKind{Type: string(b.Auth.Type), Name: b.Auth.Name},
			Match: wire.CredentialMatch{Schemes: b.Match.Schemes, Hosts: b.Match.Hosts, Methods: b.Match.Methods, Paths: b.Match.Paths},
		})
	}
	return out
}
