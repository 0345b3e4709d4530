package sandbox

import (
	"fmt"
	"slices"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// next is the whole life of a sandbox; what it does not list is refused.
//
// Creating and Starting need no Stopping on the way to Ended: they are intents
// themselves, and their recovery ends the sandbox too. From Pausing and Resuming there is a way
// back for a freezer that refused. Prepared needs no Deleting on the way out: what
// recovery finds Prepared it releases.
var next = map[record.State][]record.State{
	record.Creating: {record.Running, record.Stopping, record.Ended, record.Deleting},
	record.Running:  {record.Pausing, record.Stopping, record.Deleting},
	record.Pausing:  {record.Paused, record.Running, record.Stopping, record.Deleting},
	record.Paused:   {record.Resuming, record.Stopping, record.Deleting},
	record.Resuming: {record.Running, record.Paused, record.Stopping, record.Deleting},
	record.Stopping: {record.Ended, record.Deleting},
	record.Ended:    {record.Starting, record.Deleting},
	record.Starting: {record.Running, record.Stopping, record.Ended, record.Deleting},
	record.Deleting: {},
	record.Prepared: {record.Creating},
}

func allowed(from, to record.State) bool { return slices.Contains(next[from], to) }

// live reports whether a sandbox in state s may have processes that are to
// stay alive.
func live(s record.State) bool {
	switch s {
	case record.Running, record.Pausing, record.Paused, record.Resuming:
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
