package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/admission"
	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/cgroups"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/fork"
	"github.com/sandboxd/sandboxd/pkg/health"
	"github.com/sandboxd/sandboxd/pkg/idle"
	"github.com/sandboxd/sandboxd/pkg/kmem"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/pressure"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// startBytes is the memory that a sandbox needs to come up. An idle sandbox was
// measured at 23.3 MiB on gVisor and at 2.4 MiB on runc (docs/benchmarks.md). The rest
// is what the kernel needs for a namespace with a link, a mount and a cgroup.
var startBytes = map[string]int64{oci.Runsc: 28 << 20, oci.Runc: 4 << 20}

// newGate makes the gate that refuses sandboxes for which the host has no room.
func (d *Daemon) newGate() *admission.Gate {
	return &admission.Gate{
		Limits: admission.Limits{
			MaxSandboxes:  d.cfg.Limits.MaxSandboxes,
			MemoryReserve: int64(d.cfg.Limits.MemoryReserve),
			DiskReserve:   int64(d.cfg.Storage.Reserve),
		},
		Host: admission.Host{
			Sandboxes:   d.manager.List,
			Deadline:    d.manager.Deadline,
			MemoryBytes: func() (int64, error) { return memory("MemAvailable") },
			Spaces:      d.spaces,
			StartBytes:  func(runtime string) int64 { return startBytes[runtime] },
			ImageBytes:  imageBytes(d.store.SnapshotRecord, d.cgroups.MemoryHeld),
			MakeRoom:    sandbox.StockOf(d.manager).MakeRoom,
			Relieve:     sandbox.Keeper{Manager: d.manager}.Relieve,
			Pressed:     func() string { return d.ladder.Full() },
		},
		Queue:   d.queue,
		Drain:   d.drain,
		Refused: d.metrics.Refused,
	}
}

// imageBytes is how much of the memory image of a snapshot a sandbox that is being created with it is
// still to read. A sandbox that has ended starts without.
func imageBytes(
	snapshot func(context.Context, string) (record.Snapshot, bool, error), held func(id string) (int64, error),
) func(r *record.Record) int64 {
	return func(r *record.Record) int64 {
		if r.State != record.Creating || !r.Spec.Memory {
			return 0
		}
		snap, _, err := snapshot(context.Background(), r.Spec.Snapshot)
		if err != nil || snap.Memory == nil { // its creation fails
			return 0
		}
		bytes, err := held(r.ID)
		if err != nil { // it has no cgroup yet
			bytes = 0
		}
		return max(0, snap.Memory.Bytes()-bytes)
	}
}

// imageRoom refuses a memory image that would take what the pool keeps for itself, or has promised.
func imageRoom(space func() (free, total int64, err error), reserve int64) func(bytes, promised int64) error {
	return func(bytes, promised int64) error {
		free, _, err := space()
		if err != nil || free-promised-bytes >= reserve {
			return err
		}
		others := ""
		if promised > 0 {
			others = fmt.Sprintf("other images that are being written may take %s of it, ", record.Mebibytes(promised))
		}
		return errs.New(errs.Exhausted, "no room for the memory of this sandbox, %s: the storage pool has %s free, %sand %s must "+
			"stay free (storage.reserve); delete sandboxes or snapshots, or grow the pool (sandboxd pool grow)", record.Mebibytes(bytes),
			record.Mebibytes(free), others, record.Mebibytes(reserve))
	}
}

// memory reads a size from proc_meminfo(5), in bytes.
func memory(field string) (int64, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), field+":")
	n, _, ok := strings.Cut(rest, " kB")
	kb, err := strconv.ParseInt(strings.TrimSpace(n), 10, 64)
	if !ok || err != nil {
		return 0, errors.Join(fmt.Errorf("/proc/meminfo has no %s", field), err)
	}
	return kb << 10, nil
}

// disksOf are the places that sandboxes and images fill.
func disksOf(d *Daemon) ([]pressure.Space, error) {
	pool := pressure.Space{
		Name: pressure.Pool, Title: "the storage pool", Remedy: "delete sandboxes, including ended ones (`sandboxctl system df` shows " +
			"their size), or grow the pool (sandboxd pool grow)",
	}
	state := pressure.Space{
		Name: pressure.State, Title: "the disk of the state directory", Remedy: "remove images (`sandboxctl image prune -a`), or free " +
			"space on it",
	}
	if err := errors.Join(pool.Stat(filepath.Join(d.cfg.StateDir, "pool")), state.Stat(d.cfg.StateDir)); err != nil {
		return nil, err
	}
	var err error
	pool.FreeBytes, pool.Bytes, err = d.files.Pool.Space()
	return []pressure.Space{pool, state}, err
}

// spaces are the places whose free space sandboxes use.
func (d *Daemon) spaces() (all []admission.Space, err error) {
	disks, err := disksOf(d)
	for _, s := range disks {
		all = append(all, admission.Space{Name: s.Title, FreeBytes: s.FreeBytes, Remedy: s.Remedy})
	}
	return all, err
}

// openLadder makes what keeps full disks from doing harm.
func openLadder(d *Daemon) {
	c := &pressure.Collector{
		Sandboxes: newAdmitted(d), Snapshots: d.manager.Snapshots(), Images: d.images,
		Prepared: sandbox.StockOf(d.manager).MakeRoom, NoSweep: d.noSweep, Log: d.log,
	}
	dirs := map[string]string{pressure.State: d.cfg.StateDir, pressure.Pool: filepath.Join(d.cfg.StateDir, "pool")}
	d.ladder = &pressure.Ladder{
		Try:     func(s pressure.Space) error { return pressure.Try(dirs[s.Name]) },
		Reserve: int64(d.cfg.Storage.Reserve), Spaces: func() ([]pressure.Space, error) { return disksOf(d) },
		Collect: c.Collect, Log: d.log,
		Rest: func(ctx context.Context, text string) { d.idle.Calm(ctx, text) },
		Tell: func(c pressure.Change) { sandbox.Tell(d.manager, events.Pressed, c.To.String(), c.Text) },
	}
}

// kernelWatch makes what ends sandboxes that take too much of the kernel's memory. On gVisor sockets and
// locks are the sentry's, whose memory its cgroup is charged with.
func kernelWatch(d *Daemon) *kmem.Watch {
	return &kmem.Watch{
		Sandboxes: d.manager.List,
		Held: func(ids []string, least int64) (map[string]netns.Held, error) {
			return netns.HeldBy(d.ns, ids, least)
		},
		Counts:    func(id string) (int64, error) { return cgroups.SocketMemory(d.cgroups, id) },
		Processes: d.cgroups.Processes,
		Available: func() (int64, error) { return memory("MemAvailable") },
		End:       sandbox.Keeper{Manager: d.manager}.Overdrawn,
		Watched:   func(r *record.Record) bool { return r.Spec.Runtime == oci.Runc && !weak.Off(weak.KernelMemory) },
		Log:       d.log,
	}
}

// stateSpace is the free space on the file system of the state directory.
func stateSpace(dir string) (wire.Space, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return wire.Space{}, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return wire.Space{FreeBytes: int64(st.Bavail) * st.Bsize, TotalBytes: int64(st.Blocks) * st.Bsize}, nil
}

var _ api.Sandboxes = (*admitted)(nil)

// admitted is the Manager behind the host's limits, as the API's Sandboxes.
type admitted struct {
	*sandbox.Manager
	gate *admission.Gate
	held func(id string) (int64, error) // the memory in use by a sandbox, in bytes
	may  func(context.Context) error    // why nothing may be created at all
	made func(ctx context.Context, key string) (record.Made, bool, error)
	pull func(r *record.Record) string // the progress of its image's pull
}

func newAdmitted(d *Daemon) *admitted {
	return &admitted{Manager: d.manager, gate: d.gate, held: d.cgroups.MemoryHeld, may: d.mayCreate, made: d.store.Made, pull: d.pulls.of}
}

// openForks makes what copies sandboxes. It ends before the Manager does.
func openForks(d *Daemon) {
	ctx, cancel := context.WithCancel(context.Background())
	sandboxes := newAdmitted(d)
	d.forks = fork.New(ctx, fork.Config{
		Instance: d.cfg.Instance, Sandboxes: sandboxes, Snapshots: d.manager.Snapshots(), Fits: sandboxes.Fits,
		Vault: vaultOfCopies(d), MemoryHeld: d.cgroups.MemoryHeld, Log: d.log,
		AtOnce: d.cfg.Limits.MaxCreating, Await: admission.CPU{Load: admission.Load}.Await,
	})
	d.onClose(func() error {
		cancel()
		d.forks.Close()
		return nil
	})
}

// Made returns what was made for the idempotency key of a request.
func (a *admitted) Made(ctx context.Context, key string) (record.Made, bool, error) {
	return a.made(ctx, key)
}

// Create refuses a sandbox for which the host has no room.
func (a *admitted) Create(ctx context.Context, s record.Spec) (record.Record, error) {
	if err := a.may(ctx); err != nil {
		return record.Record{}, err
	}
	leave, err := a.gate.Enter(ctx, s.Runtime, a.gate.Host.ImageBytes(&record.Record{State: record.Creating, Spec: s}), 1)
	if err != nil {
		return record.Record{}, err
	}
	defer leave()
	r, err := a.Manager.Create(ctx, s)
	return a.placed(r), err
}

// Fits refuses sandboxes for which the host has no room, before any of them is made.
func (a *admitted) Fits(ctx context.Context, runtime string, bytes int64, count int) error {
	if err := a.may(ctx); err != nil {
		return err
	}
	return a.gate.Fits(ctx, runtime, bytes, count)
}

// Start refuses a sandbox for which the host has no room, and while the host has
// sandboxes that the store does not know: one of them may have its slot.
func (a *admitted) Start(ctx context.Context, idOrName string) (record.Record, error) {
	if err := a.may(ctx); err != nil {
		return record.Record{}, err
	}
	r, err := a.Manager.Get(ctx, idOrName)
	if err != nil {
		return r, err
	}
	leave, err := a.gate.Enter(ctx, r.Spec.Runtime, 0, 0)
	if err != nil {
		return r, err
	}
	defer leave()
	r, err = a.Manager.Start(ctx, r.ID)
	return a.placed(r), err
}

// Resume refuses a sandbox whose memory is on disk while the host has no room for it.
func (a *admitted) Resume(ctx context.Context, idOrName string) error {
	leave, err := enterAwake(ctx, a.gate, a.Manager, a.held, idOrName)
	if err != nil {
		return err
	}
	defer leave()
	return a.Manager.Resume(ctx, idOrName)
}

// Hibernate puts the memory of a sandbox on disk.
func (a *admitted) Hibernate(ctx context.Context, idOrName string) error {
	return sandbox.Hibernate(ctx, a.Manager, idOrName)
}

// Promote puts a copy in the place of its source.
func (a *admitted) Promote(ctx context.Context, idOrName string) (record.Record, error) {
	r, err := sandbox.Promote(ctx, a.Manager, idOrName)
	return a.placed(r), err
}

// Queued reports whether a sandbox waits for its turn, or before that for its image.
func (a *admitted) Queued(r *record.Record) bool {
	return r.Spec.Away() || a.gate.Queue.Positions()[r.ID] > 0
}

// Get adds the position in the queue to a waiting sandbox.
func (a *admitted) Get(ctx context.Context, idOrName string) (record.Record, error) {
	r, err := a.Manager.Get(ctx, idOrName)
	return a.placed(r), err
}

// List does the same as Get for all sandboxes.
func (a *admitted) List(ctx context.Context) ([]*record.Record, error) {
	all, err := a.Manager.List(ctx)
	positions := a.gate.Queue.Positions() // once: each call takes time in proportion to the queue
	for i, r := range all {
		text := place(positions[r.ID])
		if text == "" && r.State.Beginning() {
			text = a.pull(r)
		}
		if text != "" {
			waits := *r
			waits.Message = text
			all[i] = &waits
		}
	}
	return all, err
}

// placed sets the message of a sandbox that is coming up; that message is not durable.
func (a *admitted) placed(r record.Record) record.Record {
	if r.State.Beginning() {
		if r.Message = place(a.gate.Queue.Positions()[r.ID]); r.Message == "" {
			r.Message = a.pull(&r)
		}
	}
	return r
}

func place(position int) string {
	switch position {
	case 0: // its turn has come
		return ""
	case 1:
		return "waiting for 1 creation before it"
	}
	return fmt.Sprintf("waiting for %d creations before it", position)
}

// Steps returns the steps of a creation as API types.
func (a *admitted) Steps(id string) (steps []api.Step) {
	for _, s := range a.Manager.Steps(id) {
		steps = append(steps, api.Step(s))
	}
	return steps
}

// Remove passes on to the Manager.
func (a *admitted) Remove(ctx context.Context, id string) error {
	return sandbox.Remove(ctx, a.Manager, id)
}

// DeleteEnded passes on to the Manager.
func (a *admitted) DeleteEnded(ctx context.Context, id string) (bool, error) {
	return sandbox.DeleteEnded(ctx, a.Manager, id)
}

// EventsSince returns events as API types.
func (a *admitted) EventsSince(ctx context.Context, cursor string, at time.Time) <-chan wire.Event {
	out := make(chan wire.Event)
	in := sandbox.EventsSince(ctx, a.Manager, cursor, at)
	go func() {
		defer close(out)
		for e := range in {
			select {
			case out <- wire.Event(e):
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

var (
	_ health.Manager = keeper{}
	_ idle.Manager   = keeper{}
)

// keeper is the Manager behind the host's limits, as the Manager of pkg/health and
// pkg/idle: restarts by policy and requests of clients take turns.
type keeper struct {
	sandbox.Keeper
	gate    *admission.Gate
	cgroups *cgroups.Tree
}

// CPU is the CPU time that a sandbox has used.
func (k keeper) CPU(id string) (time.Duration, error) {
	u, err := k.cgroups.Usage(id)
	return time.Duration(u.CPUMicros) * time.Microsecond, err
}

// Wake refuses a sandbox whose memory is on disk while the host has no room for it. When ctx ends, a
// wake that has begun goes on, and the room stays its own.
func (k keeper) Wake(ctx context.Context, id string) (record.Record, error) {
	leave, err := enterAwake(ctx, k.gate, k.Manager, k.cgroups.MemoryHeld, id)
	if err != nil {
		return record.Record{}, err
	}
	type result struct {
		r   record.Record
		err error
	}
	woken := make(chan result, 1)
	go func() {
		defer leave()
		r, err := k.Keeper.Wake(admission.By(ctx, "wakes"), id)
		woken <- result{r, err}
	}()
	select {
	case w := <-woken:
		return w.r, w.err
	case <-ctx.Done():
		return record.Record{}, context.Cause(ctx)
	}
}

// enterAwake is Gate.Wake for a sandbox that is to be resumed. One that is hibernating is woken when
// that is done. One whose memory stays where it is enters freely.
func enterAwake(
	ctx context.Context, g *admission.Gate, m *sandbox.Manager, held func(id string) (int64, error), id string,
) (leave func(), err error) {
	r, err := m.Get(ctx, id)
	var bytes int64
	switch {
	case err == nil && r.Hibernation != nil:
		bytes = r.Hibernation.Bytes()
	case err == nil && r.State == record.Hibernating:
		if bytes, err = held(r.ID); err != nil { // its image is whole by now, and its cgroup gone
			return enterAwake(ctx, g, m, func(string) (int64, error) { return 0, nil }, id)
		}
	default:
		return func() {}, err
	}
	return g.Wake(ctx, r.ID, r.Spec.Runtime, bytes)
}

// useByID is idle.Watcher.Use for a connection to a published port.
func useByID(d *Daemon) func(ctx context.Context, id string) (leave func(), err error) {
	return func(ctx context.Context, id string) (leave func(), err error) {
		r, err := d.manager.Get(ctx, id)
		if err != nil {
			return nil, err
		}
		return useHeld(d)(ctx, &r)
	}
}

// Restart refuses a sandbox for which the host has no room; pkg/health tries again.
func (k keeper) Restart(ctx context.Context, id string) error {
	r, err := k.Get(ctx, id)
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	leave, err := k.gate.Enter(ctx, r.Spec.Runtime, 0, 0)
	if err != nil {
		return err
	}
	leave = sync.OnceFunc(leave)
	defer leave()
	// leave runs when the restart begins: from then on the gate finds r in the list.
	return k.Keeper.Restart(admission.By(ctx, "restarts"), id, leave)
}
