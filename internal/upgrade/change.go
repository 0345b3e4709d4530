// Package upgrade changes the version of sandboxd that runs, and goes back if the new one is not good.
//
//	preflight ─▶ journal ─▶ units, links ─▶ restart ─▶ gate ─┬▶ done
//	└ nothing is changed ┘                                    └▶ undo: units, links, restart, state
//
// Sandboxes and their commands go on: a restart of the daemon ends none.
//
// Change.Run holds the lock of internal/versions. When it dies before the change is done, nobody
// holds the lock, and the change is undone: by Settle, which each daemon calls before it opens its
// state, and which the service's unit calls by the program of the old version before each start,
// because a new version may not get that far.
package upgrade

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Change is a change from the present version to another one that is there.
type Change struct {
	Root versions.Root
	To   string
	// Config is the file that the daemon reads; "": it has none.
	Config string
	// Client is the daemon.
	Client *client.Client
	// Restart restarts the daemon as the version that the link current names. It returns when the
	// daemon serves, or why it does not, and soon after its context has ended.
	Restart func(context.Context) error
	// Units is the directory of the service's unit files; "": no service manager reads any.
	Units string
	// Limit is how long the new version may take to start and to be found good.
	Limit time.Duration
	// Soak is for how long after that a crash of the new version still goes back; 0: not at all.
	Soak time.Duration
	Out  io.Writer
	// Lock is that of Root, if the caller has taken it. Run releases it.
	Lock *versions.Lock
}

// Run makes the change. When it returns an error, the version of before runs again, or the error
// says what to do.
func (c *Change) Run(ctx context.Context) (err error) {
	if c.Lock == nil {
		if c.Lock, err = c.Root.Lock(); err != nil {
			return err
		}
	}
	defer c.Lock.Unlock()
	j, err := c.journal()
	if err != nil {
		return err
	}
	before, err := c.look(ctx)
	if dead, ok := errors.AsType[*unserved](err); ok {
		if before, err = c.rescue(ctx, j, dead); err != nil {
			return err
		}
	} else if err != nil {
		return fmt.Errorf("ask the daemon of sandboxd %s, which runs, so that the new one can be compared with it: %w; nothing was "+
			"changed", j.From, err)
	}
	if err := c.reads(j, before); err != nil {
		return err
	}
	fmt.Fprintf(c.Out, "checking %s: configuration, host, state\n", c.To)
	if err := c.preflightInTime(ctx, j.From, before); err != nil {
		return fmt.Errorf("sandboxd %s cannot run here, and nothing was changed: %w", c.To, err)
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("nothing was changed: %w", context.Cause(ctx))
	}
	if err := c.Root.Reserve(); err != nil {
		return fmt.Errorf("nothing was changed: %w; make room on the disk of %s", err, c.Root)
	}
	fmt.Fprintf(c.Out, "changing from %s to %s\n", j.From, c.To)
	if err := c.try(ctx, j, before); err != nil {
		return c.back(ctx, j, before, err)
	}
	fmt.Fprintf(c.Out, "sandboxd %s runs; to go back to %s: sandboxd rollback\n", c.To, j.From)
	switch {
	case c.soaks(j, before):
		fmt.Fprintf(c.Out, "if it crashes within %s, %s runs again by itself\n", c.Soak, j.From)
	case c.Soak > 0 && j.FromSchema != j.ToSchema:
		fmt.Fprintf(c.Out, "a crash of it is not undone by itself, because %s cannot read what it writes from now on (schema %d)\n",
			j.From, j.ToSchema)
	}
	return nil
}

// Take makes the change without a trial: the operator does not want one.
func (c *Change) Take(ctx context.Context) (err error) {
	if c.Lock, err = c.Root.Lock(); err != nil {
		return err
	}
	defer c.Lock.Unlock()
	j, err := c.journal()
	if err != nil {
		return err
	}
	if err := tell(ctx, nil, c.Root.Program(c.To, "sandboxd"), c.args("config", "check")...); err != nil {
		return fmt.Errorf("nothing was changed: its configuration: %w", err)
	}
	fmt.Fprintf(c.Out, "changing from %s to %s, without a trial\n", j.From, c.To)
	err = errors.Join(putUnits(c.Root, c.To, c.Units), c.Root.Point(versions.Previous, j.From), c.Root.Point(versions.Current, c.To))
	if err == nil {
		limited, cancel := context.WithTimeout(ctx, backLimit)
		defer cancel()
		err = c.restart(limited)
	}
	if err != nil {
		return fmt.Errorf("sandboxd %s was not tried, and does not run: %w; to go back: sandboxd rollback", c.To, err)
	}
	return nil
}

// FailpointNames lists the steps of a change and of its undoing, for tests that kill whoever does
// them.
func FailpointNames() []string {
	return []string{
		"upgrade:journal", "upgrade:arm", "upgrade:units", "upgrade:previous", "upgrade:current", "upgrade:restart", "upgrade:gate",
		"upgrade:done", "upgrade:disarm", "settle:journal", "settle:state", "settle:links", "settle:done", "settle:disarm",
	}
}

// journal checks that the change can begin, and returns what to write down of it.
func (c *Change) journal() (*versions.Journal, error) {
	last, err := c.Root.Journal()
	if err != nil {
		return nil, err
	}
	if last.UnderWay() {
		return nil, errs.New(errs.WrongState, "a change to %s was interrupted, and the daemon has not undone it yet: restart sandboxd, "+
			"and try again", last.To)
	}
	if busy, err := c.Root.Packaging(); err != nil {
		return nil, err
	} else if busy {
		return nil, errs.New(errs.WrongState, "a package manager is replacing the version of sandboxd: wait until it ends; if it was "+
			"interrupted, let it finish first (dpkg --configure -a, or install the package again)")
	}
	j := &versions.Journal{Step: versions.Trial, To: c.To, Nonce: rand.Text(), Units: c.Units, Started: time.Now().UTC()}
	if j.From, err = c.Root.Named(versions.Current); err != nil {
		return nil, err
	}
	switch {
	case j.From == "":
		return nil, errs.New(errs.WrongState, "%s names no current version: install a package of sandboxd", c.Root)
	case j.From == c.To:
		return nil, errs.New(errs.WrongState, "sandboxd %s is the current version already", c.To)
	case !c.Root.Has(c.To):
		return nil, errs.New(errs.NotFound, "sandboxd %s is not there: sandboxd versions lists those that are", c.To)
	}
	if j.Before, err = c.Root.Named(versions.Previous); err != nil {
		return nil, err
	}
	if !c.Root.Has(j.Before) {
		j.Before = ""
	}
	if j.FromSchema, err = c.Root.Schema(j.From); err != nil {
		return nil, err
	}
	if j.ToSchema, err = c.Root.Schema(c.To); err != nil {
		return nil, err
	}
	return j, nil
}

// reads fails if the other version cannot read the state.
func (c *Change) reads(j *versions.Journal, before *view) error {
	if j.ToSchema >= j.FromSchema {
		return nil
	}
	advice := "To go back, stop the service, restore a backup of that time with sandboxd restore, and install the older package"
	if before.kept != "" {
		advice = fmt.Sprintf("What the state was before that is kept in %s, of %s. To go back to it, and lose what was changed since: "+
			"stop the service (systemctl stop sandboxd.socket sandboxd.service), put that file in the place of %s, and do the same again",
			before.kept, before.keptAt.UTC().Format(time.RFC3339), before.state)
	}
	return errs.New(errs.WrongState, "sandboxd %s reads state up to schema %d, and %s has written schema %d: it cannot read it. %s",
		c.To, j.ToSchema, j.From, j.FromSchema, advice)
}

// backLimit is how long the version of before may take to start: as long as the service's unit gives it
// (TimeoutStopSec=, TimeoutStartSec=).
const backLimit = 11 * time.Minute

// try lets the new version run, and looks whether it is good. Everything that it does is undone by
// undo, from any point on.
func (c *Change) try(ctx context.Context, j *versions.Journal, before *view) error {
	trial, cancel := context.WithTimeoutCause(ctx, c.Limit, fmt.Errorf("it was not found good within %s", c.Limit))
	defer cancel()
	steps := []struct {
		name string
		do   func() error
	}{
		{"journal", func() error { return c.Root.Note(j) }},
		{"arm", func() error { return c.Root.Point(versions.Undo, j.From) }},
		{"units", func() error { return putUnits(c.Root, j.To, j.Units) }},
		{"previous", func() error { return c.Root.Point(versions.Previous, j.From) }},
		{"current", func() error { return c.Root.Point(versions.Current, j.To) }},
		{"restart", func() error { return inTime(trial, c.restart) }},
		{"gate", func() error { return inTime(trial, func(ctx context.Context) error { return c.gate(ctx, j, before) }) }},
		{"done", func() error {
			done := *j
			done.Step, done.Ended = versions.Done, time.Now().UTC()
			if c.soaks(j, before) {
				done.SoakUntil = done.Ended.Add(c.Soak)
			}
			return c.Root.Note(&done)
		}},
		// Without the link, a unit does not call the old program any more.
		{"disarm", func() error {
			if c.soaks(j, before) { // the daemon disarms when that is over
				return nil
			}
			return c.Root.Disarm()
		}},
	}
	for _, s := range steps {
		if err := failpoint.Pass("upgrade:" + s.name); err != nil {
			return err
		}
		if err := s.do(); err != nil {
			return err
		}
	}
	return nil
}

// soaks reports whether a crash of the new version, when it was found good, is undone. With a newer schema that
// would lose what was changed since; and a version that did not serve is none to go back to.
func (c *Change) soaks(j *versions.Journal, before *view) bool {
	return c.Soak > 0 && j.FromSchema == j.ToSchema && before.dead == nil
}

// inTime does a step. Its error says why ctx has ended, if it has.
func inTime(ctx context.Context, do func(context.Context) error) error {
	err := do(ctx)
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

func (c *Change) restart(ctx context.Context) error {
	if err := c.Restart(ctx); err != nil {
		return fmt.Errorf("restart the daemon: %w", err)
	}
	return nil
}

// back lets the version of before run again, and returns why. It cannot be interrupted.
func (c *Change) back(ctx context.Context, j *versions.Journal, before *view, why error) error {
	limit := backLimit
	if before.dead != nil { // it did not run before either
		limit = c.Limit
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	if now, err := c.Root.Journal(); err == nil && now != nil && now.Step == versions.Done && now.Nonce == j.Nonce {
		return fmt.Errorf("sandboxd %s runs; what was left to do failed: %w", j.To, why)
	}
	fmt.Fprintf(c.Out, "%s is not good: %v\ngoing back to %s\n", j.To, why, j.From)
	j.Step, j.Reason = versions.Undoing, why.Error()
	// The daemon that starts does all of it again, and puts the state back, which it alone can: then the
	// daemon of the new version has ended.
	err := errors.Join(c.Root.Release(), c.Root.Note(j), turnBack(c.Root, j), c.restart(ctx))
	if err == nil {
		err = c.ran(ctx, j.From)
	}
	if err != nil {
		return fmt.Errorf("sandboxd %s is not good: %w; and %s does not run again: %w. See the service's log, and start it", j.To, why,
			j.From, err)
	}
	return fmt.Errorf("sandboxd %s is not good, and %s runs again: %w", j.To, j.From, why)
}
