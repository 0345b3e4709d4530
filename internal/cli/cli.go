// Package cli is the command line of sandboxd: it puts the commands together.
// Each room below it makes the commands of one subject from what package command
// gives it, and knows no other room:
//
//	sandbox   run, create, ps, update, stop, rm …: the life of sandboxes
//
// text prints, foreground runs a command as if it ran here.
package cli

import (
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/bench"
	"github.com/sandboxd/sandboxd/internal/cli/code"
	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/exec"
	"github.com/sandboxd/sandboxd/internal/cli/files"
	"github.com/sandboxd/sandboxd/internal/cli/image"
	"github.com/sandboxd/sandboxd/internal/cli/network"
	"github.com/sandboxd/sandboxd/internal/cli/observe"
	"github.com/sandboxd/sandboxd/internal/cli/sandbox"
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
	root.AddCommand(sandbox.Commands(p)...)
	root.AddCommand(exec.Commands(p)...)
	root.AddCommand(code.Commands(p)...)
	root.AddCommand(files.Commands(p)...)
	root.AddCommand(network.Commands(p)...)
	root.AddCommand(observe.Commands(p)...)
	root.AddCommand(image.Commands(p)...)
	root.AddCommand(volume.Commands(p)...)
	root.AddCommand(snapshot.Commands(p)...)
	root.AddCommand(system.Commands(p)...)
	root.AddCommand(bench.Commands(p)...)
	p.Prepare(root)
	return root
}
