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
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// enter registers the snapshot id of a source, which is locked, or its hibernation, until leave is
// called. ctx ends when either is no longer wanted. See hurry.
func (s *Snapshots) enter(ctx context.Context, source, id string, memory bool) (_ context.Context, leave func()) {
	ctx, cut := context.WithCancelCause(ctx)
	c := &copying{id: id, memory: memory, cut: cut, done: make(chan struct{})}
	s.mu.Lock()
	s.going[source] = c
	s.mu.Unlock()
	return ctx, func() {
		s.mu.Lock()
		delete(s.going, source)
		s.mu.Unlock()
		cut(nil)
		close(c.done)
	}
}

// hurry bounds the snapshot of a sandbox that is to be deleted or stopped, and says why. The snapshot
// was accepted, so it is still taken if that needs only a moment, as on a pool that does not copy.
func (s *Snapshots) hurry(source string, why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, limit := s.going[source], hurryLimit
	switch {
	case c == nil, !c.memory && errors.Is(why, errStopped): // its files stay
		return
	case errors.Is(why, errStopped):
		limit = stopLimit
	}
	time.AfterFunc(limit, func() { c.cut(why) }) // does nothing once the snapshot is done
}

// reserve refuses a memory image that the pool has no room for, also once all others that are being
// written are whole. Else its bytes are promised until release is called: what is written and not
// yet synced still counts as free.
func (s *Snapshots) reserve(id string) (release func(), err error) {
	if err := s.promise(id); err != nil {
		return nil, err
	}
	return func() { s.unpromise(id) }, nil
}

func (s *Snapshots) unpromise(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.promised, id)
}

// promise is reserve, again for a sandbox that has been promised room: it may need more by now.
func (s *Snapshots) promise(id string) error {
	room := s.m.life.cfg.ImageRoom
	if room == nil {
		return nil
	}
	held, err := s.m.life.Cgroups.MemoryHeld(id)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	others := -s.promised[id]
	for _, bytes := range s.promised {
		others += bytes
	}
	if err := room(held, others); err != nil {
		return err
	}
	s.promised[id] = held
	return nil
}

// hold checks that a sandbox can begin as a snapshot, gives spec its image, and keeps
// the snapshot from being deleted until release is called. By then a record that is
// Creating names it, or none ever will.
func (s *Snapshots) hold(ctx context.Context, spec *record.Spec) (release func(), err error) {
	if spec.Snapshot == "" {
		return func() {}, nil
	}
	release, err = s.m.locks.Lock(ctx, spec.Snapshot)
	if err != nil {
		return nil, busy("snapshot", spec.Snapshot, err)
	}
	snap, err := s.ready(ctx, spec.Snapshot, "a sandbox can only be created from a snapshot that is ready")
	switch {
	case err != nil:
	case spec.DiskBytes > 0 && spec.DiskBytes < snap.Bytes:
		err = errs.Wire(errs.New(errs.Invalid, "snapshot %s holds %s, more than the requested disk of %s; request a larger disk (--disk)",
			snap.ID, record.Mebibytes(snap.Bytes), record.Mebibytes(spec.DiskBytes)), "SNAPSHOT::INVALID_RESTORE_CONFIG")
	}
	if err == nil && spec.Memory {
		err = s.restorable(spec, &snap)
	}
	if err != nil {
		release()
		return nil, err
	}
	spec.Image = snap.Image
	return release, nil
}

// restorable refuses a sandbox that cannot begin with the memory of snap. (Whether its image is
// whole is checked when it is brought up.)
func (s *Snapshots) restorable(spec *record.Spec, snap *record.Snapshot) error {
	bad := func(code errs.Code, format string, args ...any) error {
		return errs.Wire(errs.New(code, format, args...), "SNAPSHOT::INVALID_RESTORE_CONFIG")
	}
	memory := s.m.life.Runtimes[spec.Runtime].Memory
	switch {
	case memory == nil:
		return bad(errs.Unsupported, "memory snapshots need runtime runsc, and the sandbox is to run on %s; leave the runtime out, or "+
			"create it from the files alone (without --with-memory)", spec.Runtime)
	case snap.Memory == nil:
		return bad(errs.Invalid, "snapshot %s has files and no memory; create the sandbox from its files (without --with-memory), or take "+
			"a snapshot with `sandboxctl snapshot create --memory`", snap.ID)
	case spec.MemoryBytes > 0 && spec.MemoryBytes+s.m.life.Runtimes[spec.Runtime].HeadroomBytes < snap.Memory.Bytes():
		return bad(errs.Invalid, "snapshot %s has a memory of %s, more than the limit of %s; request more (--memory)", snap.ID,
			record.Mebibytes(snap.Memory.Bytes()), record.Mebibytes(spec.MemoryBytes))
	}
	if differ := spec.Differs(&snap.Memory.Spec); len(differ) > 0 {
		text := strings.Join(differ, ", ")
		if slices.Contains(differ, "entrypoint") {
			text += fmt.Sprintf("; the source's entrypoint is %.200q, and runs on: leave yours out", snap.Memory.Spec.Entrypoint)
		}
		return bad(errs.Invalid, "a sandbox that begins with the memory of snapshot %s must be as its source was; these differ: %s",
			snap.ID, text)
	}
	return memory.Meets(snap.Memory.Needs)
}

// imageOf is the snapshot, or the sandbox, whose memory image r comes up with.
func imageOf(r *record.Record) string {
	if r.State == record.Waking {
		return r.ID
	}
	return r.Spec.Snapshot
}

// memoryOf is the memory of the snapshot that r begins as, which nobody deletes meanwhile.
func memoryOf(ctx context.Context, d Deps, r *record.Record) (*record.Memory, error) {
	snap, _, err := d.Store.SnapshotRecord(ctx, r.Spec.Snapshot)
	if err == nil && snap.Memory == nil {
		err = fmt.Errorf("there is no memory of snapshot %s", r.Spec.Snapshot)
	}
	return snap.Memory, err
}

// memoryMillis is the CPU time that a runtime may use while it keeps or restores memory. It works
// on its state and on the guest's pages at the same time: within one CPU a restore of 100 MB
// takes 60 ms longer, of 160 ms.
const memoryMillis = 4 * startMillis

// memoryRow is the memory image with which a sandbox comes up. It is checked while other rows come
// up. A hibernated sandbox holds one of its own.
func memoryRow(d Deps) table.Row {
	return table.Row{
		Name: "memory", Wanted: (*record.Record).Recalls, Limit: takeLimit,
		Up:   func(ctx context.Context, r *record.Record) error { return checkMemory(ctx, d, r) },
		Down: func(ctx context.Context, r *record.Record) error { return d.Frozen.DeleteMemory(ctx, r.ID) },
		Held: func(ctx context.Context) ([]string, error) { return d.Frozen.ListHibernated(ctx) },
	}
}

func checkMemory(ctx context.Context, d Deps, r *record.Record) error {
	if r.State == record.Waking {
		return d.Frozen.CheckMemory(ctx, r.ID, r.Hibernation.Files)
	}
	m, err := memoryOf(ctx, d, r)
	if err == nil {
		err = d.Frozen.CheckMemory(ctx, r.Spec.Snapshot, m.Files)
	}
	return err
}

// vaultRow is the credential vault of a copy. It comes up once, before its egress and its agent read
// it: whatever happens to the vault of its source later does not concern the copy. It goes with the
// record; a copy that failed loses it before (dropVault).
func vaultRow(d Deps) table.Row {
	return table.Row{
		Name: "vault", Keep: true,
		Wanted: func(r *record.Record) bool { return r.State == record.Creating && r.Spec.Fork.Vault },
		Up:     func(ctx context.Context, r *record.Record) error { return d.Vaults.Copy(ctx, r.Spec.Fork.Source, r.ID) },
	}
}

// dropVault takes the vault away from a copy that ends with d, if it never ran: nothing starts it
// again. One that ran keeps its vault, like its disk.
func dropVault(ctx context.Context, l *life, r *record.Record, d death) error {
	end := *r
	d.write(&end)
	if !r.Spec.Fork.Vault || !end.NeverRan() {
		return nil
	}
	return bounded(ctx, storeLimit, "vault:drop", func(ctx context.Context) error { return l.Vaults.Drop(ctx, r.ID) })
}

// meetAgent waits for the agent, and if it was copied has it become that of r.
func meetAgent(ctx context.Context, d Deps, r *record.Record) error {
	if !r.Recalls() || r.State == record.Waking {
		return d.Agents.Ready(ctx, r)
	}
	m, err := memoryOf(ctx, d, r)
	if err != nil {
		return err
	}
	return d.Agents.Adopt(ctx, r, m.Token, true)
}

// ready is Get for a snapshot that must be ready; why says so to people.
func (s *Snapshots) ready(ctx context.Context, idOrName, why string) (record.Snapshot, error) {
	snap, err := s.Get(ctx, idOrName)
	if err == nil && snap.State != record.SnapshotReady {
		err = errs.Wire(errs.New(errs.WrongState, "snapshot %s is %s; %s", snap.ID, snap.State, why), "SNAPSHOT::NOT_READY")
	}
	return snap, err
}

// Use returns a snapshot that is ready, and keeps it from being deleted until release is
// called. why says to people what needs a ready one.
func (s *Snapshots) Use(ctx context.Context, idOrName, why string) (snap record.Snapshot, release func(), err error) {
	if snap, err = s.ready(ctx, idOrName, why); err != nil {
		return snap, nil, err
	}
	unlock, err := s.m.locks.Lock(ctx, snap.ID)
	if err != nil {
		return snap, nil, busy("snapshot", snap.ID, err)
	}
	defer unlock()
	if snap, err = s.ready(ctx, snap.ID, why); err != nil {
		return snap, nil, err
	}
	count := func(n int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.used[snap.ID] += n; s.used[snap.ID] == 0 {
			delete(s.used, snap.ID)
		}
	}
	count(1)
	return snap, sync.OnceFunc(func() { count(-1) }), nil
}

// InUse reports whether somebody reads the files of a snapshot (Use).
func (s *Snapshots) InUse(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used[id] > 0
}

// Delete removes a snapshot. It fails with errs.WrongState while the snapshot is being
// taken, a sandbox is being made from it, or somebody reads its files. A record that
// cannot be read is deleted too, by its ID.
func (s *Snapshots) Delete(ctx context.Context, idOrName string) error {
	snap, err := s.remains(ctx, idOrName)
	if err != nil {
		return err
	}
	if !s.m.tracker.begin() {
		return errClosing
	}
	defer s.m.tracker.end()
	unlock, err := s.m.locks.Lock(ctx, snap.ID)
	if err != nil {
		return busy("delete snapshot", snap.ID, err)
	}
	defer unlock()
	if snap, err = s.remains(ctx, snap.ID); err != nil {
		return err
	}
	if err := s.unused(ctx, &snap); err != nil {
		return err
	}
	return s.erase(ctx, &snap)
}

// remains is Get, but if the record cannot be read it returns the ID.
func (s *Snapshots) remains(ctx context.Context, idOrName string) (record.Snapshot, error) {
	snap, err := s.Get(ctx, idOrName)
	if errs.Is(err, errs.Internal) {
		if _, bad, berr := s.m.life.Store.SnapshotRecords(ctx); berr == nil && slices.Contains(bad, idOrName) {
			return record.Snapshot{ID: idOrName}, nil
		}
	}
	return snap, err
}

// unused refuses a snapshot that is in use.
func (s *Snapshots) unused(ctx context.Context, snap *record.Snapshot) error {
	if snap.State == record.SnapshotCreating {
		return errs.Wire(errs.New(errs.WrongState, "snapshot %s is still being taken; delete it when it is ready", snap.ID),
			"SNAPSHOT::INVALID_STATE")
	}
	if s.InUse(snap.ID) {
		return errs.Wire(errs.New(errs.WrongState, "snapshot %s is in use: its files are being read, for an image or a comparison; try "+
			"again when that is done", snap.ID), "SNAPSHOT::DELETE_CONFLICT")
	}
	all, err := s.m.life.Store.List(ctx)
	if err != nil {
		return fmt.Errorf("delete snapshot %s: %w", snap.ID, err)
	}
	for _, r := range all {
		if r.Spec.Snapshot == snap.ID && r.State == record.Creating {
			return errs.Wire(errs.New(errs.WrongState, "snapshot %s is in use: sandbox %s is being created from it; try again when the "+
				"sandbox runs", snap.ID, r.ID), "SNAPSHOT::DELETE_CONFLICT")
		}
	}
	return nil
}

// erase removes a snapshot for good. After an error it stays deleting, and the sweep
// goes on.
func (s *Snapshots) erase(ctx context.Context, snap *record.Snapshot) error {
	if snap.State != "" && snap.State != record.SnapshotDeleting { // else it is unreadable, and cannot be written
		if err := s.set(ctx, snap, record.SnapshotDeleting, ""); err != nil {
			return fmt.Errorf("delete snapshot %s: %w", snap.ID, err)
		}
	}
	err := s.discard(ctx, snap.ID)
	if err == nil {
		err = s.forget(ctx, snap.ID)
	}
	if err != nil {
		return fmt.Errorf("delete snapshot %s: %w", snap.ID, err)
	}
	return nil
}

// recover does the part of Recover for snapshots: a snapshot on the pool without a
// record is a stray. The pool is listed first, for the reason given there.
func (s *Snapshots) recover(ctx context.Context) error {
	l := &s.m.life
	bound, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	held, err := l.Frozen.ListSnapshots(bound)
	if err != nil {
		return fmt.Errorf("recover: list snapshots: %w", err)
	}
	list, known, err := l.Store.SnapshotRecords(ctx)
	if err != nil {
		return fmt.Errorf("recover: list the store: %w", err)
	}
	var failed []error
	for i := range list {
		known = append(known, list[i].ID)
		failed = append(failed, s.heal(ctx, &list[i]))
	}
	for _, id := range held {
		if record.SnapshotOf(l.cfg.Instance, id) && !slices.Contains(known, id) {
			failed = append(failed, s.releaseStray(ctx, id))
		}
	}
	return errors.Join(failed...)
}

// heal finishes what a dead daemon, or an error, left of a snapshot. A failed one is
// kept as long as an ended sandbox, so that its message can be read. A temporary one of
// another daemon is deleted, however far it came: nobody reads its message.
func (s *Snapshots) heal(ctx context.Context, snap *record.Snapshot) error {
	key := snap.ID
	switch snap.State {
	case record.SnapshotCreating:
		key = snap.Source // it is taken under that lock
	case record.SnapshotDeleting:
	case record.SnapshotFailed:
		if s.m.life.cfg.NoSweep != "" || !s.orphaned(snap) && !isDue(s.m.life.cfg.kept(snap.Changed)) {
			return nil
		}
	default:
		if !s.orphaned(snap) {
			return nil
		}
	}
	unlock, ok := s.m.locks.TryLock(key)
	if !ok {
		return nil // the holder of the lock takes care of it
	}
	defer unlock()
	now, err := s.Get(ctx, snap.ID)
	if err != nil || now.State != snap.State {
		return nil //nolint:nilerr // it was finished since the list was made
	}
	start := time.Now()
	if now.State == record.SnapshotCreating {
		err = s.abandon(ctx, &now)
	}
	if err == nil && s.m.life.cfg.NoSweep == "" && (snap.State != record.SnapshotCreating || s.orphaned(&now)) {
		err = s.erase(ctx, &now)
	}
	s.m.life.cfg.Log.Info("recover: snapshot", "snapshot", now.ID, "state", string(now.State), "dur", time.Since(start), "err", err)
	if err != nil {
		return fmt.Errorf("recover snapshot %s, which is %s: %w", now.ID, now.State, err)
	}
	return nil
}

// orphaned reports whether a snapshot is a temporary one of another daemon. Those of this one their
// maker deletes.
func (s *Snapshots) orphaned(snap *record.Snapshot) bool {
	return snap.Temporary && snap.Created.Before(s.m.began)
}

// abandon ends a snapshot that is no longer being taken. Its source may still be frozen.
func (s *Snapshots) abandon(ctx context.Context, snap *record.Snapshot) error {
	r, ok, err := s.m.life.Store.Get(ctx, snap.Source)
	if err != nil {
		return err
	}
	if ok && r.State == record.Running {
		if err := s.thaw(ctx, r.ID); err != nil {
			return err
		}
	}
	if s.m.life.cfg.NoSweep != "" {
		return nil
	}
	return s.fail(ctx, snap, "sandboxd or the host stopped in the middle; take it again")
}

// releaseStray moves aside a snapshot on the pool that has no record.
func (s *Snapshots) releaseStray(ctx context.Context, id string) error {
	if why := s.m.life.cfg.NoSweep; why != "" {
		s.m.life.cfg.Log.Warn("a snapshot without a record is left alone", "snapshot", id, "reason", why)
		return nil
	}
	err := bounded(ctx, stepLimit, "snapshot:stray", func(ctx context.Context) error { return s.m.life.Frozen.MoveStraySnapshot(ctx, id) })
	s.m.life.cfg.Log.Info("recover: release stray", "snapshot", id, "err", err)
	if err != nil {
		return fmt.Errorf("release stray %s: %w", id, err)
	}
	return nil
}
