package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Keeper is a Manager with the operations that no client requests: it applies the
// policies of sandboxes. (pkg/health)
type Keeper struct{ *Manager }

// recycleGrace is how long the entrypoint of an unhealthy sandbox has to end by itself.
// It is shorter than for a stop, because an unhealthy entrypoint may not react.
const recycleGrace = 5 * time.Second

// Restart starts a sandbox that has ended, if its policy still wants that, and returns
// when it runs or has failed. It calls begun once the intent is durable. While
// Config.NoSweep is set it refuses: resources on the host that the store does not know
// may have its slot.
func (k Keeper) Restart(ctx context.Context, id string, begun func()) error {
	if why := k.life.cfg.NoSweep; why != "" {
		return errs.New(errs.Unavailable, "restart %s: automatic restarts are off on this host: %s", id, why)
	}
	was, err := k.Get(ctx, id)
	if err == nil {
		_, err = k.startAgain(ctx, id, false)
	}
	if errs.Is(err, errs.NotFound) || errs.Is(err, errs.WrongState) {
		return nil // another caller was faster
	}
	if err != nil {
		return err
	}
	begun()
	r, err := k.Await(ctx, id)
	if err != nil || r.State != record.Running {
		return nil //nolint:nilerr // deleted, or ended again: its observer sees that
	}
	r.Reason, r.Message = was.Reason, fmt.Sprintf("restart %d: %s", r.Restarts, was.Message)
	k.life.bus.publish(EventRestart, &r)
	return nil
}

// Recycle ends an unhealthy sandbox so that its policy starts it again. was is its
// record from when it was found unhealthy: Recycle does nothing if that life is over, or
// if the policy would not start it again. why is for people. It does nothing either
// while another operation holds the sandbox, which may be why it was found unhealthy.
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

// StandsStill reports whether a snapshot of a sandbox is being taken: then it may be
// Running and not answer.
func (k Keeper) StandsStill(id string) bool {
	k.snapshots.mu.Lock()
	defer k.snapshots.mu.Unlock()
	return k.snapshots.going[id] != nil
}

// Announce publishes that the health of a sandbox has changed.
func (k Keeper) Announce(r record.Record, health, message string) {
	r.Reason, r.Message = record.Reason(health), message
	k.life.bus.publish(EventHealth, &r)
}
