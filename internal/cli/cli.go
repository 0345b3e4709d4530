// Package cli is the command line of sandboxd: it puts the rooms below it
// together. A room makes the commands of one subject and imports no other room:
//
//	sandbox    run, create, ps, inspect, update, rename, start, stop, restart, kill, pause, resume, wait, renew, rm
//	exec       exec, shell, attach, command, logs
//	code       eval, code
//	files      cp, diff
//	network    egress, endpoint, network, port
//	secret     secret
//	observe    events, stats, top, diagnostics
//	pool       pool
//	image, images, tag, commit, rmi, volume, snapshot
//	system     system, version, key
//	bench
//
// All stand on three: command holds what every command needs, foreground runs a
// command of a sandbox as if it ran here, text prints. Package command shows how
// a command is written. Package group refuses what is no command.
package cli

import (
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/bench"
	"github.com/sandboxd/sandboxd/internal/cli/code"
	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/exec"
	"github.com/sandboxd/sandboxd/internal/cli/files"
	"github.com/sandboxd/sandboxd/internal/cli/fork"
	"github.com/sandboxd/sandboxd/internal/cli/image"
	"github.com/sandboxd/sandboxd/internal/cli/network"
	"github.com/sandboxd/sandboxd/internal/cli/observe"
	"github.com/sandboxd/sandboxd/internal/cli/pool"
	"github.com/sandboxd/sandboxd/internal/cli/sandbox"
	"github.com/sandboxd/sandboxd/internal/cli/secret"
	"github.com/sandboxd/sandboxd/internal/cli/snapshot"
	"github.com/sandboxd/sandboxd/internal/cli/system"
	"github.com/sandboxd/sandboxd/internal/cli/volume"
)

// Run runs the command that args name, and returns the exit status of the
// process. version is that of this program.
func Run(version string, args []string) int { return command.Execute(newRoot(version), args) }

func newRoot(version string) *cobra.Command {
	p := command.New(version)
	root := &cobra.Command{
		Use:   "sandboxctl",
		Short: "Run untrusted code in sandboxes of sandboxd",
		Example: `  sandboxctl run python -- python3 -c 'print(6*7)'
  sandboxctl create python --name lab --memory 256Mi --timeout 30m
  sandboxctl exec lab -- uname -a
  sandboxctl shell lab
  sandboxctl rm lab`,
	}
	for _, room := range []func(*command.Program) []*cobra.Command{
		sandbox.Commands, fork.Commands, exec.Commands, code.Commands, files.Commands, network.Commands, secret.Commands, observe.Commands,
		pool.Commands, image.Commands, volume.Commands, snapshot.Commands, system.Commands, bench.Commands,
	} {
		root.AddCommand(room(p)...)
	}
	p.Prepare(root)
	return root
}
