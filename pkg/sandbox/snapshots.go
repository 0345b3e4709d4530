package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Snapshots keeps frozen copies of the disks of sandboxes.
//
//	Create ─▶ creating ─┬─▶ ready ─┬─▶ deleting ─▶ (no record)
//	                    └─▶ failed ┘
//
// A snapshot is taken under the lock of its source. A source that runs stands still
// meanwhile: record, sync, freeze, copy, thaw, record. "creating" is the intent of all
// of it: if nobody works on a creating snapshot, the sweep thaws the source, removes
// the copy and marks the snapshot failed.
//
// A snapshot needs its source only while it is taken. A sandbox made from it needs the
// snapshot only until its own disk is there. So the only reference to count is a
// sandbox that is Creating from it.
type Snapshots struct {
	m     *Manager
	newID func() string
	max   int // how many are kept

	mu    sync.Mutex
	going map[string]*copying // by the source's ID; guarded by mu

	// naming is held while a name that must be unique is looked for and taken.
	naming sync.Mutex
}

// copying is a snapshot that is being taken.
type copying struct {
	id   string
	cut  context.CancelCauseFunc // its source is to be deleted
	done chan struct{}
}

// takeLimit is how long a copy may take: long enough for some ten gigabytes on
// a pool that copies bytes.
const takeLimit = 5 * time.Minute

// hurryLimit is how much longer a copy may take once its sandbox is to be deleted.
const hurryLimit = 2 * time.Second

// maxSnapshots bounds how many a host keeps: each costs btrfs a qgroup, and all of them
// are in memory.
const maxSnapshots = 10_000

func newSnapshots(m *Manager) *Snapshots {
	return &Snapshots{
		m:     m,
		max:   maxSnapshots,
		newID: func() string { return record.NewSnapshotID(m.life.cfg.Instance) },
		going: map[string]*copying{},
	}
}

// Snapshots is the part of the Manager that keeps snapshots.
func (m *Manager) Snapshots() *Snapshots { return m.snapshots }

// Create begins a snapshot of a sandbox that runs, is paused or has ended and returns
// as soon as the intent is durable. The rest happens in the background, even if ctx
// ends. See Await. For a sandbox in another state, or one that never ran, it fails with
// errs.WrongState. With unique, it fails with errs.Exists if another snapshot has the
// name.
func (s *Snapshots) Create(ctx context.Context, idOrName, name string, unique bool) (record.Snapshot, error) {
	return s.create(ctx, idOrName, record.Snapshot{Name: name}, unique)
}

// CreateTemporary is Create for a snapshot without a name that the caller deletes. If the
// daemon ends first, the next one deletes it.
func (s *Snapshots) CreateTemporary(ctx context.Context, idOrName string) (record.Snapshot, error) {
	return s.create(ctx, idOrName, record.Snapshot{Temporary: true}, false)
}

func (s *Snapshots) create(ctx context.Context, idOrName string, asked record.Snapshot, unique bool) (record.Snapshot, error) {
	m := s.m
	r, err := m.Get(ctx, idOrName)
	if err == nil && r.State.Beginning() { // not waited for
		err = snapshottable(&r)
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
	if r, err = m.Get(ctx, r.ID); err == nil {
		err = snapshottable(&r)
	}
	if err != nil {
		unlock()
		m.tracker.end()
		return record.Snapshot{}, err
	}
	// Registered before it is durable: a DELETE in between cuts it short, too.
	copyCtx, cut := context.WithCancelCause(m.ctx)
	c := &copying{id: s.newID(), cut: cut, done: make(chan struct{})}
	s.mu.Lock()
	s.going[r.ID] = c
	s.mu.Unlock()
	end := func() {
		s.mu.Lock()
		delete(s.going, r.ID)
		s.mu.Unlock()
		cut(nil)
		close(c.done)
		unlock()
		m.tracker.end()
	}
	asked.ID = c.id
	snap, err := s.begin(ctx, &r, asked, unique)
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

// snapshottable refuses a sandbox without files that are worth keeping.
func snapshottable(r *record.Record) error {
	switch {
	case r.State == record.Ended && r.NeverRan():
		return errs.New(errs.WrongState, "sandbox %s could not be created, so it has no files to take a snapshot of", r.ID)
	case r.State == record.Running, r.State == record.Paused, r.State == record.Ended:
		return nil
	}
	return errs.New(errs.WrongState, "sandbox %s is %s; a snapshot can be taken of a sandbox that is running, paused or ended", r.ID,
		r.State)
}

// begin makes the intent durable. snap has what the client asked for, and its ID.
func (s *Snapshots) begin(ctx context.Context, r *record.Record, snap record.Snapshot, unique bool) (record.Snapshot, error) {
	if unique {
		s.naming.Lock()
		defer s.naming.Unlock()
	}
	list, _, err := s.m.life.Store.SnapshotRecords(ctx)
	if err != nil {
		return record.Snapshot{}, fmt.Errorf("snapshot %s: %w", r.ID, err)
	}
	for _, other := range list {
		if unique && other.Name == snap.Name {
			return record.Snapshot{}, errs.Wire(errs.New(errs.Exists, "snapshot %s has the name %q; choose another name, or remove that "+
				"snapshot (`sandboxctl snapshot rm %s`)", other.ID, snap.Name, other.ID), "SNAPSHOT::ALREADY_EXISTS")
		}
	}
	list = slices.DeleteFunc(list, func(s record.Snapshot) bool { return s.State == record.SnapshotFailed }) // these have no files
	if len(list) >= s.max {
		return record.Snapshot{}, errs.New(errs.Exhausted, "this host has its maximum of %s; delete some (`sandboxctl snapshot "+
			"rm`)", errs.Count(s.max, "snapshot", "snapshots"))
	}
	snap.Source, snap.State, snap.Image, snap.Security = r.ID, record.SnapshotCreating, r.Spec.Image, r.Spec.Level()
	snap.Created = now()
	snap.Changed = snap.Created
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
		if errors.Is(context.Cause(ctx), errDeleted) {
			err = errors.Join(errs.New(errs.WrongState, "its sandbox was deleted meanwhile"), err)
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
}

// errFrozen says that a sandbox could not be thawed. Its snapshot stays creating, so
// that the sweep thaws it.
var errFrozen = errors.New("the sandbox could not be thawed; the sweep tries again")

// copy copies the disk of r, which stands still meanwhile, and returns for how long it
// did.
func (s *Snapshots) copy(ctx context.Context, r *record.Record, snap *record.Snapshot) (stood time.Duration, err error) {
	l := &s.m.life
	take := func() error {
		return within(ctx, takeLimit, "snapshot:take", func(ctx context.Context) error { return l.Frozen.TakeSnapshot(ctx, snap.ID, r.ID) })
	}
	if r.State != record.Running {
		err = take()
	} else {
		stood, err = s.standstill(ctx, r.ID, take)
	}
	if err != nil {
		return stood, err
	}
	return stood, within(ctx, takeLimit, "snapshot:finish", func(ctx context.Context) (err error) {
		snap.Bytes, err = l.Frozen.FinishSnapshot(ctx, snap.ID, r.ID)
		return err
	})
}

// standstill runs f while all processes of a running sandbox are frozen. It writes out
// dirty data before, so that the freeze is short.
func (s *Snapshots) standstill(ctx context.Context, id string, f func() error) (stood time.Duration, err error) {
	l := &s.m.life
	if err := within(ctx, takeLimit, "snapshot:prepare", l.Frozen.PrepareSnapshot); err != nil {
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

func (s *Snapshots) thaw(ctx context.Context, id string) error {
	return bounded(ctx, freezeLimit, "snapshot:thaw", func(ctx context.Context) error { return s.m.life.Cgroups.Thaw(ctx, id) })
}

// within is bounded for calls that the end of ctx cuts short.
func within(ctx context.Context, limit time.Duration, name string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errTooLong)
	defer cancel()
	if err := pass(name, func() error { return f(ctx) }); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", name, err), context.Cause(ctx))
	}
	return nil
}

// snapshotText is why a snapshot failed, as far as a client may know.
func snapshotText(err error) string {
	if e, ok := errors.AsType[*errs.Error](err); ok {
		return e.Text
	}
	return "the files could not be copied; the daemon's log says why"
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

// hurry bounds the snapshot of a sandbox that is to be deleted. The snapshot was
// accepted, so it is still taken if that needs only a moment, as on a pool that does
// not copy.
func (s *Snapshots) hurry(source string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.going[source]; c != nil {
		time.AfterFunc(hurryLimit, func() { c.cut(errDeleted) }) // does nothing once the snapshot is done
	}
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
