// Package exec has the commands that run programs in a sandbox that exists: exec
// and shell, attach to come back to a terminal, command for programs in the
// background and for sessions of a shell, and logs, the output of the entrypoint.
//
// What surprises: what runs at a terminal belongs to the sandbox. It goes on when
// sandboxctl leaves or the daemon is restarted.
package exec

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/foreground"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	return []*cobra.Command{newExec(p), newShell(p), newAttach(p), newCommand(p), newLogs(p)}
}

func newExec(p *command.Program) *cobra.Command {
	var (
		f             foreground.Flags
		env, envFiles []string
		detach        bool
	)
	cmd := &cobra.Command{
		Use:   "exec [flags] SANDBOX [--] COMMAND [ARG...]",
		Short: "Run a command in a sandbox",
		Long: `Run a command in a sandbox. The exit status is the same as for run. Ctrl-C goes to
the command; a second Ctrl-C kills it.

The command keeps running when the daemon is restarted. exec waits for the daemon, and
the output goes on where it was.

With -it the command runs at this terminal. It also keeps running when you press the
detach keys: see sandboxctl attach.

With --detach, exec prints the command's id and the command runs in the background:
see sandboxctl command.`,
		Example: `  sandboxctl exec lab -- uname -a
  echo hello | sandboxctl exec -i lab cat
  sandboxctl exec --timeout 30s -u 1000 -w /tmp lab -- sh -c 'make && ./a.out'
  id=$(sandboxctl exec -d lab sleep 60)`,
		Args: cobra.MinimumNArgs(2),
	}
	cmd.RunE = p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
		if err := command.FlagsFirst(cmd, args); err != nil {
			return err
		}
		if err := f.Check(); err != nil {
			return err
		}
		argv := command.AfterDash(args[1:])
		if len(argv) == 0 {
			return errs.New(errs.Invalid, "no command; example: sandboxctl exec %s -- uname -a", args[0])
		}
		vars, err := command.Environment(env, envFiles)
		if err != nil {
			return err
		}
		j := foreground.Job{Client: cl, Sandbox: args[0], Command: f.Command(argv, command.Flat(vars)), User: f.User}
		if detach && f.TTY {
			return errs.New(errs.Invalid, "-d and -t exclude each other; start the command with -it and press the detach keys")
		}
		if detach {
			return background(ctx, j)
		}
		j.Signals = foreground.Catch()
		defer j.Signals.Stop()
		return f.Run(j)
	})
	cmd.Flags().SetInterspersed(false)
	f.Add(cmd)
	cmd.Flags().StringArrayVarP(&env, "env", "e", nil, "environment variable: NAME=VALUE, or NAME to pass on the local value")
	cmd.Flags().StringArrayVar(&envFiles, "env-file", nil, "file of environment variables, one NAME=VALUE a line")
	cmd.Flags().BoolVarP(&detach, "detach", "d", false, "run the command in the background and print its id")
	return cmd
}

// background starts a command that is left alone, and prints its id.
func background(ctx context.Context, j foreground.Job) error {
	if j.Command.Stdin {
		return errs.New(errs.Invalid, "-d and -i exclude each other: a background command has no standard input")
	}
	j.Command.Background = true
	if err := j.SetUser(ctx); err != nil {
		return err
	}
	p, err := j.Client.Start(ctx, j.Sandbox, j.Command)
	if err != nil {
		return err
	}
	defer p.Close()
	_, err = fmt.Println(p.ID)
	return err
}
