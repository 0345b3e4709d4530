package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A resource is one kind of thing a sandbox holds on the host.
//
// up may fail half way. down must succeed when up never ran, ran half way or
// ran twice, and must need nothing but the ID. held lists who holds one. down
// and held may be nil.
type resource struct {
	name string
	// after names the rows that this one stands on: up waits for them, and
	// their down waits for this one's. Rows that do not stand on one another
	// come up at the same time.
	after []string
	// keep marks what an ended sandbox still holds.
	keep bool
	// wanted, if not nil, says whether a record needs one at all: else there is
	// nothing to bring up.
	wanted func(*record.Record) bool
	limit  time.Duration // of up, and of down
	up     func(context.Context, *record.Record) error
	down   func(context.Context, *record.Record) error
	// fit, if not nil, makes what up has made for a prepared slot as the sandbox that took
	// it needs it. Such a row comes up with the slot: its up needs only what a slot has. If
	// fit fails with fs.ErrNotExist the row is lost, and comes up anew.
	fit  func(context.Context, *record.Record) error
	held func(context.Context) ([]string, error)
	// whole, if not nil, reports whether all of what a record holds is there: held also
	// names those that hold a part.
	whole func(context.Context, *record.Record) (bool, error)
	// lost says how bad it is if a living sandbox no longer holds one; nil: harmless. See
	// mend.
	lost func(*record.Record) loss
	// rejoin, if not nil, repairs a row that is held in part, while the sandbox runs.
	// If nil, such a row is lost.
	rejoin func(context.Context, *record.Record) error
}

func (row *resource) wants(r *record.Record) bool { return row.wanted == nil || row.wanted(r) }

// bring returns how the row comes up for r, and the name of that in failpoints.
func (row *resource) bring(r *record.Record) (verb string, f func(context.Context, *record.Record) error) {
	switch {
	case row.fit == nil:
		return "up:", row.up
	case r.State == record.Prepared:
		return "prepare:", row.up
	case r.State == record.Creating && r.Prepared:
		return "fit:", func(ctx context.Context, r *record.Record) error {
			err := row.fit(ctx, r)
			if errors.Is(err, fs.ErrNotExist) {
				return row.up(ctx, r)
			}
			return err
		}
	}
	return "up:", row.up
}

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
func resources(d Deps, c Config) []resource {
	owner := func(r *record.Record) bool { return d.Runtimes[r.Spec.Runtime].OwnUsers }
	always := func(l loss) func(*record.Record) loss { return func(*record.Record) loss { return l } }
	uids := func(r *record.Record) uint32 { return c.Instance.UIDBase(r.Slot) }
	rows := []resource{
		{
			name: "namespaces",
			up: func(ctx context.Context, r *record.Record) error {
				return d.Namespaces.CreateNamespaces(ctx, r.ID, owner(r), uids(r))
			},
			fit:   func(ctx context.Context, r *record.Record) error { return fitNamespaces(ctx, d, r) },
			down:  func(ctx context.Context, r *record.Record) error { return d.Namespaces.DeleteNamespaces(ctx, r.ID) },
			held:  func(ctx context.Context) ([]string, error) { return d.Namespaces.ListNamespaces(ctx) },
			whole: func(ctx context.Context, r *record.Record) (bool, error) { return d.Namespaces.Pinned(ctx, r.ID) },
		},
		diskRow(d),
		{
			name: "rootfs", after: []string{"namespaces", "disk"},
			up: func(ctx context.Context, r *record.Record) error {
				return d.Rootfs.Mount(ctx, r.ID, Mount{
					Layers:   r.Spec.Image.Layers,
					OwnUsers: owner(r),
					UIDBase:  uids(r),
					Volatile: r.Spec.OneShot,
					// Without users of its own, root in the sandbox is root on the host.
					SetUID: owner(r) && r.Spec.Level() == record.SecurityCompat,
				})
			},
			down:  func(ctx context.Context, r *record.Record) error { return d.Rootfs.Unmount(ctx, r.ID) },
			held:  func(ctx context.Context) ([]string, error) { return d.Rootfs.ListMounts(ctx) },
			whole: func(ctx context.Context, r *record.Record) (bool, error) { return d.Rootfs.Mounted(ctx, r.ID) },
		},
		volumesRow(d, owner, uids),
		{
			name: "cgroup",
			up:   func(ctx context.Context, r *record.Record) error { return makeCgroup(ctx, d, r) },
			fit:  func(ctx context.Context, r *record.Record) error { return fitCgroup(ctx, d, r) },
			down: func(ctx context.Context, r *record.Record) error { return d.Cgroups.Remove(ctx, r.ID) },
			held: func(ctx context.Context) ([]string, error) { return d.Cgroups.List(ctx) },
		},
		networkRow(d, c),
		{
			name: "egress", after: []string{"network"},
			up: func(ctx context.Context, r *record.Record) error {
				return d.Egress.Register(ctx, r, c.Addr(r.Slot))
			},
			down: func(ctx context.Context, r *record.Record) error { return d.Egress.Unregister(ctx, r.ID) },
			held: func(ctx context.Context) ([]string, error) { return d.Egress.ListRegistered(ctx) },
			lost: always(mendable),
		},
		{
			name: "bundle",
			up:   func(ctx context.Context, r *record.Record) error { return d.Bundles.Write(ctx, r) },
			down: func(ctx context.Context, r *record.Record) error { return d.Bundles.Remove(ctx, r.ID) },
			held: func(ctx context.Context) ([]string, error) { return d.Bundles.List(ctx) },
		},
		{
			// A row of its own: the bundles of other sandboxes need not wait for the rootfs. Its
			// files are in the bundle, and go with it.
			name: "trust", after: []string{"rootfs", "bundle"},
			wanted: func(r *record.Record) bool { return r.Spec.Inspect },
			up:     func(ctx context.Context, r *record.Record) error { return d.Bundles.Trust(ctx, r) },
		},
		{
			name: "runtime", after: []string{"volumes", "cgroup", "egress", "trust"}, limit: c.StartLimit,
			up:   func(ctx context.Context, r *record.Record) error { return startRuntime(ctx, d, r) },
			down: func(ctx context.Context, r *record.Record) error { return forgetRuntime(ctx, d, r) },
			held: func(ctx context.Context) ([]string, error) { return listRuntimes(ctx, d) },
		},
		{
			name: "agent", after: []string{"runtime"}, limit: c.StartLimit,
			up: func(ctx context.Context, r *record.Record) error { return awaitAgent(ctx, d, r) },
		},
		portsRow(d, c),
		cpuRow(d),
	}
	for i := range rows {
		rows[i].limit = cmp.Or(rows[i].limit, stepLimit)
	}
	return rows
}

func diskRow(d Deps) resource {
	return resource{
		name: "disk", keep: true, limit: takeLimit, // of a snapshot, perhaps by copying
		up: func(ctx context.Context, r *record.Record) error {
			return d.Disks.CreateDisk(ctx, r.ID, r.Spec.Snapshot, r.Spec.DiskBytes)
		},
		fit: func(ctx context.Context, r *record.Record) error {
			if r.Spec.DiskBytes == 0 {
				return nil // it came up without a limit
			}
			return d.Disks.LimitDisk(ctx, r.ID, r.Spec.DiskBytes)
		},
		down: func(ctx context.Context, r *record.Record) error { return d.Disks.DeleteDisk(ctx, r.ID) },
		held: func(ctx context.Context) ([]string, error) { return d.Disks.ListDisks(ctx) },
		lost: func(*record.Record) loss { return fatal },
	}
}

func networkRow(d Deps, c Config) resource {
	return resource{
		name: "network", after: []string{"namespaces"},
		up: func(ctx context.Context, r *record.Record) error {
			return d.Network.Attach(ctx, r.ID, c.Addr(r.Slot))
		},
		fit: func(ctx context.Context, r *record.Record) error {
			if ok, err := d.Network.Joined(ctx, r.ID, c.Addr(r.Slot)); err != nil || ok {
				return err
			}
			return fs.ErrNotExist
		},
		down: func(ctx context.Context, r *record.Record) error { return d.Network.Detach(ctx, r.ID) },
		held: func(ctx context.Context) ([]string, error) { return d.Network.ListLinks(ctx) },
		whole: func(ctx context.Context, r *record.Record) (bool, error) {
			return d.Network.Joined(ctx, r.ID, c.Addr(r.Slot))
		},
		lost:   func(r *record.Record) loss { return lostLink(d, r) },
		rejoin: func(ctx context.Context, r *record.Record) error { return d.Network.Rejoin(ctx, r.ID, c.Addr(r.Slot)) },
	}
}

// portsRow comes after the agent: nobody is let in before somebody is there.
func portsRow(d Deps, c Config) resource {
	return resource{
		name: "ports", after: []string{"agent"},
		up: func(ctx context.Context, r *record.Record) error {
			return d.Ports.Open(ctx, r.ID, c.Addr(r.Slot), r.Spec.Publish)
		},
		down: func(ctx context.Context, r *record.Record) error { return d.Ports.Close(ctx, r.ID) },
		held: func(ctx context.Context) ([]string, error) { return d.Ports.List(ctx) },
		lost: func(*record.Record) loss { return mendable },
	}
}

func cpuRow(d Deps) resource {
	return resource{
		name: "cpu", after: []string{"agent"},
		up: func(ctx context.Context, r *record.Record) error {
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
	return d.Runtimes[r.Spec.Runtime].Runtime.Start(ctx, r.ID, stdin)
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

// errDied is why nobody waits any longer for the agent of a dead sandbox.
var errDied = errors.New("its processes ended before its agent answered")

// awaitAgent waits until the agent answers, the sandbox is dead, or ctx ends.
func awaitAgent(ctx context.Context, d Deps, r *record.Record) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	gone, err := d.Cgroups.Watch(ctx, r.ID)
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	go func() {
		<-gone // also when ctx ends; then this cancels nothing
		cancel(errDied)
	}()
	if err := d.Agents.Ready(ctx, r); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return errors.Join(cause, err)
		}
		return err
	}
	return nil
}

// A Step is how long one row took to come up or to go away.
type Step struct {
	Name string
	Took time.Duration
}

// acquire brings all rows up, each as soon as what it stands on is up. After
// the first error, which it returns, it starts no more of them and cancels
// those that run. The steps are in the order of the table.
func acquire(ctx context.Context, rows []resource, r *record.Record) ([]Step, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	steps := make([]Step, len(rows))
	var (
		mu    sync.Mutex
		first error
	)
	walk(rows, func(i, j int) bool { return standsOn(rows[i], rows[j]) }, func(i int) {
		if ctx.Err() != nil || !rows[i].wants(r) {
			return
		}
		var err error
		verb, up := rows[i].bring(r)
		steps[i], err = step(ctx, verb, rows[i], up, r)
		if err == nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if first == nil {
			first = err
			cancel(err)
		}
	})
	if first == nil && ctx.Err() != nil {
		first = context.Cause(ctx)
	}
	return done(steps), first
}

// release takes rows away, each as soon as what stands on it is away. It does
// not stop at an error, so that one stuck mount keeps nothing else, and
// returns all of them.
func release(ctx context.Context, rows []resource, r *record.Record) ([]Step, error) {
	steps := make([]Step, len(rows))
	errs := make([]error, len(rows))
	walk(rows, func(i, j int) bool { return standsOn(rows[j], rows[i]) }, func(i int) {
		if rows[i].down != nil {
			steps[i], errs[i] = step(ctx, "down:", rows[i], rows[i].down, r)
		}
	})
	return done(steps), errors.Join(errs...)
}

// walk does every row once, at the same time as others but after those that
// it waits for.
func walk(rows []resource, waits func(i, j int) bool, do func(i int)) {
	ready := make([]chan struct{}, len(rows))
	for i := range ready {
		ready[i] = make(chan struct{})
	}
	var wg sync.WaitGroup
	for i := range rows {
		wg.Go(func() {
			defer close(ready[i])
			for j := range rows {
				if waits(i, j) {
					<-ready[j]
				}
			}
			do(i)
		})
	}
	wg.Wait()
}

func standsOn(a, b resource) bool {
	for _, name := range a.after {
		if name == b.name {
			return true
		}
	}
	return false
}

// step does one row: bounded, timed, with its name in the error and a
// failpoint on either side.
func step(ctx context.Context, verb string, row resource, f func(context.Context, *record.Record) error, r *record.Record) (Step, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, row.limit, errTooLong)
	defer cancel()
	start := time.Now()
	err := pass(verb+row.name, func() error { return f(ctx, r) })
	s := Step{Name: row.name, Took: time.Since(start)}
	if err != nil {
		return s, &stepError{row.name, errors.Join(err, context.Cause(ctx))}
	}
	return s, nil
}

// stepError carries the name of the step for what a client may read.
type stepError struct {
	step string
	err  error
}

func (e *stepError) Error() string { return e.step + ": " + e.err.Error() }
func (e *stepError) Unwrap() error { return e.err }

// pass does f between two failpoints.
func pass(name string, f func() error) error {
	if err := failpoint.Pass(name); err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	return failpoint.Pass("after:" + name)
}

// done drops the steps that were never taken.
func done(steps []Step) []Step {
	taken := steps[:0]
	for _, s := range steps {
		if s.Name != "" {
			taken = append(taken, s)
		}
	}
	return taken
}
