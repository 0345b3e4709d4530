package sandbox

import (
	"context"
	"errors"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Turn is the place of a sandbox in the queue of those to be brought up. (admission)
type Turn interface {
	Came() <-chan struct{} // closed when the turn has come
	Done()                 // gives the place back, before or after the turn has come
}

// atOnce is the Turn of a sandbox that need not wait.
type atOnce struct{}

func (atOnce) Came() <-chan struct{} { return closedChan }
func (atOnce) Done()                 {}

// A launcher is a Manager while it brings sandboxes up. (The launcher of pkg/oci/launch
// is another: it starts runc's processes.)
type launcher struct{ *Manager }

// launch brings a sandbox up in the background when its turn has come. While it waits
// for its turn its lock is free: it can be renewed, labelled and deleted like any
// other. asker is the context of the request.
// Preconditions: the intent is durable, the lock is taken, tracker.begin was called.
func (m launcher) launch(asker context.Context, r record.Record, unlock func()) {
	if m.fetches(&r) {
		m.launchFetched(asker, r, unlock)
		return
	}
	var turn Turn = atOnce{}
	if m.life.cfg.Admit != nil {
		turn = m.life.cfg.Admit(asker, r.ID)
	}
	asker = context.WithoutCancel(asker)
	h := m.tracker.add(m.ctx, r.ID)
	done := func() {
		turn.Done()
		close(h.settled)
		m.tracker.end()
	}
	select {
	case <-turn.Came():
		go func() {
			defer done()
			defer unlock()
			m.provision(asker, h, &r)
		}()
	default:
		m.tracker.setQueued(h, true)
		unlock()
		go func() {
			defer done()
			m.launchLater(asker, h, &r, turn)
		}()
	}
}

// launchLater waits for a turn, and then for the lock. This time counts against no
// limit of a creation.
func (m launcher) launchLater(asker context.Context, h *handle, r *record.Record, turn Turn) {
	start := time.Now()
	unlock, err := m.lockInTurn(h, turn)
	m.tracker.setQueued(h, false)
	h.steps = append(h.steps, Step{stepQueue, time.Since(start)})
	if err == nil {
		defer unlock()
		var fresh record.Record
		if fresh, err = m.find(h.creation, r.ID); err == nil { // it may have been renewed or relabelled
			m.provision(asker, h, &fresh)
			return
		}
	}
	if cause := context.Cause(h.creation); cause != nil {
		err = cause
	}
	// It has no resources yet. A deletion that cancelled it goes on; in any other case
	// the sweep, or the next daemon, ends it.
	m.life.log(asker, opOf(r), r, time.Now(), h.steps, err)
}

func (m launcher) lockInTurn(h *handle, turn Turn) (unlock func(), err error) {
	select {
	case <-turn.Came():
		return m.locks.Lock(h.creation, h.id)
	case <-h.creation.Done():
		return nil, context.Cause(h.creation)
	}
}

// stepQueue is the step of a creation that had to wait for its turn.
const stepQueue = "queue"

// provision brings a sandbox to Running, or to its end.
func (m launcher) provision(asker context.Context, h *handle, r *record.Record) {
	limit := m.life.cfg.StartLimit + createSlack
	if r.Spec.Snapshot != "" || len(r.Spec.Volumes) > 0 {
		limit += takeLimit
	}
	ctx, cancel := context.WithTimeoutCause(h.creation, limit, errTooLong)
	defer cancel()
	start, op := time.Now(), opOf(r)
	steps, err := m.life.start(ctx, r)
	h.steps = append(h.steps, steps...)
	cause := context.Cause(ctx)
	switch {
	case err == nil:
		m.watch(h, r.Spec.Runtime)
	case errors.Is(cause, errDeleted), errors.Is(cause, errClosing):
		err = cause // the deletion that cancelled it erases it, or the next daemon ends it
	default:
		ran, ferr := m.life.fail(ctx, r, err)
		if ran {
			err = nil
		}
		err = errors.Join(err, ferr)
		m.tracker.remove(h.id, errEnded)
	}
	m.life.log(asker, op, r, start, h.steps, err)
}

// opOf is the operation that brings up a sandbox with the record r.
func opOf(r *record.Record) string {
	if r.State == record.Starting {
		return opStart
	}
	return opCreate
}
