package api

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// states says how OpenSandbox calls our states, and which reason its Docker
// runtime gives. Ended is two of its states, Deleting none.
var states = map[record.State][2]string{
	record.Creating: {wire.Pending, "CONTAINER_STARTING"},
	record.Starting: {wire.Pending, "CONTAINER_STARTING"},
	record.Running:  {wire.Running, "CONTAINER_RUNNING"},
	record.Pausing:  {wire.Pausing, "CONTAINER_PAUSING"},
	record.Paused:   {wire.Paused, "CONTAINER_PAUSED"},
	record.Resuming: {wire.Resuming, "CONTAINER_RESUMING"},
	record.Stopping: {wire.Stopping, "CONTAINER_STOPPING"},
	record.Deleting: {wire.Stopping, "CONTAINER_STOPPING"},
}

// StateOf is the state of r as clients see it.
func StateOf(r record.Record) string { return stateOf(&r) }

func stateOf(r *record.Record) string {
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
		Platform:   r.Spec.Platform,
		Status:     statusOf(&r),
		Metadata:   r.Spec.Labels,
		Extensions: r.Spec.Extensions,
		Entrypoint: r.Spec.Entrypoint,
		CreatedAt:  micros(r.Created),
		Sandboxd: &wire.Info{
			Name: r.Spec.Name, Runtime: r.Spec.Runtime, ImageName: imageURI(r.Spec.Image), ImageDigest: r.Spec.Image.Digest,
			MemoryBytes: r.Spec.MemoryBytes, CPUMillis: r.Spec.CPUMillis, Pids: r.Spec.Pids, DiskBytes: r.Spec.DiskBytes,
			CPUShares: r.Spec.CPUShares, ShmBytes: r.Spec.ShmBytes, LogBytes: r.Spec.LogBytes, ReadOnly: r.Spec.ReadOnly,
			IOReadBps: r.Spec.IOReadBps, IOWriteBps: r.Spec.IOWriteBps, IOReadIOPS: r.Spec.IOReadIOPS, IOWriteIOPS: r.Spec.IOWriteIOPS,
			Ports: showPublish(r.Spec.Publish), Network: string(r.Spec.Network.Mode), OneShot: r.Spec.OneShot, ExitCode: r.ExitCode,
		},
	}
	for _, t := range r.Spec.Tmpfs {
		out.Sandboxd.Tmpfs = append(out.Sandboxd.Tmpfs, wire.Tmpfs{Path: t.Path, Bytes: t.Bytes, Mode: strconv.FormatUint(uint64(t.Mode), 8), Exec: t.Exec})
	}
	if r.Spec.Snapshot == "" {
		out.Image = &wire.Image{URI: cmp.Or(r.Spec.ImageURI, imageURI(r.Spec.Image))}
	} else {
		out.SnapshotID = r.Spec.Snapshot
	}
	if out.Entrypoint == nil {
		out.Entrypoint = []string{}
	}
	out.ExpiresAt = moment(r.Expires)
	out.Sandboxd.Restarts, out.Sandboxd.NextStart = r.Restarts, moment(r.NextStart())
	if r.Restarts > 0 {
		out.Sandboxd.LastRestart = moment(r.Started)
	}
	return out
}

// show is toWire with what is not in the record.
func (s *Server) show(r record.Record) wire.Sandbox {
	out := toWire(r)
	if s.cfg.Health != nil {
		out.Sandboxd.Health = s.cfg.Health(r)
	}
	return out
}

// moment is nil for the zero time.
func moment(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = micros(t)
	return &t
}

// micros is t as OpenSandbox writes times; not every parser takes nanoseconds.
func micros(t time.Time) time.Time { return t.UTC().Truncate(time.Microsecond) }

func imageURI(i record.Image) string {
	if i.Name == "" {
		return i.Digest
	}
	return i.Ref()
}

func (s *Server) toInspection(r record.Record, host map[string]string) wire.Inspection {
	out := wire.Inspection{
		Sandbox: s.show(r), Env: slices.Sorted(maps.Keys(r.Spec.Env)), Layers: r.Spec.Image.Layers,
		Slot: r.Slot, State: string(r.State), LastOutput: r.LastOutput, Host: host,
	}
	for _, v := range r.Spec.Volumes {
		out.Volumes = append(out.Volumes, toWireMount(v))
	}
	for _, rule := range r.Spec.Network.Rules {
		out.Rules = append(out.Rules, rule.String())
	}
	return out
}

func (s *Server) toImageInfo(i record.Image) wire.ImageInfo {
	return wire.ImageInfo{
		Name: i.Name, Tag: i.Tag, Digest: i.Digest, Bytes: i.Bytes, Created: i.Created.UTC().Truncate(time.Second), Aliases: s.images.Aliases(i),
	}
}
