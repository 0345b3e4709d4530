package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// Limits of one step. They are far above what a healthy host needs (all steps
// together take some 50 ms): they are there so that a wedged one ends.
const (
	stepLimit   = 15 * time.Second
	createSlack = time.Minute // of all steps of a creation together, above Config.StartLimit
)

// resources is what a sandbox is made of, by danger: the cgroup, which kills
// everything, before any process; the default-deny chain before any packet. The last
// row limits the CPU: a start needs more of it than a small sandbox has (see
// startMillis). A row added here is rolled back, deleted, recovered, swept, timed and
// fault-tested like the others.
func resources(d Deps, c Config) []table.Row {
	owner := func(r *record.Record) bool { return d.Runtimes[r.Spec.Runtime].OwnUsers }
	uids := func(r *record.Record) uint32 { return c.Instance.UIDBase(r.Slot) }
	rows := []table.Row{
		{
			Name: "namespaces",
			Up: func(ctx context.Context, r *record.Record) error {
				return d.Namespaces.CreateNamespaces(ctx, r.ID, owner(r), uids(r))
			},
			Fit:   func(ctx context.Context, r *record.Record) error { return fitNamespaces(ctx, d, r) },
			Down:  func(ctx context.Context, r *record.Record) error { return d.Namespaces.DeleteNamespaces(ctx, r.ID) },
			Held:  func(ctx context.Context) ([]string, error) { return d.Namespaces.ListNamespaces(ctx) },
			Whole: func(ctx context.Context, r *record.Record) (bool, error) { return d.Namespaces.Pinned(ctx, r.ID) },
		},
		diskRow(d),
		{
			Name: "rootfs", After: []string{"namespaces", "disk"},
			Up: func(ctx context.Context, r *record.Record) error {
				return d.Rootfs.Mount(ctx, r.ID, Mount{
					Layers:   r.Spec.Image.Layers,
					OwnUsers: owner(r),
					UIDBase:  uids(r),
					Volatile: r.Spec.OneShot,
					// Without users of its own, root in the sandbox is root on the host.
					SetUID: owner(r) && r.Spec.Level() == record.SecurityCompat,
					RunsOn: r.Recalls(),
				})
			},
			Down:  func(ctx context.Context, r *record.Record) error { return d.Rootfs.Unmount(ctx, r.ID) },
			Held:  func(ctx context.Context) ([]string, error) { return d.Rootfs.ListMounts(ctx) },
			Whole: func(ctx context.Context, r *record.Record) (bool, error) { return d.Rootfs.Mounted(ctx, r.ID) },
		},
		volumesRow(d, owner, uids),
		{
			Name: "cgroup",
			Up:   func(ctx context.Context, r *record.Record) error { return makeCgroup(ctx, d, r) },
			Fit:  func(ctx context.Context, r *record.Record) error { return fitCgroup(ctx, d, r) },
			Down: func(ctx context.Context, r *record.Record) error { return d.Cgroups.Remove(ctx, r.ID) },
			Held: func(ctx context.Context) ([]string, error) { return d.Cgroups.List(ctx) },
		},
		networkRow(d, c),
		vaultRow(d),
		egressRow(d, c),
		{
			Name: "bundle",
			Up:   func(ctx context.Context, r *record.Record) error { return d.Bundles.Write(ctx, r) },
			Down: func(ctx context.Context, r *record.Record) error { return d.Bundles.Remove(ctx, r.ID) },
			Held: func(ctx context.Context) ([]string, error) { return d.Bundles.List(ctx) },
		},
		{
			// A row of its own: the bundles of other sandboxes need not wait for the rootfs. Its
			// files are in the bundle, and go with it.
			Name: "trust", After: []string{"rootfs", "bundle"},
			Wanted: func(r *record.Record) bool { return r.Spec.Inspect },
			Up:     func(ctx context.Context, r *record.Record) error { return d.Bundles.Trust(ctx, r) },
		},
		memoryRow(d),
		{
			Name: "runtime", After: []string{"volumes", "cgroup", "egress", "trust", "memory"}, Limit: c.StartLimit,
			Recall: c.StartLimit + takeLimit,
			Up:     func(ctx context.Context, r *record.Record) error { return startRuntime(ctx, d, r) },
			Down:   func(ctx context.Context, r *record.Record) error { return forgetRuntime(ctx, d, r) },
			Held:   func(ctx context.Context) ([]string, error) { return listRuntimes(ctx, d) },
		},
		{
			Name: "agent", After: []string{"runtime"}, Limit: c.StartLimit,
			Up: func(ctx context.Context, r *record.Record) error {
				return awaitAgent(ctx, d, r, func(ctx context.Context, r *record.Record) error { return meetAgent(ctx, d, r) })
			},
		},
		portsRow(d, c),
		cpuRow(d),
	}
	for i := range rows {
		rows[i].Limit = cmp.Or(rows[i].Limit, stepLimit)
	}
	return claimable(d, rows)
}

func diskRow(d Deps) table.Row {
	return table.Row{
		Name: "disk", Keep: true, Limit: takeLimit, // of a snapshot, perhaps by copying
		Up: func(ctx context.Context, r *record.Record) error {
			return d.Disks.CreateDisk(ctx, r.ID, r.Spec.Snapshot, r.Spec.DiskBytes)
		},
		Fit: func(ctx context.Context, r *record.Record) error {
			if r.Spec.DiskBytes == 0 {
				return nil // it came up without a limit
			}
			return d.Disks.LimitDisk(ctx, r.ID, r.Spec.DiskBytes)
		},
		Down: func(ctx context.Context, r *record.Record) error { return d.Disks.DeleteDisk(ctx, r.ID) },
		Held: func(ctx context.Context) ([]string, error) { return d.Disks.ListDisks(ctx) },
		Lost: func(*record.Record) table.Loss { return table.Fatal },
	}
}

func networkRow(d Deps, c Config) table.Row {
	return table.Row{
		Name: "network", After: []string{"namespaces"},
		Up: func(ctx context.Context, r *record.Record) error {
			return d.Network.Attach(ctx, r.ID, c.Addr(r.Slot))
		},
		Fit: func(ctx context.Context, r *record.Record) error {
			if ok, err := d.Network.Joined(ctx, r.ID, c.Addr(r.Slot)); err != nil || ok {
				return err
			}
			return fs.ErrNotExist
		},
		Down: func(ctx context.Context, r *record.Record) error { return d.Network.Detach(ctx, r.ID) },
		Held: func(ctx context.Context) ([]string, error) { return d.Network.ListLinks(ctx) },
		Whole: func(ctx context.Context, r *record.Record) (bool, error) {
			return d.Network.Joined(ctx, r.ID, c.Addr(r.Slot))
		},
		Lost:   func(r *record.Record) table.Loss { return lostLink(d, r) },
		Rejoin: func(ctx context.Context, r *record.Record) error { return d.Network.Rejoin(ctx, r.ID, c.Addr(r.Slot)) },
	}
}

// portsRow comes after the agent: nobody is let in before somebody is there.
func egressRow(d Deps, c Config) table.Row {
	return table.Row{
		Name: "egress", After: []string{"network", "vault"},
		Up: func(ctx context.Context, r *record.Record) error {
			return d.Egress.Register(ctx, r, c.Addr(r.Slot))
		},
		Down: func(ctx context.Context, r *record.Record) error { return d.Egress.Unregister(ctx, r.ID) },
		Held: func(ctx context.Context) ([]string, error) { return d.Egress.ListRegistered(ctx) },
		Lost: func(*record.Record) table.Loss { return table.Mendable },
	}
}

func portsRow(d Deps, c Config) table.Row {
	return table.Row{
		Name: "ports", After: []string{"agent"},
		Up: func(ctx context.Context, r *record.Record) error {
			return d.Ports.Open(ctx, r.ID, c.Addr(r.Slot), r.Spec.Publish)
		},
		Down: func(ctx context.Context, r *record.Record) error { return d.Ports.Close(ctx, r.ID) },
		Held: func(ctx context.Context) ([]string, error) { return d.Ports.List(ctx) },
		Lost: func(*record.Record) table.Loss { return table.Mendable },
	}
}

func cpuRow(d Deps) table.Row {
	return table.Row{
		Name: "cpu", After: []string{"agent"},
		Up: func(ctx context.Context, r *record.Record) error {
			return d.Cgroups.LimitCPU(ctx, r.ID, r.Spec.CPUMillis)
		},
	}
}

// fitNamespaces removes namespaces that can no longer be joined, so that they are made
// anew.
func fitNamespaces(ctx context.Context, d Deps, r *record.Record) error {
	if ok, err := d.Namespaces.Pinned(ctx, r.ID); err != nil || ok {
		return err
	}
	if err := d.Namespaces.DeleteNamespaces(ctx, r.ID); err != nil {
		return err
	}
	return fs.ErrNotExist
}

func makeCgroup(ctx context.Context, d Deps, r *record.Record) error {
	return startCgroup(ctx, d, r, d.Cgroups.Create)
}

// fitCgroup gives the cgroup of a prepared slot, which has no limits, those of its
// sandbox. It has no process yet.
func fitCgroup(ctx context.Context, d Deps, r *record.Record) error {
	return startCgroup(ctx, d, r, d.Cgroups.Limit)
}

func startCgroup(ctx context.Context, d Deps, r *record.Record, limit func(context.Context, string, CgroupLimits) error) error {
	err := limit(ctx, r.ID, cgroupLimits(d, r))
	if err != nil || r.Spec.CPUMillis == 0 {
		return err
	}
	if r.Recalls() {
		return d.Cgroups.LimitCPU(ctx, r.ID, max(r.Spec.CPUMillis, memoryMillis))
	}
	return d.Cgroups.LimitCPU(ctx, r.ID, max(r.Spec.CPUMillis, startMillis))
}

// cgroupLimits are the limits of r as its runtime needs them.
func cgroupLimits(d Deps, r *record.Record) CgroupLimits {
	k, s := d.Runtimes[r.Spec.Runtime], &r.Spec
	l := CgroupLimits{
		MemoryBytes:   s.MemoryBytes,
		Pids:          s.Pids + record.AgentTasks,
		CPUShares:     s.CPUShares,
		IOReadBps:     s.IOReadBps,
		IOWriteBps:    s.IOWriteBps,
		IOReadIOPS:    s.IOReadIOPS,
		IOWriteIOPS:   s.IOWriteIOPS,
		OOMGroup:      k.OOMGroup,
		HeadroomBytes: k.HeadroomBytes,
	}
	if k.HostPids > 0 {
		l.Pids = k.HostPids
	}
	return l
}

// startMillis is the CPU time a start may use, in thousandths of a CPU: within a tenth of
// a CPU gVisor takes 1.2 s to start, within one 0.1 s. It is not 1000, which is the
// default of sandboxes: a start uses up the quota of its period (100 ms), and the kernel
// grants a new one when the quota changes, not when it is written again. With 1000 every
// other first command waited 20 to 40 ms for the next period.
const startMillis = 1010

func startRuntime(ctx context.Context, d Deps, r *record.Record) error {
	stdin, err := d.Agents.Bootstrap(r)
	if err != nil {
		return fmt.Errorf("bootstrap: %w", err)
	}
	defer stdin.Close() //nolint:errcheck // only read from
	if r.Recalls() {
		dir, err := d.Frozen.MemoryDir(imageOf(r))
		if err != nil {
			return err
		}
		needs, err := NeedsOf(ctx, d.Store, r)
		if err != nil {
			return err
		}
		ran, err := d.Runtimes[r.Spec.Runtime].Memory.Restore(ctx, r.ID, dir, needs, stdin)
		if ran && err != nil {
			err = &ranError{err}
		}
		return err
	}
	return d.Runtimes[r.Spec.Runtime].Runtime.Start(ctx, r.ID, stdin)
}

// NeedsOf is what the memory image needs that r comes up with. Precondition: r recalls one.
func NeedsOf(ctx context.Context, store interface {
	SnapshotRecord(ctx context.Context, id string) (s record.Snapshot, ok bool, err error)
}, r *record.Record,
) (n record.MemoryNeeds, err error) {
	if r.State == record.Waking && r.Hibernation != nil {
		return r.Hibernation.Needs, nil
	}
	snap, ok, err := store.SnapshotRecord(ctx, imageOf(r))
	if err == nil && (!ok || snap.Memory == nil) {
		err = fmt.Errorf("the memory image %s of sandbox %s is gone", imageOf(r), r.ID)
	}
	if err != nil {
		return n, err
	}
	return snap.Memory.Needs, nil
}

// forgetRuntime kills whatever is left in the cgroup and has the runtime
// forget it. A stray has no record, so any runtime may know it.
func forgetRuntime(ctx context.Context, d Deps, r *record.Record) error {
	if err := d.Cgroups.Kill(ctx, r.ID); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	if k, ok := d.Runtimes[r.Spec.Runtime]; ok {
		return k.Runtime.Forget(ctx, r.ID)
	}
	var errs []error
	for name, k := range d.Runtimes {
		if err := k.Runtime.Forget(ctx, r.ID); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func listRuntimes(ctx context.Context, d Deps) (ids []string, err error) {
	for name, k := range d.Runtimes {
		l, err := k.Runtime.List(ctx)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		ids = append(ids, l...)
	}
	return ids, nil
}
