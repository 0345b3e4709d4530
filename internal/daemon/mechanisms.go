package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/cgroups"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/egress/flowlog"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/oci/runc"
	"github.com/sandboxd/sandboxd/pkg/oci/runsc"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
)

// The mechanisms know at most the record of a sandbox; these types adapt them to the
// interfaces of the Manager and the API.

type cgroupTree struct{ *cgroups.Tree }

// MemoryLimitHit passes on to cgroups.
func (t cgroupTree) MemoryLimitHit(id string) (bool, error) {
	return cgroups.MemoryLimitHit(t.Tree, id)
}

func (t cgroupTree) Create(ctx context.Context, id string, l sandbox.CgroupLimits) error {
	return t.Tree.Create(ctx, id, cgroups.Limits(l))
}

func (t cgroupTree) Limit(ctx context.Context, id string, l sandbox.CgroupLimits) error {
	return t.Tree.Limit(ctx, id, cgroups.Limits(l))
}

// Kill knows that killed processes may linger.
func (t cgroupTree) Kill(ctx context.Context, id string) error {
	err := t.Tree.Kill(ctx, id)
	if errors.Is(err, cgroups.ErrDying) {
		return fmt.Errorf("%w: %w", sandbox.ErrLingering, err)
	}
	return err
}

// links is netns; an address's flows count as part of its link.
type links struct {
	*netns.Manager
	flows *egress.Engine
}

// errCut is the error when no link may go up.
var errCut = errors.New("the firewall rules of sandboxd are gone and could not be restored yet: until they are, links of sandboxes " +
	"stay down (the log has the error)")

// Attach links a sandbox, unless neither chains nor lock would confine it.
func (l links) Attach(ctx context.Context, id string, addr netip.Addr) error {
	return l.raise(ctx, id, func() error { return l.Manager.Attach(ctx, id, addr) })
}

// Rejoin does for the host's side what Attach does for both.
func (l links) Rejoin(ctx context.Context, id string, addr netip.Addr) error {
	return l.raise(ctx, id, func() error { return l.Manager.Rejoin(ctx, id, addr) })
}

// raise checks Cut again when the link is up: the guard takes down links that it sees
// up, and it may have looked before this link was up.
func (l links) raise(ctx context.Context, id string, up func() error) error {
	if l.flows.Cut() {
		return errCut
	}
	err := up()
	if l.flows.Cut() {
		return errors.Join(errCut, err, l.LeaveDown(context.WithoutCancel(ctx), id))
	}
	return err
}

// Joined is true also while the guard has all links down: that is no loss of a link,
// and the guard ends it.
func (l links) Joined(ctx context.Context, id string, addr netip.Addr) (bool, error) {
	if l.flows.Cut() {
		return true, nil
	}
	return l.Manager.Joined(ctx, id, addr)
}

// Gone waits until no flows and no link of the sandbox are left.
func (l links) Gone(ctx context.Context, id string) error {
	return errors.Join(l.flows.Gone(ctx, id), l.Manager.Gone(ctx, id))
}

type rootfs struct {
	*snapshot.Mounts
	disks *snapshot.Disks
}

// Mount also removes the files of an agent that died on this disk, or on the disk it
// was copied from, unless that agent runs on. Otherwise these files would be read as the cause of a death before
// the next agent is up.
func (s rootfs) Mount(ctx context.Context, id string, m sandbox.Mount) error {
	if !m.RunsOn {
		output, _ := agent.OutputOf(agent.EntrypointID)
		for _, path := range []string{agent.ObituaryFile, agent.CrashFile, output} {
			if err := s.disks.RemoveFile(ctx, id, path); err != nil {
				return err
			}
		}
	}
	return s.Mounts.Mount(ctx, id, snapshot.Mount{
		Layers: m.Layers, OwnUsers: m.OwnUsers, UIDBase: m.UIDBase, Volatile: m.Volatile, SetUID: m.SetUID,
	})
}

type volumes struct{ *snapshot.Volumes }

func (v volumes) MakeVolume(ctx context.Context, vol string, bytes int64, seed sandbox.VolumeSeed) error {
	return v.Volumes.MakeVolume(ctx, vol, bytes, snapshot.Seed(seed))
}

func (v volumes) AttachVolumes(ctx context.Context, id string, a sandbox.Attachment) error {
	return v.Volumes.AttachVolumes(ctx, id, snapshot.VolumeMounts(a))
}

var (
	_ sandbox.VolumeFiles = volumes{}
	_ sandbox.Cgroups     = cgroupTree{}
	_ sandbox.Rootfs      = rootfs{}
	_ sandbox.Network     = links{}
	_ sandbox.Disks       = (*snapshot.Disks)(nil)
	_ sandbox.Frozen      = (*snapshot.Snapshots)(nil)
	_ api.Stats           = (*stats)(nil)
	_ api.Diffs           = diffs{}
	_ api.Flows           = flows{}
)

// diffs compares what guests and users have written. It leaves out the agent's own
// directory.
type diffs struct{ files *snapshot.Store }

func (d diffs) Diff(ctx context.Context, of, base string, layers []string, emit func(kind, path string) error) error {
	return d.files.Diff(ctx, of, base, layers, ofAgent, emit)
}

func (d diffs) Pack(ctx context.Context, snapshot string, w io.Writer) error {
	return d.files.Snapshots.PackSnapshot(ctx, snapshot, ofAgent, w)
}

// ofAgent reports whether a path in a sandbox is the agent's own.
func ofAgent(p string) bool { return p == agent.StateDir }

// stats measures the resource use of a sandbox.
type stats struct {
	cgroups *cgroups.Tree
	disks   *snapshot.Disks
	agents  *agents
}

// Usage reads the counters of r.
func (s *stats) Usage(ctx context.Context, r *record.Record) (wire.Usage, error) {
	id := r.ID
	c, err := s.cgroups.Usage(id)
	if err != nil {
		return wire.Usage{}, err
	}
	u := wire.Usage{
		Time:            c.Time.UTC(),
		MemoryBytes:     int64(c.MemoryBytes),
		MemoryPeakBytes: int64(c.MemoryPeakBytes),
		CPUMicros:       int64(c.CPUMicros),
		OOMKills:        int64(c.OOMKills),
	}
	if u.Pids, err = s.tasks(ctx, r, c.Pids); err != nil {
		return wire.Usage{}, err
	}
	u.DiskBytes, _, err = s.disks.Usage(id)
	if err != nil && !errs.Is(err, errs.Unsupported) { // a pool that cannot limit does not count
		return wire.Usage{}, err
	}
	// At the host's end of the link, received bytes are those that the sandbox sent.
	u.TxBytes = counter(id, "rx_bytes")
	u.RxBytes = counter(id, "tx_bytes")
	return u, nil
}

// countTimeout is how long an agent may take to count: a busy guest may starve it.
const countTimeout = time.Second

// tasks counts the guest's own tasks among all tasks of r; the limit applies to these.
// On gVisor the host's tasks are the sentry's, and only the guest's agent can count the
// guest's. The result is nil if the agent does not answer.
func (s *stats) tasks(ctx context.Context, r *record.Record, all uint64) (*int64, error) {
	if r.Spec.Runtime != oci.Runsc {
		agent, err := s.cgroups.InitTasks(r.ID)
		return new(int64(all - min(agent, all))), err
	}
	if r.State != record.Running {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, countTimeout)
	defer cancel()
	n, err := s.agents.client(r).Tasks(ctx)
	if err != nil {
		return nil, nil //nolint:nilerr // everything else is known
	}
	return &n, nil
}

// OOMKills counts the processes of id that the kernel killed at its memory limit.
func (s *stats) OOMKills(id string) (int64, error) {
	n, err := s.cgroups.OOMKills(id)
	return int64(n), err
}

// counter reads a counter of the sandbox's host link; 0 without a link.
func counter(id, name string) (n int64) {
	b, err := os.ReadFile("/sys/class/net/" + netns.Link(id) + "/statistics/" + name)
	if err == nil {
		_, _ = fmt.Sscan(string(b), &n)
	}
	return n
}

// flows are the flow logs as the API shows them.
type flows struct{ recorder *flowlog.Recorder }

// Flows lists the destinations of a sandbox.
func (f flows) Flows(id string) wire.NetworkFlows {
	r := f.recorder.Report(id)
	out := wire.NetworkFlows{Since: sinceOf(r), Flows: make([]wire.Flow, len(r.Flows))}
	for i, e := range r.Flows {
		to := e.Name
		if to == "" {
			to = e.Addr.String()
		}
		out.Flows[i] = wire.Flow{Destination: to, Port: e.Port, Protocol: policy.ProtoName(e.Proto), Connections: connections(e.Tally)}
	}
	if r.Other != (flowlog.Tally{}) {
		out.Other = new(connections(r.Other))
	}
	return out
}

// Traffic counts what passed the link of a sandbox.
func (f flows) Traffic(id string) wire.NetworkStats {
	r := f.recorder.Report(id)
	return wire.NetworkStats{
		Time: micros(time.Now()), Since: sinceOf(r),
		RxBytes: int64(r.Traffic.RxBytes), TxBytes: int64(r.Traffic.TxBytes),
		RxPackets: int64(r.Traffic.RxPackets), TxPackets: int64(r.Traffic.TxPackets),
		Allowed: int64(r.Total.Allowed), Denied: int64(r.Total.Denied),
	}
}

func sinceOf(r flowlog.Report) *time.Time {
	if r.Since.IsZero() {
		return nil
	}
	return new(micros(r.Since))
}

func connections(t flowlog.Tally) wire.Connections {
	return wire.Connections{Allowed: int64(t.Allowed), Denied: int64(t.Denied), FirstSeen: micros(t.First), LastSeen: micros(t.Last)}
}

func micros(t time.Time) time.Time { return t.UTC().Truncate(time.Microsecond) }

// installed lists the directories of runtimes and agents of the versions beside this one.
func installed() (dirs []string) {
	if root, _, ok := versions.Own(); ok {
		dirs, _ = filepath.Glob(filepath.Join(string(root), "versions", "*", "libexec", "sandboxd"))
	}
	return dirs
}

// openRuntimes opens the drivers of both runtimes, which read their bundles in b.
func openRuntimes(d *Daemon, b *bundles) (map[string]sandbox.RuntimeKind, error) {
	gvisor, err := runsc.New(runsc.Config{
		Binary:        filepath.Join(d.cfg.LibexecDir, "runsc"),
		Installed:     installed,
		Root:          filepath.Join(d.cfg.RunDir, "runsc"),
		Bundle:        b.dir,
		StartInCgroup: d.cgroups.Start,
		Processes:     d.cgroups.Processes,
	})
	if err != nil {
		return nil, err
	}
	d.gvisor = gvisor
	d.onClose(gvisor.Close)
	b.recalled = func(ctx context.Context, r *record.Record) (string, error) {
		needs, err := sandbox.NeedsOf(ctx, d.store, r)
		if err != nil {
			return "", err
		}
		return gvisor.AgentDir(needs)
	}
	d.runc, err = runc.New(runc.Config{
		Binary: filepath.Join(d.cfg.LibexecDir, "sandboxd-runc"),
		Root:   filepath.Join(d.cfg.RunDir, "runc"),
		Bundle: b.dir,
	})
	if err != nil {
		return nil, err
	}
	d.onClose(d.runc.Close)
	return map[string]sandbox.RuntimeKind{
		oci.Runsc: {
			Runtime:       gvisor,
			Memory:        gvisor,
			OOMGroup:      true,
			HeadroomBytes: int64(d.cfg.Runtime.RunscHeadroom),
			HoldsLink:     true,
			ExitsLikeInit: true,
			HostPids:      runscHostPids,
		},
		oci.Runc: {
			Runtime:  d.runc,
			OwnUsers: !weak.Off(weak.UserNS),
			Rename:   d.runc.Rename,
			Early:    func() { _ = d.cgroups.Rouse() }, // if it fails, a start takes longer
		},
	}, nil
}

// pulls holds the progress of image pulls for sandboxes.
type pulls struct{ m sync.Map } // by ID: image.Progress

// of returns the progress for people; empty: no pull is under way.
func (p *pulls) of(r *record.Record) string {
	at, ok := p.m.Load(r.ID)
	if !ok {
		return ""
	}
	return pulling(r, at.(image.Progress))
}

func pulling(r *record.Record, at image.Progress) string {
	return "pulling image " + r.Spec.Image.Ref() + ": " + at.String()
}

// fetch pulls the image of a sandbox.
func (d *Daemon) fetch(asker context.Context, r *record.Record, progress func(string)) (record.Image, error) {
	ref, err := image.ParseReference(r.Spec.ImageURI)
	if err != nil {
		return record.Image{}, err
	}
	defer d.pulls.m.Delete(r.ID)
	worth := telling{}
	i, err := d.images.Pull(asker, image.Pull{Ref: ref, Missing: true}, func(at image.Progress) {
		d.pulls.m.Store(r.ID, at)
		if worth.telling(at) {
			progress(pulling(r, at))
		}
	})
	if err == nil {
		progress("image " + r.Spec.Image.Ref() + " is on this host")
	}
	return i, err
}

// telling keeps the progress of one pull from filling the history of its sandbox, which
// has room for some thirty lines. There is a line when the download begins, at each
// tenth of it, and when only unpacking is left.
type telling struct{ mark int64 }

func (t *telling) telling(at image.Progress) bool {
	mark := int64(1)
	switch {
	case at.Stage == image.StageDownload:
		mark = 2 + 10*at.Bytes/max(at.Total, 1)
	case at.Stage == image.StageUnpack && (t.mark < 2 || t.mark >= 12): // not during a download
		mark = 13
	}
	if mark <= t.mark {
		return false
	}
	t.mark = mark
	return true
}
