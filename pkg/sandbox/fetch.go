package sandbox

import (
	"context"
	"errors"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

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
