package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

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
	snap, err := s.Get(ctx, spec.Snapshot)
	switch {
	case err != nil:
	case snap.State != record.SnapshotReady:
		err = errs.Wire(errs.New(errs.WrongState, "snapshot %s is %s; a sandbox can only be created from a snapshot that is ready", snap.ID,
			snap.State),
			"SNAPSHOT::NOT_READY")
	case spec.DiskBytes > 0 && spec.DiskBytes < snap.Bytes:
		err = errs.Wire(errs.New(errs.Invalid, "snapshot %s holds %s, more than the requested disk of %s; request a larger disk (--disk)",
			snap.ID, record.Mebibytes(snap.Bytes), record.Mebibytes(spec.DiskBytes)), "SNAPSHOT::INVALID_RESTORE_CONFIG")
	}
	if err != nil {
		release()
		return nil, err
	}
	spec.Image = snap.Image
	return release, nil
}

// Delete removes a snapshot. It fails with errs.WrongState while the snapshot is being
// taken, or a sandbox is being made from it. A record that cannot be read is deleted
// too, by its ID.
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
// another daemon is deleted.
func (s *Snapshots) heal(ctx context.Context, snap *record.Snapshot) error {
	key := snap.ID
	switch snap.State {
	case record.SnapshotCreating:
		key = snap.Source // it is taken under that lock
	case record.SnapshotDeleting:
	case record.SnapshotFailed:
		if s.m.life.cfg.NoSweep != "" || !isDue(snap.Changed.Add(s.m.life.cfg.Retain)) {
			return nil
		}
	default:
		if !snap.Temporary || !snap.Created.Before(s.m.began) { // of this daemon: its maker deletes it
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
	} else if s.m.life.cfg.NoSweep == "" {
		err = s.erase(ctx, &now)
	}
	s.m.life.cfg.Log.Info("recover: snapshot", "snapshot", now.ID, "state", string(now.State), "dur", time.Since(start), "err", err)
	if err != nil {
		return fmt.Errorf("recover snapshot %s, which is %s: %w", now.ID, now.State, err)
	}
	return nil
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
