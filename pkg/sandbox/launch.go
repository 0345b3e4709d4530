package sandbox

import (
	"context"
	"errors"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
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
	leave := m.stock.enter()
	done := func() {
		leave()
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

// A Fetch brings the image of r to this host, or waits for it. Each call of progress
// becomes an event. asker has the values of the context of the request, and ends with
// the creation. Package image implements Fetch; the Manager knows only that it takes
// long.
type Fetch func(asker context.Context, r *record.Record, progress func(text string)) (record.Image, error)

// stepImage is the step of a creation whose image was not on this host.
const stepImage = "image"

// fetches reports whether the image of a sandbox is not on this host yet.
func (m launcher) fetches(r *record.Record) bool {
	return m.life.cfg.Fetch != nil && r.State == record.Creating && r.Spec.Away()
}

// launchFetched is launch for a sandbox whose image is not on this host yet. During the
// fetch it is treated as if it waited for its turn. It takes its turn only afterwards:
// a slow registry delays no other sandbox.
// Preconditions: those of launch.
func (m launcher) launchFetched(asker context.Context, r record.Record, unlock func()) {
	h := m.tracker.add(m.ctx, r.ID)
	m.tracker.setQueued(h, true)
	unlock()
	go func() {
		defer m.tracker.end()
		defer close(h.settled)
		if !m.fetch(asker, h, &r) {
			return
		}
		defer m.stock.enter()()
		var turn Turn = atOnce{}
		if m.life.cfg.Admit != nil {
			turn = m.life.cfg.Admit(asker, r.ID)
		}
		defer turn.Done()
		m.launchLater(context.WithoutCancel(asker), h, &r, turn)
	}()
}

// fetch makes the image of a sandbox durable in its record, or ends the sandbox.
func (m launcher) fetch(asker context.Context, h *handle, r *record.Record) bool {
	start := time.Now()
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(asker))
	defer cancel(nil)
	defer context.AfterFunc(h.creation, func() { cancel(context.Cause(h.creation)) })()
	image, err := m.life.cfg.Fetch(ctx, r, func(text string) {
		if h.creation.Err() == nil {
			now := *r
			now.Message = text
			m.life.bus.publish(EventPulling, &now)
		}
	})
	h.steps = append(h.steps, Step{stepImage, time.Since(start)})
	unlock, lerr := m.locks.Lock(h.creation, h.id)
	if lerr != nil { // it is being deleted, or the daemon stops: see launchLater
		m.life.log(ctx, opCreate, r, start, h.steps, lerr)
		return false
	}
	defer unlock()
	fresh, ferr := m.find(h.creation, h.id) // it may have been renewed or relabelled
	if ferr == nil && err == nil {
		whole := fresh
		if whole.Spec.TakeImage(image) {
			err = m.life.put(ctx, whole)
		} else {
			err = errs.New(errs.Invalid, "image %s "+record.NoCommand, image.Ref())
		}
	}
	if err == nil && ferr == nil {
		return true
	}
	if cause := context.Cause(h.creation); cause != nil {
		m.life.log(ctx, opCreate, r, start, h.steps, cause)
		return false
	}
	m.tracker.setQueued(h, false)
	if ferr != nil { // the sweep ends it
		m.tracker.remove(h.id, errEnded)
		m.life.log(ctx, opCreate, r, start, h.steps, errors.Join(err, ferr))
		return false
	}
	m.fetchFailed(ctx, h, &fresh, start, &stepError{stepImage, err})
	return false
}

// fetchFailed ends a sandbox that has no image.
func (m launcher) fetchFailed(ctx context.Context, h *handle, r *record.Record, start time.Time, err error) {
	ctx = context.WithoutCancel(ctx)
	if _, ferr := m.life.fail(ctx, r, err); ferr != nil {
		m.life.cfg.Log.Error("cannot end a sandbox whose image was not pulled; the sweep tries again", "sandbox", r.ID, "err", ferr)
	}
	m.tracker.remove(h.id, errEnded)
	m.life.log(ctx, opCreate, r, start, h.steps, err)
}
