package cli

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
)

func newCommand(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "command",
		Short: "Look after commands that exec -d has started, and sessions of commands",
		Example: `  id=$(sandboxctl exec -d lab -- make test)
  sandboxctl command logs -f lab $id`,
	}
	cmd.AddCommand(newCommandLogs(c), newCommandStatus(c), newCommandKill(c), newSession(c))
	return cmd
}

func newCommandLogs(c *cli) *cobra.Command {
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
		RunE: func(cmd *cobra.Command, args []string) error {
			lines, err := tail()
			if err != nil {
				return err
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			switch ctx := cmd.Context(); {
			case lines != client.AllLines:
				err = cl.LastLines(ctx, args[0], args[1], lines, follow, os.Stdout)
			case follow:
				err = cl.FollowCommand(ctx, args[0], args[1], 0, os.Stdout)
			default:
				_, err = cl.CommandLogs(ctx, args[0], args[1], 0, os.Stdout)
			}
			if cmd.Context().Err() != nil {
				return cmd.Context().Err()
			}
			return err
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "until the command ends")
	tail = tailFlag(cmd)
	return cmd
}

func newCommandStatus(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:     "status SANDBOX COMMAND-ID",
		Short:   "Print the state of a command as JSON",
		Example: `  sandboxctl command status lab $id | jq .exit_code`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.connect()
			if err != nil {
				return err
			}
			st, err := cl.CommandStatus(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return printJSON(os.Stdout, st)
		},
	}
}

func newCommandKill(c *cli) *cobra.Command {
	var sig string
	cmd := &cobra.Command{
		Use:   "kill SANDBOX COMMAND-ID",
		Short: "End a command: SIGTERM, and SIGKILL after three seconds",
		Example: `  sandboxctl command kill lab $id
  sandboxctl command kill -s SIGINT lab $id`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.connect()
			if err != nil {
				return err
			}
			if sig != "" {
				return cl.SignalCommand(cmd.Context(), args[0], args[1], trimSignal(sig))
			}
			return cl.Interrupt(cmd.Context(), args[0], args[1])
		},
	}
	cmd.Flags().StringVarP(&sig, "signal", "s", "", "send this signal only, as SIGINT")
	return cmd
}
