package sandbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// life moves one sandbox from state to state. It knows the order of things and
// nothing of concurrency: whoever calls it holds the lock of the sandbox. A
// cancelled context cuts short what makes a sandbox, never what unmakes one.
type life struct {
	Deps
	cfg  Config
	rows []resource
	bus  bus
}

// Limits of single calls outside the table.
const (
	storeLimit  = 15 * time.Second // a sync on a disk that somebody else saturates
	killLimit   = 15 * time.Second // a process in the middle of a large exit
	freezeLimit = 10 * time.Second
	goneLimit   = 10 * time.Second
)

// now is the wall clock, and only that: expiry goes by it, also across a
// suspend or a step of the clock.
func now() time.Time { return time.Now().Round(0).UTC() }

// errTooLong is why a call was given up; the log says how long it took.
var errTooLong = errs.New(errs.Unavailable, "it took too long; the host may be overloaded")

// bounded runs one call under a deadline and between its failpoints, cut loose
// from the cancellation of ctx.
func bounded(ctx context.Context, limit time.Duration, name string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), limit, errTooLong)
	defer cancel()
	err := pass(name, func() error { return f(ctx) })
	if err != nil {
		return errors.Join(fmt.Errorf("%s: %w", name, err), context.Cause(ctx))
	}
	return nil
}

// set makes r durable in another state, together with other changes.
func (l *life) set(ctx context.Context, r *record.Record, to record.State, changes ...func(*record.Record)) error {
	if !allowed(r.State, to) {
		return fmt.Errorf("sandbox %s is %s and can not become %s", r.ID, r.State, to)
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
	l.bus.publish(string(to), r)
	return nil
}

func (l *life) put(ctx context.Context, r record.Record) error {
	return bounded(ctx, storeLimit, "store:put:"+string(r.State), func(ctx context.Context) error {
		return l.Store.Put(ctx, r)
	})
}

// start brings a Creating sandbox to Running.
func (l *life) start(ctx context.Context, r *record.Record) ([]Step, error) {
	steps, err := acquire(ctx, l.rows, r)
	if err != nil {
		return steps, err
	}
	return steps, l.set(ctx, r, record.Running)
}

// pause freezes a sandbox that is Running or Pausing.
func (l *life) pause(ctx context.Context, r *record.Record) error {
	if r.State != record.Pausing {
		if err := l.set(ctx, r, record.Pausing); err != nil {
			return err
		}
	}
	if err := l.freeze(ctx, r.ID); err != nil {
		// Half frozen is nothing a sandbox can be left in.
		return errors.Join(err, l.thawTo(ctx, r))
	}
	return l.set(ctx, r, record.Paused)
}

// resume thaws a sandbox that is Paused or Resuming. One that does not thaw
// stays Resuming, and the sweep tries again.
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
	return l.set(ctx, r, record.Running)
}

func (l *life) kill(ctx context.Context, id string) error {
	return bounded(ctx, killLimit, "kill", func(ctx context.Context) error { return l.Cgroups.Kill(ctx, id) })
}

// maxOutput bounds what a record remembers of a sandbox's last words.
const maxOutput = 8 << 10

// A death is what an ended sandbox is remembered by.
type death struct {
	reason  record.Reason
	message string
	code    *int
	output  string
	ran     bool // its entrypoint ran, for however short a time
}

func (d death) write(r *record.Record) {
	r.Reason, r.Message = d.reason, d.message
	r.ExitCode, r.LastOutput = d.code, d.output
}

// autopsy finds out how the dead sandbox r died. Its cgroup is still there.
func (l *life) autopsy(ctx context.Context, r *record.Record) death {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepLimit)
	defer cancel()
	ooms, err := l.Cgroups.OOMKills(r.ID)
	if err != nil {
		l.cfg.Log.Debug("the OOM kills of a dead sandbox are unknown", "sandbox", r.ID, "err", err) // it may never have had a cgroup
	}
	o, left := l.Agents.Obituary(ctx, r.ID)
	d := death{output: o.LastOutput[max(0, len(o.LastOutput)-maxOutput):]}
	if left {
		code := o.ExitCode
		d.code = &code
		d.ran = o.Message == ""
	}
	switch {
	case ooms > 0 && (!left || o.ExitCode != 0):
		d.reason = record.OOM
		d.message = fmt.Sprintf("it went over its memory limit of %s; give it more (--memory), or let it use less", mebibytes(r.Spec.MemoryBytes))
	case !left:
		d.reason = record.RuntimeCrash
		d.message = fmt.Sprintf("its runtime (%s) or its agent died without a word: somebody killed it from outside, or it crashed; see the daemon's log", r.Spec.Runtime)
	case o.Message != "":
		d.reason = record.Exited
		d.message = "entrypoint: " + o.Message
	case o.Signal != "":
		d.reason = record.Killed
		d.message = "its entrypoint was killed by " + o.Signal
	default:
		d.reason = record.Exited
		d.message = fmt.Sprintf("its entrypoint exited with code %d", o.ExitCode)
	}
	return d
}

func mebibytes(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }

// fail ends a sandbox whose creation failed with err.
func (l *life) fail(ctx context.Context, r *record.Record, err error) error {
	if kerr := l.kill(ctx, r.ID); kerr != nil {
		d := death{reason: record.CreateFailed, message: clientText(err)}
		return errors.Join(kerr, l.set(ctx, r, record.Stopping, d.write))
	}
	d := l.autopsy(ctx, r)
	if d.ran && errors.Is(err, errDied) {
		// It came up and ended before anybody could ask its agent; that nobody
		// did must not make another end of it.
		return l.end(ctx, r, d)
	}
	said := d.message
	d.message = clientText(err)
	if d.code != nil || d.reason == record.OOM {
		d.message += ": " + said // it says why no agent answered
	}
	d.reason = record.CreateFailed
	return l.end(ctx, r, d)
}

// clientText says which step of a creation failed, and why as far as a client
// may know.
func clientText(err error) string {
	text := "could not be created"
	if s, ok := errors.AsType[*stepError](err); ok {
		text += ": step " + s.step
	}
	e, ok := errors.AsType[*errs.Error](err)
	switch {
	case ok:
		return text + ": " + e.Text
	case errors.Is(err, errDied):
		return text + ": " + errDied.Error()
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return text + ": sandboxd may open no more files: let it run fewer sandboxes, or raise its limit (LimitNOFILE= of its unit)"
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return text + ": a disk of the host is full: make room on it"
	}
	return text + " failed; the daemon's log says why"
}

// end takes everything from a sandbox but its record and its disk. An error
// leaves it Stopping, or Creating, and the sweep goes on.
func (l *life) end(ctx context.Context, r *record.Record, d death) error {
	if r.State != record.Creating && r.State != record.Stopping {
		if err := l.set(ctx, r, record.Stopping, d.write); err != nil {
			return err
		}
	}
	if err := l.kill(ctx, r.ID); err != nil {
		return err
	}
	if _, err := release(context.WithoutCancel(ctx), l.fleeting(), r); err != nil {
		if r.State == record.Creating { // so that the sweep knows why
			err = errors.Join(err, l.set(ctx, r, record.Stopping, d.write))
		}
		return err
	}
	return l.set(ctx, r, record.Ended, d.write)
}

// fleeting are the rows that an ended sandbox does not keep.
func (l *life) fleeting() (rows []resource) {
	for _, row := range l.rows {
		if !row.keep {
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
	return l.set(ctx, r, record.Deleting)
}

// erase is the one teardown: DELETE, expiry, and the recovery of either. It
// calls dead once the processes are dead; links and disk follow. An error
// leaves the sandbox Deleting, and the sweep goes on.
// Preconditions: r is condemned, or an ID whose record can not be read.
func (l *life) erase(ctx context.Context, r *record.Record, dead func()) ([]Step, error) {
	if err := l.kill(ctx, r.ID); err != nil {
		return nil, err
	}
	l.bus.publish(EventDeleted, r)
	dead()
	ctx = context.WithoutCancel(ctx)
	steps, err := release(ctx, l.rows, r)
	if err != nil {
		return steps, err
	}
	// The address is free only when no link has it.
	if err := bounded(ctx, goneLimit, "gone", func(ctx context.Context) error { return l.Network.Gone(ctx, r.ID) }); err != nil {
		return steps, err
	}
	return steps, bounded(ctx, storeLimit, "store:delete", func(ctx context.Context) error {
		return l.Store.Delete(ctx, r.ID)
	})
}

// due is when a sandbox is to be erased; zero is never.
func (l *life) due(r *record.Record) time.Time {
	t := r.Expires
	if r.State == record.Ended {
		if kept := r.Changed.Add(l.cfg.Retain); t.IsZero() || kept.Before(t) {
			return kept
		}
	}
	return t
}

func isDue(due time.Time) bool { return !due.IsZero() && !now().Before(due) }

// log writes the one wide line of a finished operation.
func (l *life) log(ctx context.Context, op string, r *record.Record, start time.Time, steps []Step, err error) {
	args := []any{"sandbox", r.ID, "runtime", r.Spec.Runtime, "image", r.Spec.Image.Ref(), "dur", time.Since(start)}
	for _, s := range steps {
		args = append(args, "step_"+s.Name, s.Took)
	}
	if r.Reason != "" {
		args = append(args, "reason", string(r.Reason))
	}
	if err != nil {
		l.cfg.Log.ErrorContext(ctx, op, append(args, "err", strings.ReplaceAll(err.Error(), "\n", "; "))...)
		return
	}
	l.cfg.Log.InfoContext(ctx, op, args...)
}
