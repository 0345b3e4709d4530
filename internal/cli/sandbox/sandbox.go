// Package sandbox has the commands for the life of sandboxes: from run and create,
// whose flags are a spec, to rm.
//
// What surprises: the sandbox of a run has a lease, a timeout that run renews
// while the command runs, so that it goes by itself when sandboxctl is killed.
package sandbox

import (
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	return []*cobra.Command{
		newCreate(p), newRun(p), newPs(p), newInspect(p), newUpdate(p), newRename(p), newStart(p), newStop(p), newRestart(p), newKill(p),
		newPause(p), newHibernate(p), newResume(p), newWait(p), newRenew(p), newRm(p),
	}
}
