package sandbox

import (
	"context"
	"errors"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Turn is the place of a sandbox among those that are brought up. (admission)
type Turn interface {
	Came() <-chan struct{} // closed when it has come
	Done()                 // gives the place back, or up
}

// atOnce is the turn of who need not wait.
type atOnce struct{}

func (atOnce) Came() <-chan struct{} { return closedChan }
func (atOnce) Done()                 {}

// launch brings a sandbox up in the background when its turn has come. While it
// waits for that its lock is free: it can be renewed, labelled and deleted like
// any other. asker is the context of who asked.
// Preconditions: the intent is durable, the lock is taken, enter was called.
func (m *Manager) launch(asker context.Context, r record.Record, unlock func()) {
	if m.fetches(&r) {
		m.launchFetched(asker, r, unlock)
		return
	}
	var turn Turn = atOnce{}
	if m.life.cfg.Admit != nil {
		turn = m.life.cfg.Admit(asker, r.ID)
	}
	asker = context.WithoutCancel(asker)
	v := m.bear(r.ID)
	done := func() {
		turn.Done()
		close(v.ready)
		m.work.Done()
	}
	select {
	case <-turn.Came():
		go func() {
			defer done()
			defer unlock()
			m.provision(asker, v, &r)
		}()
	default:
		m.setWaits(v, true)
		unlock()
		go func() {
			defer done()
			m.launchLater(asker, v, &r, turn)
		}()
	}
}

// launchLater waits for a turn, and then for the lock. The time counts for none
// of the limits of a creation.
func (m *Manager) launchLater(asker context.Context, v *vita, r *record.Record, turn Turn) {
	start := time.Now()
	unlock, err := m.lockInTurn(v, turn)
	m.setWaits(v, false)
	v.steps = append(v.steps, Step{stepQueue, time.Since(start)})
	if err == nil {
		defer unlock()
		var fresh record.Record
		if fresh, err = m.find(v.creation, r.ID); err == nil { // renewed and labelled, perhaps
			m.provision(asker, v, &fresh)
			return
		}
	}
	if cause := context.Cause(v.creation); cause != nil {
		err = cause
	}
	// Nothing of it is there. Whoever deletes it goes on; in any other case the
	// sweep, or the next daemon, ends it.
	m.life.log(asker, opOf(r), r, time.Now(), v.steps, err)
}

func (m *Manager) lockInTurn(v *vita, turn Turn) (unlock func(), err error) {
	select {
	case <-turn.Came():
		return m.locks.Lock(v.creation, v.id)
	case <-v.creation.Done():
		return nil, context.Cause(v.creation)
	}
}

func (m *Manager) setWaits(v *vita, waits bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v.waits = waits
	if waits && m.closed { // Close has looked already
		v.abort(errClosing)
	}
}

// waits reports whether a sandbox waits for its turn: then nobody has its lock,
// and yet it is not dead.
func (m *Manager) waits(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	v := m.lives[id]
	return v != nil && v.waits
}

// stepQueue is the step of a creation that had to wait for its turn.
const stepQueue = "queue"

// provision brings a sandbox to Running, or to its end.
func (m *Manager) provision(asker context.Context, v *vita, r *record.Record) {
	limit := m.life.cfg.StartLimit + createSlack
	if r.Spec.Snapshot != "" || len(r.Spec.Volumes) > 0 {
		limit += takeLimit
	}
	ctx, cancel := context.WithTimeoutCause(v.creation, limit, errTooLong)
	defer cancel()
	start, op := time.Now(), opOf(r)
	steps, err := m.life.start(ctx, r)
	v.steps = append(v.steps, steps...)
	cause := context.Cause(ctx)
	switch {
	case err == nil:
		m.watch(v, r.Spec.Runtime)
	case errors.Is(cause, errDeleted), errors.Is(cause, errClosing):
		err = cause // whoever cancelled erases it, or the next daemon ends it
	default:
		err = errors.Join(err, m.life.fail(ctx, r, err))
		m.bury(v.id, errEnded)
	}
	m.life.log(asker, op, r, start, v.steps, err)
}

// opOf is the operation that begins with a record like r.
func opOf(r *record.Record) string {
	if r.State == record.Starting {
		return opStart
	}
	return opCreate
}
