package exec

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/client"
)

func newCommand(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "command",
		Short: "Manage commands that exec -d has started, and sessions",
		Example: `  id=$(sandboxctl exec -d lab -- make test)
  sandboxctl command logs -f lab $id`,
	}
	cmd.AddCommand(newCommandLogs(p), newCommandStatus(p), newCommandKill(p), newSession(p))
	return cmd
}

func newCommandLogs(p *command.Program) *cobra.Command {
	var (
		follow bool
		tail   func() (int, error)
	)
	cmd := &cobra.Command{
		Use:   "logs [-f] [-n LINES] SANDBOX COMMAND-ID",
		Short: "Print the output of a command",
		Example: `  sandboxctl command logs lab $id
  sandboxctl command logs -f lab $id
  sandboxctl command logs -n 20 lab $id`,
		Args: cobra.ExactArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			lines, err := tail()
			if err != nil {
				return err
			}
			switch {
			case lines != client.AllLines:
				err = cl.Commands(args[0]).LastLines(ctx, args[1], lines, follow, os.Stdout)
			case follow:
				err = cl.Commands(args[0]).Follow(ctx, args[1], 0, os.Stdout)
			default:
				_, err = cl.Commands(args[0]).Logs(ctx, args[1], 0, os.Stdout)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return err
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "follow the output until the command ends")
	tail = tailFlag(cmd)
	return cmd
}

func newCommandStatus(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:     "status SANDBOX COMMAND-ID",
		Short:   "Print the state of a command as JSON",
		Example: `  sandboxctl command status lab $id | jq .exit_code`,
		Args:    cobra.ExactArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			st, err := cl.Commands(args[0]).Status(ctx, args[1])
			if err != nil {
				return err
			}
			return text.JSON(os.Stdout, st)
		}),
	}
}

func newCommandKill(p *command.Program) *cobra.Command {
	var sig string
	cmd := &cobra.Command{
		Use:   "kill SANDBOX COMMAND-ID",
		Short: "Stop a command: send SIGTERM, and SIGKILL after three seconds",
		Example: `  sandboxctl command kill lab $id
  sandboxctl command kill -s SIGINT lab $id`,
		Args: cobra.ExactArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			if sig != "" {
				return cl.Commands(args[0]).Signal(ctx, args[1], command.SignalName(sig))
			}
			return cl.Commands(args[0]).Interrupt(ctx, args[1])
		}),
	}
	cmd.Flags().StringVarP(&sig, "signal", "s", "", "send only this signal, such as SIGINT")
	return cmd
}
