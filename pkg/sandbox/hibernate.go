package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// A hibernator is a Manager while it puts the memory of sandboxes on disk, and brings it back.
//
//	Running, Paused ─▶ hibernating: pause the guest, checkpoint, write all out ─┬─▶ Running again
//	                        │ Record.Hibernation is durable                     │ failed: resume
//	                        ▼
//	                   hibernating: kill, take the rows away ─▶ Hibernated ─▶ waking ─┬─▶ Running
//	                                                                ▲                 │
//	                                                                └─────────────────┘ failed before
//	                                                                                    the guest ran
//
// The guest never runs on after its image was made: so the image fits the disk, and no copy of
// that is needed. And it runs once from its image, because what it writes then no longer fits.
//
// A hibernated sandbox keeps its disk, its image and its published ports, which wake it.
type hibernator struct{ *Manager }

var (
	errHibernated = errors.New("the sandbox hibernates")
	errStopped    = errors.New("the sandbox was stopped")
)

// hibernatable refuses a sandbox whose memory cannot be put on disk.
func (m hibernator) hibernatable(r *record.Record) error {
	if m.life.Runtimes[r.Spec.Runtime].Memory == nil {
		return errs.New(errs.Unsupported, "a sandbox hibernates on runtime runsc only, and sandbox %s is on %s; pause it (`sandboxctl "+
			"pause %s`)", r.ID, r.Spec.Runtime, r.ID)
	}
	if r.State != record.Running && r.State != record.Paused {
		return wrongState(r, record.Running)
	}
	return nil
}

// operate is hibernate as the operation op, which began at start.
func (m hibernator) operate(ctx context.Context, op string, r *record.Record, start time.Time, why func(*record.Record)) error {
	if err := m.hibernatable(r); err != nil {
		return err
	}
	room, err := m.snapshots.reserve(r.ID)
	if err != nil {
		return err
	}
	defer room()
	err = m.hibernate(context.WithoutCancel(ctx), r, why)
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		err = errs.Wrap(err, errs.Exhausted, "the storage pool became full while the memory of this sandbox was written: delete sandboxes "+
			"or snapshots, or grow the pool (sandboxd pool grow)")
	}
	m.life.log(ctx, op, r, start, nil, err)
	return err
}

// hibernate puts the memory of a sandbox that is Running or Paused on disk and ends its processes.
// After an error before its memory is safe the sandbox is Running. The caller holds its lock.
func (m hibernator) hibernate(ctx context.Context, r *record.Record, why func(*record.Record)) error {
	if err := m.life.set(ctx, r, record.Hibernating, why); err != nil {
		return err
	}
	pauses, err := m.keepMemory(ctx, r)
	if err != nil {
		return errors.Join(err, m.goOn(ctx, r, pauses))
	}
	return m.layDown(ctx, r)
}

// pauses is how often the guest of a sandbox is paused.
type pauses int

const (
	unknown   pauses = -1 // a call was not answered, or a dead daemon made one
	undecided pauses = -2 // it may be frozen, or its image may be durable
)

// keepMemory makes the memory image of a sandbox durable, together with its disk, and says so in
// its record. From then on the guest must not run again. After an error it returns how often the
// guest, which was not paused before, is paused.
func (m hibernator) keepMemory(ctx context.Context, r *record.Record) (p pauses, err error) {
	l := &m.life
	memory := l.Runtimes[r.Spec.Runtime].Memory
	ctx, leave := m.snapshots.enter(ctx, r.ID, "", true)
	defer leave()
	if err := m.thaw(ctx, r); err != nil {
		return undecided, err
	}
	var image record.MemoryImage
	if image.Needs, err = memory.Needs(r.ID); err != nil {
		return 0, err
	}
	dir, err := m.makeImage(ctx, r.ID)
	if err != nil {
		return 0, err
	}
	narrow, err := m.snapshots.widen(ctx, r)
	if err != nil {
		return 0, err
	}
	defer func() {
		if cause := context.Cause(ctx); err != nil && (errors.Is(cause, errDeleted) || errors.Is(cause, errStopped)) {
			err = errors.Join(errs.New(errs.WrongState, "meanwhile %v", cause), err)
		}
		if err != nil && p != undecided {
			err = errors.Join(err, m.dropImage(ctx, r.ID)) // its pages, which nobody has written out, go with it
			narrow()
		}
	}()
	err = table.Within(ctx, freezeLimit, "hibernate:pause", func(ctx context.Context) error { return memory.Pause(ctx, r.ID) })
	if err != nil {
		return unknown, err
	}
	if err = m.snapshots.promise(r.ID); err != nil { // now it cannot grow
		return 1, err
	}
	err = table.Within(ctx, takeLimit, "hibernate:checkpoint", func(ctx context.Context) error {
		return memory.Checkpoint(ctx, r.ID, dir, func() error { return nil })
	})
	if err == nil && len(r.Spec.Volumes) > 0 { // what it wrote there is in memory, too
		err = table.Within(ctx, takeLimit, "hibernate:volumes", l.Frozen.PrepareSnapshot)
	}
	if err == nil { // the guest stands still: its disk no longer changes
		err = table.Within(ctx, takeLimit, "hibernate:flush", func(ctx context.Context) error { return l.Frozen.SyncDisk(ctx, r.ID) })
	}
	if err == nil {
		err = table.Within(ctx, takeLimit, "hibernate:memory", func(ctx context.Context) (err error) {
			image.Files, err = l.Frozen.FinishMemory(ctx, r.ID)
			return err
		})
	}
	if err != nil {
		return 1, err
	}
	n := *r
	n.Hibernation = &image
	if err = l.put(ctx, n); err != nil {
		return undecided, err
	}
	*r = n
	m.snapshots.unpromise(r.ID) // by now it is among what the pool holds
	return 0, nil
}

// thaw has a sentry answer that may be asleep in memory.
func (m hibernator) thaw(ctx context.Context, r *record.Record) error {
	return bounded(ctx, freezeLimit, "thaw", func(ctx context.Context) error { return m.life.Cgroups.Thaw(ctx, r.ID) })
}

// makeImage makes the directory of an image, in place of what a dead daemon left there.
func (m hibernator) makeImage(ctx context.Context, id string) (dir string, err error) {
	if err := m.dropImage(ctx, id); err != nil {
		return "", err
	}
	return m.life.Frozen.MakeMemory(ctx, id)
}

func (m hibernator) dropImage(ctx context.Context, id string) error {
	return bounded(ctx, stepLimit, "hibernate:drop", func(ctx context.Context) error { return m.life.Frozen.DeleteMemory(ctx, id) })
}

// goOn lets the guest of a sandbox that could not hibernate go on. If that fails, or it is undecided
// whether it may, the sandbox stays Hibernating, and the sweep begins again with what the store has.
func (m hibernator) goOn(ctx context.Context, r *record.Record, p pauses) error {
	var err error
	switch p {
	case undecided:
		return nil
	case unknown:
		if err = m.thaw(ctx, r); err == nil {
			err = m.resumeUntilAnswered(ctx, r)
		}
	case 1:
		err = m.resumeOnce(ctx, r)
	}
	if err != nil {
		return err
	}
	return m.life.set(ctx, r, record.Running, awake)
}

func (m hibernator) resumeOnce(ctx context.Context, r *record.Record) error {
	return bounded(ctx, freezeLimit, "hibernate:resume", func(ctx context.Context) error {
		return m.life.Runtimes[r.Spec.Runtime].Memory.Resume(ctx, r.ID)
	})
}

// maxPauses is how often a guest may have been paused: by daemons that died, and by this one.
const maxPauses = 5

// resumeUntilAnswered resumes a guest of which nobody knows whether it is paused. It must not be
// resumed once too often, so its agent is asked before each time, and has as long as after a start.
func (m hibernator) resumeUntilAnswered(ctx context.Context, r *record.Record) error {
	for range maxPauses {
		ready, cancel := context.WithTimeout(ctx, m.life.cfg.StartLimit)
		err := m.life.Agents.Ready(ready, r)
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil { // nobody has waited for the agent
			return context.Cause(ctx)
		}
		if err := m.resumeOnce(ctx, r); err != nil {
			return err
		}
	}
	return nil // it runs, and does not answer: that is its probe's affair
}

// layDown ends the processes of a sandbox whose memory is on disk, and takes away what it does not
// keep. After an error it stays Hibernating, and the sweep goes on.
func (m hibernator) layDown(ctx context.Context, r *record.Record) error {
	l := &m.life
	m.tracker.remove(r.ID, errHibernated)
	l.past.forget(r.ID) // the next life has counters of its own
	err := l.kill(ctx, r.ID, killLimit)
	if err == nil {
		err = l.Ports.Cut(ctx, r.ID) // the link goes away without a packet
	}
	if err == nil {
		err = m.takeAway(ctx, r)
	}
	l.settle(r.ID, err)
	if err != nil {
		return err
	}
	return l.set(ctx, r, record.Hibernated)
}

// takeAway releases what a hibernated sandbox does not keep. Each mount of a disk of --rm marks it as
// one that does not survive a crash of the host, but this one has not changed since it was synced.
func (m hibernator) takeAway(ctx context.Context, r *record.Record) error {
	_, err := table.Release(context.WithoutCancel(ctx), hibernated(&m.life), r)
	if err == nil && r.Spec.OneShot {
		err = bounded(ctx, takeLimit, "hibernate:keep", func(ctx context.Context) error { return m.life.Rootfs.Keep(ctx, r.ID) })
	}
	return err
}

// hibernated are the rows that a hibernated sandbox does not keep.
func hibernated(l *life) []table.Row {
	return slices.DeleteFunc(l.fleeting(), func(row table.Row) bool { return row.Name == "memory" || row.Name == "ports" })
}

// wake brings a hibernated sandbox back to Running. If that fails before the guest has run, the
// sandbox is Hibernated as before; afterwards it has ended. The caller holds its lock.
func (m hibernator) wake(ctx context.Context, r *record.Record) error {
	l, start := &m.life, time.Now()
	asker := context.WithoutCancel(ctx)
	memory := l.Runtimes[r.Spec.Runtime].Memory
	if memory == nil {
		return errs.New(errs.Unsupported, "this host no longer has the runtime %s", r.Spec.Runtime)
	}
	if err := memory.Meets(r.Hibernation.Needs); err != nil {
		return err
	}
	was := *r
	if err := l.set(asker, r, record.Waking, l.cfg.upIn); err != nil {
		return err
	}
	h := m.tracker.add(m.ctx, r.ID)
	defer close(h.settled)
	defer m.stock.enter()()
	steps, err := m.bringBack(asker, h, r)
	if err == nil {
		m.watch(h, r.Spec.Runtime)
		if err := m.dropImage(asker, r.ID); err != nil {
			l.cfg.Log.WarnContext(asker, "cannot remove the memory image of a sandbox that woke; the sweep tries again", "sandbox", r.ID,
				"err", err)
		}
		woken := *r
		woken.Reason, woken.Message = was.Reason, fmt.Sprintf("it hibernated for %v", r.Changed.Sub(was.Changed).Round(time.Millisecond))
		l.bus.Publish(events.Woken, &woken)
	} else {
		m.tracker.remove(r.ID, errHibernated)
		cause := context.Cause(h.creation)
		if !errors.Is(cause, errDeleted) && !errors.Is(cause, errClosing) { // else the deletion, or the next daemon, goes on
			err = errors.Join(err, m.unwake(asker, r, err))
		}
	}
	l.log(asker, opWake, r, start, steps, err)
	return err
}

// bringBack brings up the rows of a sandbox that wakes, when its turn has come.
func (m hibernator) bringBack(asker context.Context, h *handle, r *record.Record) ([]table.Step, error) {
	if m.life.cfg.Admit != nil {
		turn := m.life.cfg.Admit(asker, r.ID)
		defer turn.Done()
		select {
		case <-turn.Came():
		case <-h.creation.Done():
			return nil, context.Cause(h.creation)
		}
	}
	ctx, cancel := context.WithTimeoutCause(h.creation, m.life.cfg.StartLimit+createSlack+takeLimit, table.ErrTooLong)
	defer cancel()
	steps, err := m.life.start(ctx, r)
	if _, at := errors.AsType[*table.StepError](err); err != nil && !at && came(steps, "runtime") {
		err = &ranError{err} // its time was up between two steps
	}
	return steps, err
}

// came reports whether a step was done, or tried.
func came(steps []table.Step, name string) bool {
	return slices.ContainsFunc(steps, func(s table.Step) bool { return s.Name == name })
}

// ranError is the error of a runtime whose guest may have run nevertheless.
type ranError struct{ error }

func (e *ranError) Unwrap() error { return e.error }

// hasRun reports whether the guest may have run in a wake that failed with err.
func hasRun(err error) bool {
	failed, ok := errors.AsType[*table.StepError](err)
	_, ran := errors.AsType[*ranError](err)
	return ran || ok && slices.Contains([]string{"agent", "ports", "cpu"}, failed.Name)
}

// unwake undoes a wake that failed with err, if the guest has not run; else it ends the sandbox. One
// that runs, and only its record does not say so, is left to the sweep, which finishes the wake.
func (m hibernator) unwake(ctx context.Context, r *record.Record, err error) error {
	l := &m.life
	if _, ok := errors.AsType[*upError](err); ok {
		return nil
	}
	if hasRun(err) {
		_, err := l.fail(ctx, r, err)
		return err
	}
	err = l.kill(ctx, r.ID, killLimit)
	if err == nil {
		err = m.takeAway(ctx, r)
	}
	l.settle(r.ID, err)
	if err != nil {
		return err // it stays Waking, and the sweep goes on
	}
	return l.set(ctx, r, record.Hibernated)
}

// Hibernate puts the memory of a sandbox on disk and ends its processes, until a client resumes it.
// One that its idle policy has paused or hibernated is then the client's. It needs a sandbox that
// is running or paused, on a runtime that keeps memory (else errs.Unsupported).
func Hibernate(ctx context.Context, m *Manager, idOrName string) error {
	start := time.Now()
	_, err := m.with(ctx, opHibernate, idOrName, func(r *record.Record) error {
		if r.State == record.Hibernated && r.Asleep() {
			return m.amend(ctx, r, string(record.Hibernated), awake)
		}
		return hibernator{m}.operate(ctx, opHibernate, r, start, awake)
	})
	return err
}

// halfAsleep reports whether a hibernation of a sandbox that lives has begun, and its image is not
// whole. Then it is adopted.
func (m recovery) halfAsleep(ctx context.Context, id string) bool {
	r, ok, err := m.life.Store.Get(ctx, id)
	if err != nil || !ok || r.State != record.Hibernating || r.Hibernation != nil || r.BootID != m.life.cfg.BootID {
		return false
	}
	alive, err := m.life.Cgroups.Populated(id)
	return err == nil && alive && m.catchUp(ctx, &r) == nil && m.adopt(ctx, &r) == nil
}

// finishSleep reconciles one that is halfAsleep. Its memory may be large, and nobody else waits for
// that: not the API, which opens after the first recovery. Its uses do.
func (m recovery) finishSleep(id string, kinds []string) {
	if err := m.reconcileLocked(m.ctx, id, kinds); err != nil {
		m.life.cfg.Log.Error("cannot finish the hibernation of a sandbox; the sweep tries again", "sandbox", id, "err", err)
	}
}

// recoverAsleep finishes what a dead daemon, or an error, left of a hibernation or a wake. kinds are
// the rows that were held a moment ago. done is false if r is to be recovered like any other.
func (m recovery) recoverAsleep(ctx context.Context, r *record.Record, kinds []string) (done bool, err error) {
	h := hibernator(m)
	switch r.State {
	case record.Hibernated:
		return true, m.tidyAsleep(ctx, r, kinds)
	case record.Hibernating:
		if r.Hibernation != nil {
			return true, errors.Join(h.layDown(ctx, r), m.tidyAsleep(ctx, r, nil))
		}
		alive, err := m.life.Cgroups.Populated(r.ID)
		if err != nil || !alive || r.BootID != m.life.cfg.BootID {
			return false, err
		}
		return true, m.hibernateAgain(ctx, r)
	case record.Waking:
		alive, err := m.life.Cgroups.Populated(r.ID)
		switch {
		case err != nil:
			return true, err
		case alive:
			return true, m.wakeAgain(ctx, r)
		case r.BootID == m.life.cfg.BootID && !slices.Contains(kinds, "runtime"):
			return true, errors.Join(h.unwake(ctx, r, nil), m.tidyAsleep(ctx, r, nil))
		}
		return true, m.life.end(ctx, r, failure(r.State, ": sandboxd or the host stopped in the middle"))
	}
	if live(r.State) && slices.Contains(kinds, "memory") {
		err = h.dropImage(ctx, r.ID) // it woke
	}
	return false, err
}

// hibernateAgain hibernates a sandbox that a dead daemon may have paused, or not. If that fails,
// the guest is told to go on as often as it takes.
func (m recovery) hibernateAgain(ctx context.Context, r *record.Record) error {
	h, start := hibernator(m), time.Now()
	err := errors.Join(m.adopt(ctx, r), h.dropImage(ctx, r.ID)) // its room is free for the new one
	p := unknown
	room, kerr := m.snapshots.reserve(r.ID)
	if kerr == nil {
		defer room()
		p, kerr = h.keepMemory(ctx, r)
	}
	if kerr == nil {
		err = errors.Join(err, h.layDown(ctx, r))
	} else {
		if p != undecided {
			p = unknown // the dead daemon may have paused it, too
		}
		err = errors.Join(err, kerr, h.goOn(ctx, r, p))
	}
	m.life.log(ctx, opHibernate, r, start, nil, err)
	return err
}

// wakeAgain finishes a wake: the runtime has started.
func (m recovery) wakeAgain(ctx context.Context, r *record.Record) error {
	h, start := hibernator(m), time.Now()
	ready, cancel := context.WithTimeout(ctx, m.life.cfg.StartLimit)
	defer cancel()
	err := awaitAgent(ready, m.life.Deps, r, m.life.Agents.Ready)
	if err != nil {
		err = errors.Join(err, h.unwake(ctx, r, &table.StepError{Name: "agent", Err: err}))
	} else if err = m.life.set(ctx, r, record.Running, awakeAnew); err == nil {
		err = errors.Join(h.dropImage(ctx, r.ID), m.adopt(ctx, r))
	}
	m.life.log(ctx, opWake, r, start, nil, err)
	return err
}

// awakeAnew notes that a sandbox has come up from its image.
func awakeAnew(r *record.Record) {
	awake(r)
	r.Started, r.Hibernation = r.Changed, nil
}

// tidyAsleep releases what a hibernated sandbox should not hold, and opens its published ports: those
// of an earlier daemon ended with it.
func (m recovery) tidyAsleep(ctx context.Context, r *record.Record, kinds []string) error {
	err := bounded(ctx, stepLimit, "up:ports", func(ctx context.Context) error {
		return m.life.Ports.Open(ctx, r.ID, m.life.cfg.Addr(r.Slot), r.Spec.Publish)
	})
	return errors.Join(err, m.tidy(ctx, r, hibernated(&m.life), kinds))
}
