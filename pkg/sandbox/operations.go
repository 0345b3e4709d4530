package sandbox

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

func newToken() string { return rand.Text() }

// with runs f on the current record of a sandbox, under its lock. The wait for the lock
// ends with ctx; f must not.
func (m *Manager) with(ctx context.Context, op, idOrName string, f func(*record.Record) error) (record.Record, error) {
	if !m.tracker.begin() {
		return record.Record{}, errClosing
	}
	defer m.tracker.end()
	r, err := m.Get(ctx, idOrName)
	if err != nil {
		return r, err
	}
	unlock, err := m.locks.Lock(ctx, r.ID)
	if err != nil {
		return r, busy(op, r.ID, err)
	}
	defer unlock()
	if r, err = m.Get(ctx, r.ID); err != nil {
		return r, err
	}
	if err := f(&r); err != nil {
		return r, fmt.Errorf("%s %s: %w", op, r.ID, err)
	}
	return r, nil
}

// Pause freezes all processes of a sandbox. Its timeout runs on. One that is asleep stays paused
// until a client resumes it.
func (m *Manager) Pause(ctx context.Context, idOrName string) error {
	return m.shift(ctx, opPause, idOrName, record.Running, m.life.pause)
}

// Resume lets the processes of a paused sandbox go on, and brings back a hibernated one.
func (m *Manager) Resume(ctx context.Context, idOrName string) error {
	return m.shift(ctx, opResume, idOrName, record.Paused, m.life.resume)
}

// shift is an operation that needs a sandbox in one state. It does not wait for a
// creation in progress.
func (m *Manager) shift(ctx context.Context, op, idOrName string, from record.State, f func(context.Context, *record.Record) error) error {
	r, err := m.Get(ctx, idOrName)
	if err != nil {
		return err
	}
	if r.State.Beginning() {
		return wrongState(&r, from)
	}
	start := time.Now()
	_, err = m.with(ctx, op, r.ID, func(r *record.Record) error {
		if op == opPause && r.State == record.Paused && r.Asleep() {
			return m.amend(ctx, r, string(record.Paused), awake) // now it is the client's pause
		}
		if op == opResume && r.State == record.Hibernated {
			return hibernator{m}.wake(ctx, r)
		}
		if r.State != from {
			return wrongState(r, from)
		}
		err := f(ctx, r)
		m.life.log(ctx, op, r, start, nil, err)
		return err
	})
	return err
}

// Stop ends a sandbox that runs, is paused or hibernates and keeps it, stopped, until it expires or
// is deleted. Its entrypoint gets its stop signal and has grace to end; then all processes are
// killed. A sandbox that waits for its restart stays ended, and is not restarted. See
// Start.
func (m *Manager) Stop(ctx context.Context, idOrName string, grace time.Duration) error {
	r, err := m.Get(ctx, idOrName)
	if err == nil && r.State.Beginning() { // not waited for
		err = wrongState(&r, record.Running)
	}
	if err != nil {
		return err
	}
	m.snapshots.hurry(r.ID, errStopped)
	return m.stop(ctx, opStop, r.ID, grace, stopped, func(r *record.Record) error {
		switch r.State {
		case record.Running, record.Paused, record.Hibernated:
			return nil
		}
		return wrongState(r, record.Running)
	})
}

// stop ends a sandbox as d, if may allows it under the lock.
func (m *Manager) stop(ctx context.Context, op, id string, grace time.Duration, d death, may func(*record.Record) error) error {
	start := time.Now()
	_, err := m.with(ctx, op, id, func(r *record.Record) error {
		if r.Restarting() && d.reason == record.Stopped {
			return m.amend(ctx, r, string(record.Ended), func(r *record.Record) { r.Reason, r.Message = d.reason, d.message })
		}
		if err := may(r); err != nil {
			return err
		}
		return m.stopLocked(ctx, op, r, start, grace, d)
	})
	return err
}

// stopLocked is stop for a caller that has the lock and has checked may.
func (m *Manager) stopLocked(ctx context.Context, op string, r *record.Record, start time.Time, grace time.Duration, d death) error {
	hurry := context.Background()
	if h := m.tracker.get(r.ID); h != nil {
		hurry = h.creation
	}
	err := m.life.stop(ctx, r, d, grace, hurry, func() { m.tracker.remove(r.ID, errEnded) })
	m.life.log(ctx, op, r, start, nil, err)
	return err
}

// Renew changes when a sandbox expires, which must be in the future. For a sandbox that
// never expires it fails with errs.WrongState.
func (m *Manager) Renew(ctx context.Context, idOrName string, expires time.Time) (record.Record, error) {
	return m.with(ctx, "renew", idOrName, func(r *record.Record) error {
		switch {
		case r.Expires.IsZero():
			return errs.Wire(errs.New(errs.WrongState, "sandbox %s has no timeout: it stays until it is deleted, and there is nothing "+
				"to renew", r.ID), "DOCKER::INVALID_EXPIRATION")
		case !expires.After(now()):
			return errs.Wire(errs.New(errs.Invalid, "expiresAt %s is not in the future", expires.UTC().Format(time.RFC3339)),
				"DOCKER::INVALID_EXPIRATION")
		}
		return m.amend(ctx, r, events.Renewed, func(r *record.Record) { r.Expires = expires.Round(0).UTC() })
	})
}

// Relabel changes what a sandbox is found by. It gives it another name, unless that is
// empty, sets the labels given and removes those that are nil (RFC 7396). It fails with
// errs.Exists if another sandbox has the name.
func (m *Manager) Relabel(ctx context.Context, idOrName, name string, patch map[string]*string) (record.Record, error) {
	if err := checkName(name); err != nil {
		return record.Record{}, err
	}
	event := events.Labels
	if name != "" {
		event = events.Renamed
	}
	return m.with(ctx, "label", idOrName, func(r *record.Record) error {
		labels := maps.Clone(r.Spec.Labels) // records are shared: never written into
		if labels == nil {
			labels = map[string]string{}
		}
		for k, v := range patch {
			if v == nil {
				delete(labels, k)
			} else {
				labels[k] = *v
			}
		}
		return m.amend(ctx, r, event, func(r *record.Record) {
			r.Spec.Name, r.Spec.Labels = cmp.Or(name, r.Spec.Name), labels
		})
	})
}

// Promote puts a copy in the place of the sandbox that it is a copy of: the two trade their names
// and the times at which they expire. Neither may have one. IDs and addresses stay, and host
// names until the next start. Without that sandbox, or for one that is no copy, Promote fails
// with errs.WrongState.
func Promote(ctx context.Context, m *Manager, idOrName string) (record.Record, error) {
	return m.with(ctx, "promote", idOrName, func(r *record.Record) error {
		if r.Spec.Fork.ID == "" {
			return errs.New(errs.WrongState, "sandbox %s is no copy of another one (`sandboxctl tree` shows the copies); to give it a "+
				"name, use `sandboxctl rename`", r.ID)
		}
		// A source is older than its copies, so nobody locks a sandbox and then a copy of it.
		unlock, err := m.locks.Lock(ctx, r.Spec.Fork.Source)
		if err != nil {
			return busy("promote", r.Spec.Fork.Source, err)
		}
		defer unlock()
		source, err := m.Get(ctx, r.Spec.Fork.Source)
		if errs.Is(err, errs.NotFound) {
			return errs.New(errs.WrongState, "the sandbox that %s is a copy of, %s, is gone, and its name is free; use `sandboxctl "+
				"rename` and `sandboxctl renew`", r.ID, r.Spec.Fork.Source)
		}
		if err != nil {
			return err
		}
		now := *r
		now.Spec.Name, source.Spec.Name = source.Spec.Name, now.Spec.Name
		now.Expires, source.Expires = source.Expires, now.Expires
		err = bounded(ctx, storeLimit, "store:trade", func(ctx context.Context) error { return m.life.Store.Put(ctx, source, now) })
		if err != nil {
			return err
		}
		*r = now
		for _, r := range []*record.Record{&source, r} {
			m.life.bus.Publish(events.Renamed, r)
			m.life.bus.Publish(events.Renewed, r)
		}
		return nil
	})
}

// amend makes a change durable that is no transition.
func (m *Manager) amend(ctx context.Context, r *record.Record, event string, change func(*record.Record)) error {
	n := *r
	change(&n)
	if err := m.life.put(ctx, n); err != nil {
		return err
	}
	*r = n
	m.life.bus.Publish(event, r)
	return nil
}

// Delete ends a sandbox and returns when its processes are dead and its ID is unknown.
// The rest of it on the host goes within a second, and only then may its address have
// another owner. If the kernel needs longer than eraseLimit to end the killed processes,
// Delete returns before they are dead, and the rest goes when they are. A creation in
// progress is cut short. Deletions of one sandbox at the same time all succeed. If the
// kill failed, Delete can be tried again, by ID.
//
// A record that cannot be read is deleted too, by its ID, with all that its sandbox
// holds. Nothing else ever removes these.
func (m *Manager) Delete(ctx context.Context, idOrName string) error {
	return m.remove(ctx, opDelete, idOrName, func(*record.Record) bool { return true })
}

// Remove is Delete for a sandbox that has ended, also if it waits for its restart. For one that has
// not ended it fails with errs.WrongState and does nothing, not even to its creation.
func Remove(ctx context.Context, m *Manager, idOrName string) error {
	var refused atomic.Pointer[record.Record]
	err := m.remove(ctx, opDelete, idOrName, func(r *record.Record) bool {
		// A deletion that is under way is joined; without a state, the record cannot be read.
		ok := r.State == record.Ended || r.State == record.Deleting || r.State == ""
		if !ok {
			refused.Store(r)
		}
		return ok
	})
	if r := refused.Load(); err == nil && r != nil {
		return errs.New(errs.WrongState, "sandbox %s is %s, and its processes and what it has in memory would be lost; stop it first "+
			"(`sandboxctl stop %s`), or remove it all the same (`sandboxctl rm -f %[1]s`)", r.ID, r.State, r.ID)
	}
	return err
}

// Expire is Delete for a sandbox whose Deadline has passed. It does nothing before the
// Deadline, and nothing while Config.NoSweep is set.
func (m *Manager) Expire(ctx context.Context, id string) error {
	if m.life.cfg.NoSweep != "" {
		return nil
	}
	err := m.remove(ctx, opExpire, id, func(r *record.Record) bool { return isDue(m.life.due(r)) })
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	return err
}

// DeleteEnded is Manager.Delete for a sandbox that has ended and waits for no restart. It does
// nothing to others, and reports whether it deleted the sandbox. While Config.NoSweep is set
// it fails: what the records call ended may run.
func DeleteEnded(ctx context.Context, m *Manager, id string) (bool, error) {
	if why := m.life.cfg.NoSweep; why != "" {
		return false, errs.New(errs.WrongState, "nothing is pruned, because this host removes only what is named: %s", why)
	}
	var ended atomic.Bool
	err := m.remove(ctx, opDelete, id, func(r *record.Record) bool {
		ended.Store(r.State == record.Ended && !r.Restarting())
		return ended.Load()
	})
	if errs.Is(err, errs.NotFound) {
		return false, nil
	}
	return ended.Load() && err == nil, err
}

// remove erases a sandbox if want agrees, also under its lock.
func (m *Manager) remove(ctx context.Context, op, idOrName string, want func(*record.Record) bool) error {
	r, err := m.findRemains(ctx, idOrName)
	if err != nil || !want(&r) {
		return err
	}
	if r.State == record.Deleting {
		// Clients no longer see it, but only once its processes are gone, or killed and
		// lingering.
		if alive, err := m.life.Cgroups.Populated(r.ID); err == nil && !alive || m.life.lingers.has(r.ID) {
			return notFound(idOrName)
		}
	}
	if !m.tracker.begin() {
		return errClosing
	}
	if h := m.tracker.get(r.ID); h != nil && !live(r.State) {
		h.abort(errDeleted)
	}
	m.snapshots.hurry(r.ID, errDeleted)
	dead := make(chan error, 2) // there may be no reader for either
	go func() {
		defer m.tracker.end()
		dead <- m.removeLocked(context.WithoutCancel(ctx), op, r.ID, want, func() { dead <- nil })
	}()
	select {
	case err := <-dead:
		if err != nil {
			return fmt.Errorf("%s %s: %w", op, r.ID, err)
		}
		return nil
	case <-ctx.Done(): // the deletion goes on
		return context.Cause(ctx)
	}
}

// removeLocked waits for the lock and erases. It calls dead at most once.
func (m *Manager) removeLocked(ctx context.Context, op, id string, want func(*record.Record) bool, dead func()) error {
	start := time.Now()
	unlock, err := m.locks.Lock(m.ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	r, err := m.findRemains(ctx, id)
	if errs.Is(err, errs.NotFound) {
		return nil // another deletion was first
	}
	if err != nil || !want(&r) {
		return err
	}
	steps, err := m.erase(ctx, &r, dead)
	if r.State == record.Deleting && errors.Is(err, ErrLingering) {
		err = nil // it is deleted as far as it can be
	}
	m.life.log(ctx, op, &r, start, steps, err)
	return err
}

// findRemains is find for deletions. If the record cannot be read it returns the ID
// alone, which is all that a teardown needs.
func (m *Manager) findRemains(ctx context.Context, idOrName string) (record.Record, error) {
	r, err := m.find(ctx, idOrName)
	if !errs.Is(err, errs.NotFound) {
		return r, err
	}
	bad, berr := m.life.Store.Unreadable(ctx)
	if berr != nil {
		return r, fmt.Errorf("get sandbox %q: %w", idOrName, berr)
	}
	if slices.Contains(bad, idOrName) {
		return record.Record{ID: idOrName}, nil
	}
	return r, err
}

// erase is life.erase for a sandbox that may be watched and streamed into.
func (m *Manager) erase(ctx context.Context, r *record.Record, dead func()) ([]table.Step, error) {
	told := r.State == record.Deleting && m.life.lingers.has(r.ID)
	if r.State != "" { // else it is unreadable, and cannot be written
		if err := m.life.condemn(ctx, r); err != nil {
			return nil, err
		}
	}
	m.tracker.remove(r.ID, errDeleted)
	m.life.past.forget(r.ID)
	m.life.refusals.forget(r.ID)
	return m.life.erase(ctx, r, func() {
		if !told {
			m.life.bus.Publish(events.Deleted, r)
		}
		dead()
	})
}
