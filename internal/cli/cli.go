// Package cli is the command line of sandboxd: it puts the rooms below it
// together. A room makes the commands of one subject and imports no other room.
//
// All stand on three: command holds what every command needs, foreground runs a
// command of a sandbox as if it ran here, text prints. Package command shows how
// a command is written. Package group refuses what is no command, and package words
// knows docker's.
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
	for _, subject := range subjects {
		root.AddGroup(&cobra.Group{ID: subject.title, Title: subject.title + ":"})
		for _, room := range subject.rooms {
			for _, cmd := range room(p) {
				cmd.GroupID = subject.title
				root.AddCommand(cmd)
			}
		}
	}
	p.Prepare(root)
	return root
}

// subjects are the commands in the order in which help lists them.
var subjects = []struct {
	title string
	rooms []func(*command.Program) []*cobra.Command
}{
	{"Sandboxes", []func(*command.Program) []*cobra.Command{sandbox.Commands}},
	{"Commands, code and files in sandboxes", []func(*command.Program) []*cobra.Command{exec.Commands, code.Commands, files.Commands}},
	{"Network and secrets", []func(*command.Program) []*cobra.Command{network.Commands, secret.Commands}},
	{"What sandboxes do and use", []func(*command.Program) []*cobra.Command{observe.Commands}},
	{"Copies of sandboxes, and ready ones", []func(*command.Program) []*cobra.Command{fork.Commands, snapshot.Commands, pool.Commands}},
	{"Images and volumes", []func(*command.Program) []*cobra.Command{image.Commands, volume.Commands}},
	{"The daemon and its host", []func(*command.Program) []*cobra.Command{system.Commands, bench.Commands}},
}
