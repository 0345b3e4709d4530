package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Keeper is a Manager with the operations that no client requests: it applies the
// policies of sandboxes. (pkg/health, pkg/idle)
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
	k.life.bus.Publish(events.Restart, &r)
	return nil
}

// Recycle ends an unhealthy sandbox so that its policy starts it again. was is its
// record from when it was found unhealthy: Recycle does nothing if that life is over, or
// if the policy would not start it again. why is for people. It does nothing either
// while another operation holds the sandbox, which may be why it was found unhealthy.
func (k Keeper) Recycle(ctx context.Context, was record.Record, why string) error {
	start := time.Now()
	may := func(r *record.Record) bool {
		after := *r
		after.State, after.Reason = record.Ended, record.Unhealthy
		return r.State == record.Running && r.Started.Equal(was.Started) && after.Restarting() // else it ended otherwise
	}
	_, err := k.apply(ctx, opRecycle, was.ID, may, func(ctx context.Context, r *record.Record) error {
		d := death{reason: record.Unhealthy, message: "it was unhealthy: " + why}
		return k.stopLocked(ctx, opRecycle, r, start, recycleGrace, d)
	})
	return err
}

// Overdrawn ends a sandbox that holds too much of the kernel's memory, at once. was is its record from
// when that was found: Overdrawn does nothing if that life is over. It does nothing either while another
// operation holds the sandbox. why is for people.
func (k Keeper) Overdrawn(ctx context.Context, was record.Record, why string) error {
	start := time.Now()
	may := func(r *record.Record) bool {
		return (r.State == record.Running || r.State == record.Paused) && r.Started.Equal(was.Started)
	}
	_, err := k.apply(ctx, opOverdrawn, was.ID, may, func(ctx context.Context, r *record.Record) error {
		return k.stopLocked(ctx, opOverdrawn, r, start, 0, death{reason: record.KernelMemory, message: why})
	})
	return err
}

// apply does f to a sandbox if may agrees while the sandbox is locked, and reports whether it did. It
// does nothing while another operation holds the sandbox.
func (k Keeper) apply(ctx context.Context, op, id string, may func(*record.Record) bool, f func(context.Context, *record.Record) error) (
	done bool, err error,
) {
	if !k.tracker.begin() {
		return false, errClosing
	}
	defer k.tracker.end()
	unlock, ok := k.locks.TryLock(id)
	if !ok {
		return false, nil
	}
	defer unlock()
	r, err := k.Get(ctx, id)
	if errs.Is(err, errs.NotFound) || err == nil && !may(&r) {
		return false, nil
	}
	if err == nil {
		err = f(ctx, &r)
	}
	if err != nil {
		return false, fmt.Errorf("%s %s: %w", op, id, err)
	}
	return true, nil
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
	k.life.bus.Publish(events.Health, &r)
}

// idleGrace is how long the entrypoint of a sandbox that its idle policy stops has to end by
// itself: as long as for a client's stop.
const idleGrace = 10 * time.Second

// Rest does to an idle sandbox what its policy says. was is its record from when it was found
// idle: Rest does nothing if that life is over, or if still is false, which it asks last and with
// the sandbox locked. It does nothing either while another operation holds the sandbox.
func (k Keeper) Rest(ctx context.Context, was record.Record, still func() bool) error {
	start := time.Now()
	may := func(r *record.Record) bool {
		return r.State == record.Running && r.Started.Equal(was.Started) && r.Spec.Idle == was.Spec.Idle && still()
	}
	why := "it was idle for " + was.Spec.Idle.For()
	if was.Spec.Idle.Action == record.IdleKill {
		return k.restForGood(ctx, was.ID, why, may)
	}
	op := map[record.IdleAction]string{record.IdleStop: opIdleStop, record.IdleHibernate: opIdleHibernate}[was.Spec.Idle.Action]
	_, err := k.apply(ctx, cmp.Or(op, opIdlePause), was.ID, may, func(ctx context.Context, r *record.Record) error {
		asleep := func(r *record.Record) { r.Reason, r.Message = record.ReasonIdle, why+"; the next use of it wakes it" }
		switch r.Spec.Idle.Action {
		case record.IdleStop:
			d := death{reason: record.Stopped, message: why + "; `sandboxctl start` runs it again"}
			return k.stopLocked(ctx, opIdleStop, r, start, idleGrace, d)
		case record.IdleHibernate:
			return hibernator(k).operate(ctx, opIdleHibernate, r, start, asleep)
		}
		err := k.life.pauseFor(ctx, r, asleep)
		k.life.log(ctx, opIdlePause, r, start, nil, err)
		return err
	})
	return err
}

// Calm pauses an idle sandbox before the time of its policy, whatever that would do, so that it writes
// nothing more; the next use wakes it. Apart from that it is as Rest. why is for people.
func (k Keeper) Calm(ctx context.Context, was record.Record, why string, still func() bool) error {
	start := time.Now()
	may := func(r *record.Record) bool {
		return r.State == record.Running && r.Started.Equal(was.Started) && r.Spec.Idle == was.Spec.Idle && still()
	}
	_, err := k.apply(ctx, opIdlePause, was.ID, may, func(ctx context.Context, r *record.Record) error {
		err := k.life.pauseFor(ctx, r, func(r *record.Record) {
			r.Reason, r.Message = record.ReasonIdle, why+"; the next use of it wakes it"
		})
		k.life.log(ctx, opIdlePause, r, start, nil, err)
		return err
	})
	return err
}

// restForGood deletes an idle sandbox, as Expire does.
func (k Keeper) restForGood(ctx context.Context, id, why string, may func(*record.Record) bool) error {
	if k.life.cfg.NoSweep != "" || k.StandsStill(id) { // a deletion would cut the snapshot short
		return nil
	}
	err := k.remove(ctx, opIdleKill, id, func(r *record.Record) bool {
		if !may(r) {
			return false
		}
		r.Reason, r.Message = record.ReasonIdle, why
		return true
	})
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	return err
}

// Wake resumes a sandbox that is asleep, and returns its newest record. It waits for the operation
// that holds the sandbox, as it may be the one that puts it to sleep. Any other sandbox stays as it
// is. Of many calls at once the first wakes it. Only the wait ends with ctx.
func (k Keeper) Wake(ctx context.Context, id string) (record.Record, error) {
	r, err := k.Get(ctx, id)
	if err != nil || r.State != record.Running && !r.Asleep() {
		return r, err
	}
	return k.with(ctx, opWake, id, func(r *record.Record) error { return k.wake(ctx, r) })
}

// wake wakes a sandbox that is asleep. The caller holds its lock.
func (k Keeper) wake(ctx context.Context, r *record.Record) error {
	start, was := time.Now(), *r
	switch {
	case !r.Asleep():
		return nil
	case r.State == record.Hibernated:
		return hibernator(k).wake(ctx, r)
	case r.State == record.Hibernating, r.State == record.Waking:
		return errs.New(errs.Unavailable, "it is between memory and disk, because a step of that failed; sandboxd tries again within a "+
			"minute")
	}
	var err error
	if r.State == record.Pausing { // neither the freeze nor the way back has succeeded
		err = k.life.thawTo(ctx, r)
	} else {
		err = k.life.resume(ctx, r)
	}
	k.life.log(ctx, opWake, r, start, nil, err)
	if err == nil {
		was.State, was.Message = r.State, fmt.Sprintf("it slept for %v", r.Changed.Sub(was.Changed).Round(time.Millisecond))
		k.life.bus.Publish(events.Woken, &was)
	}
	return err
}

// relieveLimit is how long a caller waits until the next sandbox hibernates, too, or it gives up. 2 GB
// took 9 s here. A sentry that its guest has taken over could take as long as a checkpoint may
// (takeLimit).
const relieveLimit = 10 * time.Second

// Relieve hibernates the sandbox that has been asleep in memory for the longest time, and reports
// whether one hibernates now. One that cannot is passed over. So is one that takes longer than
// relieveLimit: it goes on.
func (k Keeper) Relieve(ctx context.Context) bool {
	all, err := k.List(ctx)
	if err != nil {
		return false
	}
	asleep := func(r *record.Record) bool {
		return r.State == record.Paused && r.Asleep() && k.life.Runtimes[r.Spec.Runtime].Memory != nil
	}
	all = slices.DeleteFunc(slices.Clone(all), func(r *record.Record) bool { return !asleep(r) })
	slices.SortFunc(all, func(a, b *record.Record) int { return cmp.Or(a.Changed.Compare(b.Changed), cmp.Compare(a.ID, b.ID)) })
	done, going := make(chan bool, len(all)), 0
	for len(all) > 0 || going > 0 {
		if len(all) > 0 {
			id := all[0].ID
			all, going = all[1:], going+1
			go func() { done <- k.relieve(context.WithoutCancel(ctx), id, asleep) }()
		}
		select {
		case ok := <-done:
			if going--; ok {
				return true
			}
		case <-ctx.Done():
			return false
		case <-time.After(relieveLimit):
			k.life.cfg.Log.WarnContext(ctx, "sandboxes that are asleep take long to hibernate, to free memory", "count", going)
			if len(all) == 0 {
				return false
			}
		}
	}
	return false
}

// relieve hibernates a sandbox for Relieve if it is still asleep, and reports whether it did.
func (k Keeper) relieve(ctx context.Context, id string, asleep func(*record.Record) bool) bool {
	ok, err := k.apply(ctx, opRelieve, id, asleep, func(ctx context.Context, r *record.Record) error {
		why := r.Message + "; the host needed its memory"
		return hibernator(k).operate(ctx, opRelieve, r, time.Now(), func(r *record.Record) { r.Message = why })
	})
	if err != nil {
		k.life.cfg.Log.WarnContext(ctx, "cannot hibernate a sandbox that is asleep to free memory", "sandbox", id, "err", err)
	}
	return ok
}
