package api

import (
	"maps"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// states says how OpenSandbox calls our states, and which reason its Docker
// runtime gives. Ended is two of its states, Deleting none.
var states = map[record.State][2]string{
	record.Creating: {wire.Pending, "CONTAINER_STARTING"},
	record.Running:  {wire.Running, "CONTAINER_RUNNING"},
	record.Pausing:  {wire.Pausing, "CONTAINER_PAUSING"},
	record.Paused:   {wire.Paused, "CONTAINER_PAUSED"},
	record.Resuming: {wire.Resuming, "CONTAINER_RESUMING"},
	record.Stopping: {wire.Stopping, "CONTAINER_STOPPING"},
	record.Deleting: {wire.Stopping, "CONTAINER_STOPPING"},
}

func stateOf(r *record.Record) string {
	if r.State != record.Ended {
		return states[r.State][0]
	}
	if r.OK() {
		return wire.Terminated
	}
	return wire.Failed
}

func statusOf(r *record.Record) wire.Status {
	st := wire.Status{State: stateOf(r), Reason: states[r.State][1], Message: r.Message}
	if r.State == record.Ended {
		st.Reason = string(r.Reason)
	}
	if !r.Changed.IsZero() {
		t := micros(r.Changed)
		st.LastTransitionAt = &t
	}
	return st
}

// toWire shows a record to a client: no token, no environment.
func toWire(r record.Record) wire.Sandbox {
	out := wire.Sandbox{
		ID:         r.ID,
		Image:      &wire.Image{URI: imageURI(r.Spec.Image)},
		Platform:   r.Spec.Platform,
		Status:     statusOf(&r),
		Metadata:   r.Spec.Labels,
		Extensions: r.Spec.Extensions,
		Entrypoint: r.Spec.Entrypoint,
		CreatedAt:  micros(r.Created),
		Sandboxd: &wire.Info{
			Name: r.Spec.Name, Runtime: r.Spec.Runtime, ImageDigest: r.Spec.Image.Digest,
			MemoryBytes: r.Spec.MemoryBytes, CPUMillis: r.Spec.CPUMillis, Pids: r.Spec.Pids, DiskBytes: r.Spec.DiskBytes,
			Network: string(r.Spec.Network.Mode), OneShot: r.Spec.OneShot, ExitCode: r.ExitCode,
		},
	}
	if out.Entrypoint == nil {
		out.Entrypoint = []string{}
	}
	if !r.Expires.IsZero() {
		t := micros(r.Expires)
		out.ExpiresAt = &t
	}
	return out
}

// micros is t as OpenSandbox writes times; not every parser takes nanoseconds.
func micros(t time.Time) time.Time { return t.UTC().Truncate(time.Microsecond) }

func imageURI(i record.Image) string {
	if i.Name == "" {
		return i.Digest
	}
	return i.Ref()
}

func toInspection(r record.Record, host map[string]string) wire.Inspection {
	out := wire.Inspection{
		Sandbox: toWire(r), Env: slices.Sorted(maps.Keys(r.Spec.Env)), Layers: r.Spec.Image.Layers,
		Slot: r.Slot, State: string(r.State), LastOutput: r.LastOutput, Host: host,
	}
	for _, rule := range r.Spec.Network.Rules {
		out.Rules = append(out.Rules, rule.String())
	}
	return out
}

func toImageInfo(i record.Image) wire.ImageInfo {
	return wire.ImageInfo{Name: i.Name, Tag: i.Tag, Digest: i.Digest, Bytes: i.Bytes, Created: i.Created.UTC().Truncate(time.Second)}
}
