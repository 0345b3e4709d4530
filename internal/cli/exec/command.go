package exec

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/client"
)

func newCommand(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "command",
		Short: "List and manage the commands of a sandbox, and sessions",
		Example: `  id=$(sandboxctl exec -d lab -- make test)
  sandboxctl command ls lab
  sandboxctl command logs -f lab $id`,
	}
	cmd.AddCommand(newCommandLs(p), newCommandLogs(p), newCommandStatus(p), newCommandKill(p), newSession(p))
	return cmd
}

func newCommandLs(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:     "ls SANDBOX",
		Aliases: []string{"list"},
		Short:   "List the commands of a sandbox, the newest first",
		Long: `List the commands of a sandbox, the newest first: its entrypoint, all commands that run,
and the last thousand that have ended.`,
		Example: `  sandboxctl command ls lab
  sandboxctl command ls lab -o json | jq '.[] | select(.running)'`,
		Args: cobra.ExactArgs(1),
		RunE: commands(&o).Of(p, &o, func(ctx context.Context, cl *client.Client, args []string) ([]agent.CommandStatus, error) {
			return cl.Commands(args[0]).List(ctx)
		}),
	}
	o.Flags(cmd, true)
	commands(&o).FormatFlag(cmd, &o)
	cmd.Flags().BoolVar(&o.Full, "no-trunc", false, "do not truncate commands")
	return cmd
}

// commands is how the commands of a sandbox are listed.
func commands(o *command.Output) command.Listing[agent.CommandStatus] {
	started := func(c agent.CommandStatus) string {
		t, err := time.Parse(time.RFC3339, c.StartedAt)
		if err != nil {
			return "" // a guest may write it
		}
		return text.Ago(t)
	}
	line := func(c agent.CommandStatus) string {
		if o.Full {
			return c.Content
		}
		return text.Clip(c.Content, 40)
	}
	return command.Listing[agent.CommandStatus]{
		Name:   func(c agent.CommandStatus) string { return c.ID },
		Header: []string{"ID", "STATE", "STARTED", "COMMAND"},
		Row:    func(c agent.CommandStatus) []string { return []string{c.ID, stateOf(c), started(c), line(c)} },
		Docker: func(c agent.CommandStatus) command.Fields {
			return command.Fields{
				"ID": c.ID, "Status": stateOf(c), "RunningFor": started(c), "CreatedAt": c.StartedAt, "Command": strconv.Quote(line(c)),
			}
		},
	}
}

// stateOf is whether a command runs, or how it ended.
func stateOf(c agent.CommandStatus) string {
	switch {
	case c.Running:
		return "running"
	case c.ExitCode == nil:
		return "ended (" + c.Reason + ")"
	case c.Reason != "" && c.Reason != agent.ReasonExited:
		return fmt.Sprintf("exited (%d, %s)", *c.ExitCode, c.Reason)
	}
	return fmt.Sprintf("exited (%d)", *c.ExitCode)
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
				err = cl.Commands(args[0]).LastLines(ctx, args[1], lines, follow, command.Notices(), os.Stdout)
			case follow:
				err = cl.Commands(args[0]).Follow(ctx, args[1], 0, command.Notices(), os.Stdout)
			default:
				_, err = cl.Commands(args[0]).Logs(ctx, args[1], 0, os.Stdout)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return err
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "follow the output until the command ends, also over restarts of the daemon")
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
