package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// Snapshots keeps frozen copies of the disks of sandboxes.
//
//	Create ─▶ creating ─┬─▶ ready ─┬─▶ deleting ─▶ (no record)
//	                    └─▶ failed ┘
//
// A snapshot is taken under the lock of its source. A source that runs stands still
// meanwhile: record, sync, freeze, copy, thaw, record. With its memory, the runtime has it
// stand still: record, sync, checkpoint and copy, record. "creating" is the intent of all
// of it: if nobody works on a creating snapshot, the sweep thaws the source, removes
// the copy and marks the snapshot failed.
//
// A snapshot needs its source only while it is taken. A sandbox made from it needs the
// snapshot only until its own disk is there. So the only references to count are a
// sandbox that is Creating from it, and in memory those who read its files (Use).
type Snapshots struct {
	m     *Manager
	newID func() string
	max   int // how many are kept

	taken chan struct{} // see Taken

	mu    sync.Mutex
	going map[string]*copying // by the source's ID; guarded by mu
	used  map[string]int      // by ID: how many read its files; guarded by mu

	promised map[string]int64 // by the source's ID: bytes of the pool for the memory image that is being written; guarded by mu

	// naming is held while a name that must be unique is looked for and taken.
	naming sync.Mutex
}

// copying is a snapshot that is being taken, or the memory image of a sandbox that is to hibernate.
type copying struct {
	id     string                  // of the snapshot
	memory bool                    // the runtime works on it, and may hang
	cut    context.CancelCauseFunc // its source is to be stopped or deleted
	done   chan struct{}
}

// takeLimit is how long a copy may take: long enough for some ten gigabytes on
// a pool that copies bytes.
const takeLimit = 5 * time.Minute

// How much longer a copy may take once its sandbox is to be deleted, and a checkpoint once it is to be
// stopped.
const (
	hurryLimit = 2 * time.Second
	stopLimit  = 30 * time.Second
)

// maxSnapshots bounds how many a host keeps: each costs btrfs a qgroup, and all of them
// are in memory.
const maxSnapshots = 10_000

func newSnapshots(m *Manager) *Snapshots {
	return &Snapshots{
		m:     m,
		max:   maxSnapshots,
		newID: func() string { return record.NewSnapshotID(m.life.cfg.Instance) },
		taken: make(chan struct{}, 1),
		going: map[string]*copying{},
		used:  map[string]int{},

		promised: map[string]int64{},
	}
}

// Snapshots is the part of the Manager that keeps snapshots.
func (m *Manager) Snapshots() *Snapshots { return m.snapshots }

// Taken receives after snapshots have become ready, once for several. It is for one reader.
func (s *Snapshots) Taken() <-chan struct{} { return s.taken }

// Create begins a snapshot of a sandbox that runs, is paused or has ended and returns
// as soon as the intent is durable. The rest happens in the background, even if ctx
// ends. See Await. For a sandbox in another state, or one that never ran, it fails with
// errs.WrongState; so it does with q.Memory for one that does not run. With q.Unique, it fails
// with errs.Exists if another snapshot has the name; with q.Memory, it fails with
// errs.Unsupported if the runtime cannot keep memory.
func (s *Snapshots) Create(ctx context.Context, idOrName string, q record.SnapshotRequest) (record.Snapshot, error) {
	m := s.m
	r, err := m.Get(ctx, idOrName)
	if err == nil && r.State.Beginning() { // not waited for
		err = s.takeable(&r, q)
	}
	if err != nil {
		return record.Snapshot{}, err
	}
	if !m.tracker.begin() {
		return record.Snapshot{}, errClosing
	}
	unlock, err := m.locks.Lock(ctx, r.ID)
	if err != nil {
		m.tracker.end()
		return record.Snapshot{}, busy("snapshot", r.ID, err)
	}
	room := func() {}
	if r, err = m.Get(ctx, r.ID); err == nil {
		err = s.takeable(&r, q)
	}
	if err == nil && q.Memory {
		room, err = s.reserve(r.ID)
	}
	if err != nil {
		unlock()
		m.tracker.end()
		return record.Snapshot{}, err
	}
	// Registered before it is durable: a DELETE in between cuts it short, too.
	id := s.newID()
	copyCtx, leave := s.enter(m.ctx, r.ID, id, q.Memory)
	end := func() {
		leave()
		room()
		unlock()
		m.tracker.end()
	}
	snap, err := s.begin(ctx, &r, id, q)
	if err != nil {
		end()
		return record.Snapshot{}, err
	}
	go func(snap record.Snapshot) {
		defer end()
		s.take(copyCtx, &r, &snap)
	}(snap)
	return snap, nil
}

// takeable refuses a sandbox without files, or memory, that can be kept.
func (s *Snapshots) takeable(r *record.Record, q record.SnapshotRequest) error {
	switch {
	case q.Memory && s.m.life.Runtimes[r.Spec.Runtime].Memory == nil:
		return errs.New(errs.Unsupported, "memory snapshots need runtime runsc, and sandbox %s is on %s; take a snapshot of its files "+
			"(without --memory)", r.ID, r.Spec.Runtime)
	case q.Memory && r.State != record.Running:
		return errs.New(errs.WrongState, "sandbox %s is %s; a snapshot of the memory can be taken of a sandbox that is running", r.ID,
			r.State)
	case r.State == record.Ended && r.NeverRan():
		return errs.New(errs.WrongState, "sandbox %s could not be created, so it has no files to take a snapshot of", r.ID)
	case r.State == record.Ended && r.Diskless():
		return errs.New(errs.WrongState, "the disk of sandbox %s was lost with the storage pool, so it has no files to take a snapshot of",
			r.ID)
	case r.State == record.Running, r.State == record.Paused, r.State == record.Hibernated, r.State == record.Ended:
		return nil
	}
	return errs.New(errs.WrongState, "sandbox %s is %s; a snapshot can be taken of a sandbox that is running, paused, hibernated or "+
		"ended", r.ID, r.State)
}

// begin makes the intent durable.
func (s *Snapshots) begin(ctx context.Context, r *record.Record, id string, q record.SnapshotRequest) (snap record.Snapshot, err error) {
	if q.Unique {
		s.naming.Lock()
		defer s.naming.Unlock()
	}
	list, _, err := s.m.life.Store.SnapshotRecords(ctx)
	if err != nil {
		return record.Snapshot{}, fmt.Errorf("snapshot %s: %w", r.ID, err)
	}
	for _, other := range list {
		if q.Unique && other.Name == q.Name {
			return record.Snapshot{}, errs.Wire(errs.New(errs.Exists, "snapshot %s has the name %q; choose another name, or remove that "+
				"snapshot (`sandboxctl snapshot rm %s`)", other.ID, q.Name, other.ID), "SNAPSHOT::ALREADY_EXISTS")
		}
	}
	list = slices.DeleteFunc(list, func(s record.Snapshot) bool { return s.State == record.SnapshotFailed }) // these have no files
	if len(list) >= s.max {
		return record.Snapshot{}, errs.New(errs.Exhausted, "this host has its maximum of %s; delete some (`sandboxctl snapshot "+
			"rm`)", errs.Count(s.max, "snapshot", "snapshots"))
	}
	at := now()
	snap = record.Snapshot{
		ID: id, Name: q.Name, Temporary: q.Temporary, Source: r.ID, State: record.SnapshotCreating, Image: r.Spec.Image,
		Security: r.Spec.Level(), Created: at, Changed: at,
	}
	if q.Memory {
		snap.Memory = &record.Memory{Spec: r.Spec, Token: r.Token}
	}
	if err := s.put(ctx, snap); err != nil {
		// A record that was written despite the error would come back as a failed
		// snapshot that no client requested.
		return snap, errors.Join(fmt.Errorf("snapshot %s: %w", r.ID, err), s.forget(ctx, snap.ID))
	}
	return snap, nil
}

// take brings a snapshot from creating to ready or failed.
func (s *Snapshots) take(ctx context.Context, r *record.Record, snap *record.Snapshot) {
	start := time.Now()
	stood, err := s.copy(ctx, r, snap)
	if err == nil {
		err = s.set(ctx, snap, record.SnapshotReady, "")
	} else if !errors.Is(err, errFrozen) {
		if cause := context.Cause(ctx); errors.Is(cause, errDeleted) || errors.Is(cause, errStopped) {
			err = errors.Join(errs.New(errs.WrongState, "meanwhile %v", cause), err)
		}
		err = errors.Join(err, s.fail(ctx, snap, snapshotText(err)))
	}
	args := []any{
		"snapshot", snap.ID, "sandbox", r.ID, "state", string(r.State), "dur", time.Since(start), "stood", stood,
		"bytes", snap.Bytes,
	}
	if err != nil {
		s.m.life.cfg.Log.ErrorContext(ctx, "snapshot", append(args, "err", strings.ReplaceAll(err.Error(), "\n", "; "))...)
		return
	}
	s.m.life.cfg.Log.InfoContext(ctx, "snapshot", args...)
	select {
	case s.taken <- struct{}{}:
	default: // one is enough
	}
}

// errFrozen says that a sandbox could not be thawed. Its snapshot stays creating, so
// that the sweep thaws it.
var errFrozen = errors.New("the sandbox could not be thawed; the sweep tries again")

// copy copies the disk of r, which stands still meanwhile, and returns for how long it
// did.
func (s *Snapshots) copy(ctx context.Context, r *record.Record, snap *record.Snapshot) (stood time.Duration, err error) {
	l := &s.m.life
	take := func() error {
		return table.Within(ctx, takeLimit, "snapshot:take", func(ctx context.Context) error {
			return l.Frozen.TakeSnapshot(ctx, snap.ID, r.ID)
		})
	}
	switch {
	case snap.Memory != nil:
		stood, err = s.checkpoint(ctx, r, snap, take)
	case r.State == record.Running:
		stood, err = s.standstill(ctx, r.ID, take)
	default:
		err = take()
	}
	if err != nil {
		return stood, err
	}
	return stood, table.Within(ctx, takeLimit, "snapshot:finish", func(ctx context.Context) (err error) {
		snap.Bytes, err = l.Frozen.FinishSnapshot(ctx, snap.ID, r.ID)
		return err
	})
}

// standstill runs f while all processes of a running sandbox are frozen. It writes out
// dirty data before, so that the freeze is short.
func (s *Snapshots) standstill(ctx context.Context, id string, f func() error) (stood time.Duration, err error) {
	l := &s.m.life
	if err := table.Within(ctx, takeLimit, "snapshot:prepare", l.Frozen.PrepareSnapshot); err != nil {
		return 0, err
	}
	start := time.Now()
	err = bounded(ctx, freezeLimit, "snapshot:freeze", func(ctx context.Context) error { return l.Cgroups.Freeze(ctx, id) })
	if err == nil {
		err = f()
	}
	if terr := s.thaw(ctx, id); terr != nil {
		err = errors.Join(err, terr, errFrozen)
	}
	return time.Since(start), err
}

// checkpoint keeps the memory of a running sandbox, and runs f while the sandbox stands still
// for that. It goes on also if this daemon dies: the runtime sees to it.
func (s *Snapshots) checkpoint(ctx context.Context, r *record.Record, snap *record.Snapshot, f func() error) (
	stood time.Duration, err error,
) {
	l := &s.m.life
	memory := l.Runtimes[r.Spec.Runtime].Memory
	if snap.Memory.Needs, err = memory.Needs(r.ID); err != nil {
		return 0, err
	}
	if err := table.Within(ctx, takeLimit, "snapshot:prepare", l.Frozen.PrepareSnapshot); err != nil {
		return 0, err
	}
	dir, err := l.Frozen.MakeMemory(ctx, snap.ID)
	if err != nil {
		return 0, err
	}
	narrow, err := s.widen(ctx, r)
	if err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.discard(ctx, snap.ID)) // its pages, which nobody has written out, go with it
		}
		narrow()
	}()
	start := time.Now()
	err = table.Within(ctx, takeLimit, "snapshot:checkpoint", func(ctx context.Context) error {
		return memory.Checkpoint(ctx, r.ID, dir, f)
	})
	stood = time.Since(start)
	if err != nil {
		return stood, err
	}
	return stood, table.Within(ctx, takeLimit, "snapshot:memory", func(ctx context.Context) (err error) {
		snap.Memory.Files, err = l.Frozen.FinishMemory(ctx, snap.ID)
		return err
	})
}

// widen lets a sandbox use more memory and more CPU time while its image is written: the pages of
// the image, in the kernel's cache, count as memory of the process that writes them, and it must
// not be killed if the kernel cannot free them fast enough; with little CPU time its guest would
// stand still for longer. If this daemon dies, or the kernel refuses to narrow it again, the sweep
// writes the limits that the record says.
func (s *Snapshots) widen(ctx context.Context, r *record.Record) (narrow func(), err error) {
	l := &s.m.life
	limits := cgroupLimits(l.Deps, r)
	if limits.MemoryBytes == 0 {
		return func() {}, nil
	}
	held, err := l.Cgroups.MemoryHeld(r.ID)
	if err != nil {
		return nil, err
	}
	limit := func(limits CgroupLimits, millis int64) error {
		return bounded(ctx, stepLimit, "snapshot:limit", func(ctx context.Context) error {
			return errors.Join(l.Cgroups.Limit(ctx, r.ID, limits), l.Cgroups.LimitCPU(ctx, r.ID, millis))
		})
	}
	wide, millis := limits, r.Spec.CPUMillis
	wide.MemoryBytes += held + limits.HeadroomBytes
	if millis > 0 {
		millis = max(millis, memoryMillis)
	}
	s.m.tracker.setLimited(r.ID, false)
	return func() {
		if err := limit(limits, r.Spec.CPUMillis); err != nil {
			l.cfg.Log.WarnContext(ctx, "cannot limit a sandbox again after a memory snapshot; the sweep tries again", "sandbox",
				r.ID, "err", err)
		}
	}, limit(wide, millis)
}

func (s *Snapshots) thaw(ctx context.Context, id string) error {
	return bounded(ctx, freezeLimit, "snapshot:thaw", func(ctx context.Context) error { return s.m.life.Cgroups.Thaw(ctx, id) })
}

// snapshotText is why a snapshot failed, as far as a client may know.
func snapshotText(err error) string {
	if e, ok := errors.AsType[*errs.Error](err); ok {
		return e.Text
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return "the storage pool is full: delete sandboxes or snapshots, or grow the pool (sandboxd pool grow)"
	}
	return "the sandbox could not be copied; the daemon's log says why"
}

// fail removes an unfinished snapshot and keeps in its record why it failed.
func (s *Snapshots) fail(ctx context.Context, snap *record.Snapshot, why string) error {
	if err := s.discard(ctx, snap.ID); err != nil {
		return err
	}
	return s.set(ctx, snap, record.SnapshotFailed, why)
}

// set makes a snapshot durable in another state.
func (s *Snapshots) set(ctx context.Context, snap *record.Snapshot, to record.SnapshotState, message string) error {
	n := *snap
	n.State, n.Message, n.Changed = to, message, now()
	if err := s.put(ctx, n); err != nil {
		return err
	}
	*snap = n
	return nil
}

func (s *Snapshots) put(ctx context.Context, snap record.Snapshot) error {
	return bounded(ctx, storeLimit, "store:snapshot:"+string(snap.State), func(ctx context.Context) error {
		return s.m.life.Store.PutSnapshot(ctx, snap)
	})
}

func (s *Snapshots) discard(ctx context.Context, id string) error {
	return bounded(ctx, stepLimit, "snapshot:delete", func(ctx context.Context) error { return s.m.life.Frozen.DeleteSnapshot(ctx, id) })
}

func (s *Snapshots) forget(ctx context.Context, id string) error {
	return bounded(ctx, storeLimit, "store:snapshot:forget", func(ctx context.Context) error {
		return s.m.life.Store.DeleteSnapshotRecord(ctx, id)
	})
}

// Await returns a snapshot once it is no longer being taken. When ctx ends
// first, it returns the record as it is, and the cause.
func (s *Snapshots) Await(ctx context.Context, id string) (record.Snapshot, error) {
	snap, err := s.Get(ctx, id)
	if err != nil || snap.State != record.SnapshotCreating {
		return snap, err
	}
	s.mu.Lock()
	c := s.going[snap.Source]
	s.mu.Unlock()
	if c != nil && c.id == snap.ID {
		select {
		case <-c.done:
		case <-ctx.Done():
			return snap, context.Cause(ctx)
		}
	}
	return s.Get(ctx, snap.ID)
}

// Get returns a snapshot by its ID, or by its name if no other has that.
func (s *Snapshots) Get(ctx context.Context, idOrName string) (record.Snapshot, error) {
	list, bad, err := s.m.life.Store.SnapshotRecords(ctx)
	if err != nil {
		return record.Snapshot{}, fmt.Errorf("get snapshot %q: %w", idOrName, err)
	}
	var named []record.Snapshot
	for _, snap := range list {
		switch idOrName {
		case snap.ID:
			return snap, nil
		case snap.Name:
			named = append(named, snap)
		}
	}
	switch {
	case idOrName != "" && len(named) == 1:
		return named[0], nil
	case idOrName != "" && len(named) > 1:
		return record.Snapshot{}, errs.New(errs.WrongState, "%d snapshots have the name %q; use an id (`sandboxctl snapshot ls`)",
			len(named), idOrName)
	case slices.Contains(bad, idOrName):
		return record.Snapshot{}, errs.New(errs.Internal, "the record of snapshot %s cannot be read; the snapshot can only be deleted",
			idOrName)
	}
	return record.Snapshot{}, errs.Wire(errs.New(errs.NotFound, "no snapshot %q; `sandboxctl snapshot ls` lists the snapshots of this host",
		idOrName),
		"SNAPSHOT::NOT_FOUND")
}

// List returns all snapshots, the newest first.
func (s *Snapshots) List(ctx context.Context) ([]record.Snapshot, error) {
	list, _, err := s.m.life.Store.SnapshotRecords(ctx)
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	slices.SortFunc(list, func(a, b record.Snapshot) int {
		if c := b.Created.Compare(a.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list, nil
}
