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

// life moves one sandbox from state to state. It knows the order of the steps and
// nothing of concurrency: the caller holds the lock of the sandbox. A cancelled context
// cuts short a call that makes something, never a call that unmakes it.
type life struct {
	Deps
	cfg  Config
	rows []table.Row
	bus  events.Bus
	past past

	refusals refusals
	lingers  lingering
	onLinger func(id string) // called once when a killed sandbox begins to linger
	// onColdClaim, if not nil, is called when a sandbox could not use the member of a pool that
	// it took.
	onColdClaim func(pool string)
	onLeft      func() // called when a sandbox of a pool has left its place in it
}

// Limits of single calls outside the table.
const (
	storeLimit  = 15 * time.Second // a sync on a disk that somebody else saturates
	killLimit   = 15 * time.Second // a process in the middle of a large exit
	freezeLimit = 10 * time.Second
	goneLimit   = 10 * time.Second
)

// now is the wall clock without a monotonic reading: expiry follows the wall clock,
// also across a suspend or a step of the clock.
func now() time.Time { return time.Now().Round(0).UTC() }

// bounded runs one call under a deadline and between its failpoints. The call is not
// cancelled with ctx.
func bounded(ctx context.Context, limit time.Duration, name string, f func(context.Context) error) error {
	return table.Within(context.WithoutCancel(ctx), limit, name, f)
}

// set moves r to another state, together with other changes, and makes it durable.
func (l *life) set(ctx context.Context, r *record.Record, to record.State, changes ...func(*record.Record)) error {
	if !allowed(r.State, to) {
		return fmt.Errorf("sandbox %s is %s and cannot become %s", r.ID, r.State, to)
	}
	n := *r
	n.State, n.Changed = to, now()
	for _, change := range changes {
		change(&n)
	}
	if err := l.put(ctx, n); err != nil {
		return err
	}
	*r = n
	l.bus.Publish(string(to), r)
	if (to == record.Ended || to == record.Deleting) && r.Pool.Name != "" && l.onLeft != nil {
		l.onLeft()
	}
	return nil
}

func (l *life) put(ctx context.Context, r record.Record) error {
	return bounded(ctx, storeLimit, "store:put:"+string(r.State), func(ctx context.Context) error {
		return l.Store.Put(ctx, r)
	})
}

// start brings a sandbox that is Creating, or Starting again, to Running.
func (l *life) start(ctx context.Context, r *record.Record) ([]table.Step, error) {
	rows := l.rows
	if r.State == record.Starting || r.State == record.Waking {
		rows = l.fleeting() // it has kept the other rows
		// It still has its address, but the link of its last life may be there.
		if err := l.gone(ctx, r.ID); err != nil {
			return nil, err
		}
	}
	up := func() ([]table.Step, error) { return table.Acquire(ctx, rows, r) }
	if r.Claims() {
		up = func() ([]table.Step, error) { return claim(ctx, l, r) }
	}
	steps, err := up()
	if err != nil {
		return steps, err
	}
	err = l.set(ctx, r, record.Running, func(r *record.Record) {
		if r.Hibernation != nil {
			awake(r)
		}
		r.Hibernation = nil
		r.Started, r.MemberToken = r.Changed, ""
	})
	if err != nil {
		err = &upError{err}
	}
	return steps, err
}

// upError is why the record of a sandbox that has come up could not say so.
type upError struct{ error }

func (e *upError) Unwrap() error { return e.error }

// pause freezes a sandbox that is Running or Pausing, for a client or for its idle policy.
func (l *life) pause(ctx context.Context, r *record.Record) error { return l.pauseFor(ctx, r, awake) }

// pauseFor is pause. why notes in the record of a Running sandbox what pauses it.
func (l *life) pauseFor(ctx context.Context, r *record.Record, why func(*record.Record)) error {
	if r.State != record.Pausing {
		if err := l.set(ctx, r, record.Pausing, why); err != nil {
			return err
		}
	}
	if err := l.freeze(ctx, r.ID); err != nil {
		// A sandbox must not stay half frozen.
		return errors.Join(err, l.thawTo(ctx, r))
	}
	return l.set(ctx, r, record.Paused)
}

// resume thaws a sandbox that is Paused or Resuming. If the thaw fails it stays
// Resuming, and the sweep tries again.
func (l *life) resume(ctx context.Context, r *record.Record) error {
	if r.State != record.Resuming {
		if err := l.set(ctx, r, record.Resuming); err != nil {
			return err
		}
	}
	return l.thawTo(ctx, r)
}

func (l *life) freeze(ctx context.Context, id string) error {
	return bounded(ctx, freezeLimit, "freeze", func(ctx context.Context) error { return l.Cgroups.Freeze(ctx, id) })
}

func (l *life) thawTo(ctx context.Context, r *record.Record) error {
	err := bounded(ctx, freezeLimit, "thaw", func(ctx context.Context) error { return l.Cgroups.Thaw(ctx, r.ID) })
	if err != nil {
		return err
	}
	return l.set(ctx, r, record.Running, awake)
}

// awake notes that a sandbox is not asleep.
func awake(r *record.Record) { r.Reason, r.Message = "", "" }

// stopped is the death of a sandbox that a client stopped.
var stopped = death{reason: record.Stopped, message: "it was stopped; `sandboxctl start` runs it again"}

// stop ends a sandbox that runs or is paused, for a client or for its policy. It asks
// the entrypoint to end, and waits until grace is over or hurry ends. Then it calls
// last, and kills.
func (l *life) stop(ctx context.Context, r *record.Record, d death, grace time.Duration, hurry context.Context, last func()) error {
	polite := r.State == record.Running && len(r.Spec.Entrypoint) > 0 && grace > 0
	if err := l.set(ctx, r, record.Stopping, d.write); err != nil {
		return err
	}
	if polite {
		l.ask(ctx, r, grace, hurry)
	}
	last()
	if err := l.kill(ctx, r.ID, killLimit); err != nil {
		return err
	}
	found := l.diagnose(ctx, r)
	d.code, d.output = found.code, found.output
	return l.end(ctx, r, d)
}

// ask asks the entrypoint of r to end by itself. Errors are ignored: the kill comes
// next.
func (l *life) ask(ctx context.Context, r *record.Record, grace time.Duration, hurry context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer cancel()
	defer context.AfterFunc(hurry, cancel)()
	gone, err := l.Cgroups.Watch(ctx, r.ID)
	if err == nil {
		err = l.Agents.Terminate(ctx, r)
	}
	if err != nil {
		l.cfg.Log.Debug("cannot ask the entrypoint of a sandbox to end", "sandbox", r.ID, "err", err)
		return
	}
	<-gone // also when ctx ends
}

// failure is the death of a sandbox in state s that did not come up.
func failure(s record.State, why string) death {
	switch s {
	case record.Waking:
		return death{reason: record.StartFailed, message: "could not be woken" + why}
	case record.Starting:
		return death{reason: record.StartFailed, message: "could not be started" + why}
	}
	return death{reason: record.CreateFailed, message: "could not be created" + why}
}

// fail ends a sandbox whose creation, or new start, failed with err. It reports whether
// that was no failure of the host's: the entrypoint ran, and ended by itself.
func (l *life) fail(ctx context.Context, r *record.Record, err error) (ran bool, _ error) {
	failed := failure(r.State, clientText(err))
	if kerr := l.kill(ctx, r.ID, killLimit); kerr != nil {
		d := failed
		return false, errors.Join(kerr, l.set(ctx, r, record.Stopping, d.write))
	}
	d := l.diagnose(ctx, r)
	if errors.Is(err, errDied) && (d.ran || d.code == nil && (d.reason == record.OOM || d.reason == record.DiskFull)) {
		// It came up and ended before the daemon reached its agent, or a limit ended it with
		// its agent. The record must say the same as if the daemon had reached it.
		d.message += d.lastLines()
		return true, l.end(ctx, r, d)
	}
	switch said := d.message; {
	case errors.Is(err, errDied): // the agent said why it gave up, or how it crashed, or nobody knows
		d.message = failure(r.State, ": "+said).message
	case d.code != nil:
		d.message = failed.message + ": " + said // it says why no agent answered
	default:
		d.message = failed.message
	}
	d.message += d.lastLines()
	d.reason = failed.reason
	if r.State == record.Creating && errors.Is(err, table.ErrTooLong) {
		d.reason = record.Timeout
	}
	return false, l.end(ctx, r, d)
}

// clientText says which step of a creation failed and why, as far as a client may know.
func clientText(err error) string {
	text := ""
	if s, ok := errors.AsType[*table.StepError](err); ok {
		text += ": step " + s.Name
	}
	e, ok := errors.AsType[*errs.Error](err)
	lack := errs.Lack(err)
	switch {
	case ok:
		return text + ": " + e.Text
	case errors.Is(err, errDied):
		return text + ": " + errDied.Error()
	case lack != "":
		return text + ": " + lack
	}
	return text + " failed; the daemon's log says why"
}

// end takes everything from a sandbox but its record and its disk. After an error it
// stays Stopping, with the reason, and the sweep goes on.
func (l *life) end(ctx context.Context, r *record.Record, d death) error {
	if !r.State.Beginning() && r.State != record.Stopping {
		if err := l.set(ctx, r, record.Stopping, d.write); err != nil {
			return err
		}
	}
	err := l.kill(ctx, r.ID, killLimit)
	if err == nil {
		_, err = table.Release(context.WithoutCancel(ctx), l.fleeting(), r)
	}
	if err == nil {
		err = dropVault(ctx, l, r, d)
	}
	l.settle(r.ID, err)
	if err != nil {
		if r.State.Beginning() { // so that the sweep knows why
			err = errors.Join(err, l.set(ctx, r, record.Stopping, d.write))
		}
		return err
	}
	return l.set(ctx, r, record.Ended, d.write)
}

// fleeting are the rows that an ended sandbox does not keep.
func (l *life) fleeting() (rows []table.Row) {
	for _, row := range l.rows {
		if !row.Keep {
			rows = append(rows, row)
		}
	}
	return rows
}

// condemn makes the end of a sandbox durable, and its ID unknown.
func (l *life) condemn(ctx context.Context, r *record.Record) error {
	if r.State == record.Deleting {
		return nil
	}
	why := func(*record.Record) {}
	if r.Asleep() { // which is not why it is deleted
		why = awake
	}
	if r.State != record.Ended && isDue(l.due(r)) {
		why = func(r *record.Record) { r.Reason, r.Message = record.Expired, "its timeout passed" }
	}
	return l.set(ctx, r, record.Deleting, why)
}

// erase also removes the record: for DELETE, expiry, and the recovery of either. (end
// keeps record and disk. Both call release, the one teardown.) It calls dead once the
// processes are dead, or killed and lingering, and published ports are closed; links and
// disk follow. After an error the sandbox stays Deleting, and the sweep goes on.
// Preconditions: r is condemned, a prepared slot, or an ID whose record cannot be read.
func (l *life) erase(ctx context.Context, r *record.Record, dead func()) (steps []table.Step, err error) {
	defer func() { l.settle(r.ID, err) }()
	err = l.kill(ctx, r.ID, eraseLimit)
	if err != nil && (r.State != record.Deleting || !errors.Is(err, ErrLingering)) {
		return nil, err // no record that can be read says that it is to be deleted, or something of it may run
	}
	ctx = context.WithoutCancel(ctx)
	closed := l.Ports.Close(ctx, r.ID) // who is told that it is gone may want its ports
	dead()
	if err != nil { // nobody is let in meanwhile
		return nil, errors.Join(err, closed)
	}
	if steps, err = table.Release(ctx, l.rows, r); err != nil {
		return steps, err
	}
	// The address is free only when no link has it.
	if err := l.gone(ctx, r.ID); err != nil {
		return steps, err
	}
	err = bounded(ctx, storeLimit, "store:delete", func(ctx context.Context) error {
		return l.Store.Delete(ctx, r.ID)
	})
	if err == nil && slices.ContainsFunc(r.Spec.Volumes, func(m record.VolumeMount) bool { return m.Owned }) {
		err = l.dropVolumes(ctx)
	}
	return steps, err
}

// due is when a sandbox is to be erased; zero means never.
func (l *life) due(r *record.Record) time.Time {
	t := r.Expires
	if r.State == record.Ended && r.Reason != record.Stopped && !r.Restarting() { // a stopped one may be started again
		if kept := l.cfg.kept(r.Changed); t.IsZero() || kept.Before(t) {
			return kept
		}
	}
	return t
}

// kept is until when something is kept that ended at a time: for Retain of the time that the host is up.
func (c *Config) kept(ended time.Time) time.Time {
	t := ended.Add(c.Retain)
	if c.Down != nil {
		t = t.Add(c.Down(ended))
	}
	return t
}

func isDue(due time.Time) bool { return !due.IsZero() && !now().Before(due) }

// next is the whole life of a sandbox; what it does not list is refused.
//
// Creating and Starting need no Stopping on the way to Ended: they are intents
// themselves, and their recovery ends the sandbox too. From Pausing and Resuming there is a way
// back for a freezer that refused. Prepared needs no Deleting on the way out: what
// recovery finds Prepared it releases.
var next = map[record.State][]record.State{
	record.Creating: {record.Running, record.Stopping, record.Ended, record.Deleting},
	record.Running:  {record.Pausing, record.Hibernating, record.Stopping, record.Deleting},
	record.Pausing:  {record.Paused, record.Running, record.Stopping, record.Deleting},
	record.Paused:   {record.Resuming, record.Hibernating, record.Stopping, record.Deleting},
	record.Resuming: {record.Running, record.Paused, record.Stopping, record.Deleting},
	record.Stopping: {record.Ended, record.Deleting},
	record.Ended:    {record.Starting, record.Deleting},
	record.Starting: {record.Running, record.Stopping, record.Ended, record.Deleting},
	record.Deleting: {},
	record.Prepared: {record.Creating},

	record.Hibernating: {record.Hibernated, record.Running, record.Stopping, record.Deleting},
	record.Hibernated:  {record.Waking, record.Stopping, record.Deleting},
	record.Waking:      {record.Running, record.Hibernated, record.Stopping, record.Deleting},
}

func allowed(from, to record.State) bool { return slices.Contains(next[from], to) }

// live reports whether a sandbox in state s may have processes that are to
// stay alive.
func live(s record.State) bool {
	switch s {
	case record.Running, record.Pausing, record.Paused, record.Resuming, record.Hibernating:
		return true
	}
	return false
}

func notFound(idOrName string) error {
	return errs.New(errs.NotFound, "no sandbox %q; `sandboxctl ps -a` lists the sandboxes of this host", idOrName)
}

// busy is the error of an operation that did not get the lock of id in time.
func busy(op, id string, err error) error {
	return fmt.Errorf("%s %s: another operation on it is still running: %w", op, id, err)
}

func wrongState(r *record.Record, want record.State) error {
	return errs.New(errs.WrongState, "sandbox %s is %s, not %s", r.ID, r.State, want)
}
