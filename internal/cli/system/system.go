// Package system has the commands for the daemon itself: what it is, its disks, its
// API keys, draining it, backing it up.
//
// What surprises: `system restore` runs sandboxd on this host, because the daemon
// is stopped for it.
package system

import (
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	return []*cobra.Command{newSystem(p), newVersion(p), newKey(p)}
}

func newSystem(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use: "system", Short: "Show the daemon and its host, prune and drain it, and back up and restore its state",
		Example: `  sandboxctl system info
  sandboxctl system backup -o state.tar.gz`,
	}
	cmd.AddCommand(newSystemInfo(p), newSystemDf(p), newSystemPrune(p), newSystemDrain(p), newSystemBackup(p), newSystemBackups(p),
		newSystemRestore())
	return cmd
}
