package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
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
	h.steps = append(h.steps, table.Step{Name: stepQueue, Took: time.Since(start)})
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
	ctx, cancel := context.WithTimeoutCause(h.creation, limit, table.ErrTooLong)
	defer cancel()
	start, op, was := time.Now(), opOf(r), *r
	steps, err := m.life.start(ctx, r)
	h.steps = append(h.steps, steps...)
	cause := context.Cause(ctx)
	switch {
	case err == nil:
		waited(m.stock, &was, r)
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
			m.life.bus.Publish(events.Pulling, &now)
		}
	})
	h.steps = append(h.steps, table.Step{Name: stepImage, Took: time.Since(start)})
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
	m.fetchFailed(ctx, h, &fresh, start, &table.StepError{Name: stepImage, Err: err})
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

// errMemberDead is why a member cannot be claimed whose processes ended.
var errMemberDead = errors.New("the member of the pool is dead")

// claim makes the member that r took the sandbox r. If the member turns out to be of no use
// before its agent is adopted, claim releases it, and brings r up cold, with the same ID.
// Afterwards something of r may have run, so it fails like any other creation.
func claim(ctx context.Context, l *life, r *record.Record) ([]table.Step, error) {
	start, why := time.Now(), ""
	if r.Spec.Inspect { // its policy by name wants that, as the store has found
		why = "inspected requests need an authority that is mounted before the start"
	} else {
		steps, err := table.Acquire(ctx, l.rows, r)
		failed, ok := errors.AsType[*table.StepError](err)
		if err == nil || ctx.Err() != nil || !ok || slices.Contains([]string{"agent", "ports", "cpu"}, failed.Name) {
			return steps, err
		}
		l.cfg.Log.Warn("a member of a pool could not be claimed; its sandbox comes up cold", "sandbox", r.ID, "pool", r.Pool.Name,
			"err", err)
		why = "the member could not be used" + clientText(err)
	}
	if err := l.kill(ctx, r.ID, killLimit); err != nil {
		return nil, err
	}
	if _, err := table.Release(context.WithoutCancel(ctx), l.rows, r); err != nil {
		return nil, err
	}
	if err := l.gone(ctx, r.ID); err != nil {
		return nil, err
	}
	if l.onColdClaim != nil {
		l.onColdClaim(r.Pool.Name)
	}
	r.Prepared, r.MemberToken, r.Pool = false, "", record.PoolUse{Name: r.Spec.Pool, Miss: why}
	if r.Spec.Pool == "" {
		r.Pool = record.PoolUse{}
	}
	cold := table.Step{Name: stepPool, Took: time.Since(start)}
	steps, err := table.Acquire(ctx, l.rows, r)
	return append([]table.Step{cold}, steps...), err
}

// stepPool is the step of a creation whose member could not be used.
const stepPool = "pool"

// claimable adds to the rows how each is claimed. All but the published ports come up with a
// member.
func claimable(d Deps, rows []table.Row) []table.Row {
	claims := map[string]func(context.Context, *record.Record) error{
		"rootfs": whole, "volumes": whole, "trust": whole, // a member that has one, or none, is taken for such a sandbox only
		"cgroup": func(ctx context.Context, r *record.Record) error {
			alive, err := d.Cgroups.Populated(r.ID)
			if err == nil && !alive {
				err = errMemberDead
			}
			if err != nil {
				return err
			}
			return d.Cgroups.Limit(ctx, r.ID, cgroupLimits(d, r)) // what a claim needs of the CPU is little
		},
		"bundle": func(ctx context.Context, r *record.Record) error {
			return renamed(r, func() error { return d.Bundles.Rename(ctx, r) })
		},
		"runtime": func(ctx context.Context, r *record.Record) error {
			return renamed(r, func() error { return renameRuntime(ctx, d, r) })
		},
		"agent": func(ctx context.Context, r *record.Record) error { return awaitAgent(ctx, d, r, adoptMember(d)) },
	}
	for i, row := range rows {
		switch {
		case row.Name == "ports":
		case claims[row.Name] != nil:
			rows[i].Claim = claims[row.Name]
		case row.Fit != nil:
			rows[i].Claim = row.Fit
		default: // up also replaces what is there
			rows[i].Claim = row.Up
		}
	}
	return rows
}

// whole claims a row that needs nothing.
func whole(context.Context, *record.Record) error { return nil }

// renamed calls rename unless the guest of a member has the right hostname.
func renamed(r *record.Record, rename func() error) error {
	if r.Hostname() == r.ID {
		return nil
	}
	return rename()
}

func renameRuntime(ctx context.Context, d Deps, r *record.Record) error {
	if rename := d.Runtimes[r.Spec.Runtime].Rename; rename != nil {
		return rename(ctx, r.ID, r.Hostname())
	}
	return fmt.Errorf("%s cannot rename a guest", r.Spec.Runtime)
}

func adoptMember(d Deps) func(context.Context, *record.Record) error {
	return func(ctx context.Context, r *record.Record) error { return d.Agents.Adopt(ctx, r, r.MemberToken, false) }
}
