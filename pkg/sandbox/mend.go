package sandbox

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A loss says what happens to a live sandbox that no longer holds a row, because
// somebody removed it on the host.
type loss int

const (
	harmless loss = iota // the running processes have a hold of their own on it
	mendable             // up brings it back
	fatal                // nothing brings it back while the processes run
)

// lostLink is the loss of r if its link is gone.
func lostLink(d Deps, r *record.Record) loss {
	if d.Runtimes[r.Spec.Runtime].HoldsLink {
		return fatal
	}
	return mendable
}

// reconcileOne compares one sandbox, which was reported to have lost something, with
// its record. Unlike reconcile it waits for the lock.
func (m recovery) reconcileOne(ctx context.Context, id string) error {
	if r, ok, err := m.life.Store.Get(ctx, id); err != nil || !ok || !live(r.State) && r.State != record.Prepared {
		return err // a sandbox that ends loses everything
	}
	unlock, err := m.locks.Lock(ctx, id)
	if err != nil {
		return busy("inspect", id, err)
	}
	defer unlock()
	return m.reconcileLocked(ctx, id, nil)
}

// mend finds the rows that r, which lives, no longer holds, and brings back those it
// can. If the sandbox cannot go on without the others, dead is true and d says why.
// kinds are the rows that were held a moment ago.
func (m recovery) mend(ctx context.Context, r *record.Record, kinds []string) (d death, dead bool, err error) {
	for _, row := range m.life.rows {
		if row.held == nil || !row.wants(r) || row.name == "egress" && m.tracker.unregistered(r.ID) { // adopt has just tried
			continue
		}
		held, whole, err := m.has(ctx, row, r, slices.Contains(kinds, row.name))
		if err != nil {
			return death{}, false, fmt.Errorf("check its %s: %w", row.name, err)
		}
		if whole || !m.tracker.setLost(r.ID, row.name) {
			continue
		}
		what, up := harmless, row.up
		switch {
		case held && row.rejoin != nil:
			what, up = mendable, row.rejoin
		case row.lost != nil:
			what = row.lost(r)
		}
		log := m.life.cfg.Log.With("sandbox", r.ID, "lost", row.name)
		switch {
		case what == mendable:
			start := time.Now()
			_, err := step(context.WithoutCancel(ctx), "up:", row, up, r)
			m.tracker.setFound(r.ID, row.name)
			if err != nil {
				return death{}, false, fmt.Errorf("restore a resource that was removed on the host: %w", err)
			}
			log.Warn("something on the host removed a resource of a sandbox; it was restored", "dur", time.Since(start))
		case what == fatal && m.life.cfg.NoSweep == "":
			log.Error("something on the host removed a resource of a sandbox; it cannot be restored, so the sandbox is ended")
			return death{
				reason: record.RuntimeCrash,
				message: fmt.Sprintf("something on the host other than sandboxd removed its %s, and it cannot run without it; "+
					"create it again", row.name),
			}, true, nil
		default:
			log.Warn("something on the host removed a resource of a sandbox; the sandbox keeps running without it")
		}
	}
	return death{}, false, nil
}

// has reports whether r, which is locked, holds anything of a row, and all of it. had
// says whether the row was listed; a row that was being made then may be missing from
// the list.
func (m recovery) has(ctx context.Context, row resource, r *record.Record, had bool) (held, whole bool, err error) {
	if !had {
		ids, err := m.list(ctx, row)
		if err != nil || !slices.Contains(ids, r.ID) {
			return false, false, err
		}
	}
	if row.whole == nil {
		return true, true, nil
	}
	ctx, cancel := context.WithTimeout(ctx, row.limit)
	defer cancel()
	whole, err = row.whole(ctx, r)
	return true, whole, err
}
