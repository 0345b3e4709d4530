package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Keeper is a Manager with what nobody asks for: it applies the policies of
// sandboxes. (pkg/health)
type Keeper struct{ *Manager }

// recycleGrace is what the entrypoint of an unhealthy sandbox has to end by
// itself: less than one that is stopped, which could still listen.
const recycleGrace = 5 * time.Second

// Restart starts a sandbox that has ended, if its policy wants that still, and
// returns when it runs or has failed. It calls begun, once that it begins is
// durable. While Config.NoSweep holds it refuses: what
// the host holds and the store does not know may have its slot.
func (k Keeper) Restart(ctx context.Context, id string, begun func()) error {
	if why := k.life.cfg.NoSweep; why != "" {
		return errs.New(errs.Unavailable, "restart %s: nothing is started by itself here: %s", id, why)
	}
	was, err := k.Get(ctx, id)
	if err == nil {
		_, err = k.startAgain(ctx, id, false)
	}
	if errs.Is(err, errs.NotFound) || errs.Is(err, errs.WrongState) {
		return nil // somebody was faster
	}
	if err != nil {
		return err
	}
	begun()
	r, err := k.Await(ctx, id)
	if err != nil || r.State != record.Running {
		return nil //nolint:nilerr // deleted, or ended again: who watches it sees that
	}
	r.Reason, r.Message = was.Reason, fmt.Sprintf("restart %d: %s", r.Restarts, was.Message)
	k.life.bus.publish(EventRestart, &r)
	return nil
}

// Recycle ends the sandbox that was as it was and is unhealthy, if it still
// lives that life and its policy has it started again then. why is for people.
// It does nothing to one that somebody is at: what that is may be why it was
// found unhealthy.
func (k Keeper) Recycle(ctx context.Context, was record.Record, why string) error {
	start := time.Now()
	if !k.tracker.begin() {
		return errClosing
	}
	defer k.tracker.end()
	unlock, ok := k.locks.TryLock(was.ID)
	if !ok {
		return nil
	}
	defer unlock()
	r, err := k.Get(ctx, was.ID)
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	after := r
	after.State, after.Reason = record.Ended, record.Unhealthy
	if r.State != record.Running || !r.Started.Equal(was.Started) || !after.Restarting() {
		return nil // it ended otherwise
	}
	d := death{reason: record.Unhealthy, message: "it was unhealthy: " + why}
	if err := k.stopLocked(ctx, opRecycle, &r, start, recycleGrace, d); err != nil {
		return fmt.Errorf("%s %s: %w", opRecycle, r.ID, err)
	}
	return nil
}

// StandsStill reports whether a snapshot of a sandbox is being taken: it may run
// and answer nothing.
func (k Keeper) StandsStill(id string) bool {
	k.snapshots.mu.Lock()
	defer k.snapshots.mu.Unlock()
	return k.snapshots.going[id] != nil
}

// Announce tells whoever listens that the health of a sandbox has changed.
func (k Keeper) Announce(r record.Record, health, message string) {
	r.Reason, r.Message = record.Reason(health), message
	k.life.bus.publish(EventHealth, &r)
}
