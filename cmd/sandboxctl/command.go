package main

import (
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
)

func newCommand(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "command",
		Short: "Look after commands that exec -d has started",
	}
	cmd.AddCommand(newCommandLogs(c), newCommandStatus(c), newCommandKill(c))
	return cmd
}

func newCommandLogs(c *cli) *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "logs [-f] SANDBOX COMMAND-ID",
		Short: "Print the output of a command",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.connect()
			if err != nil {
				return err
			}
			cursor, err := cl.CommandLogs(cmd.Context(), args[0], args[1], 0, os.Stdout)
			if err != nil || !follow {
				return err
			}
			return followCommand(cmd, cl, args[0], args[1], cursor, os.Stdout)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "until the command ends")
	return cmd
}

// followCommand copies output until the command has ended and all is copied.
func followCommand(cmd *cobra.Command, cl *client.Client, sandbox, id string, cursor int64, w io.Writer) error {
	tick := time.NewTicker(250 * time.Millisecond) // the agent has no way to wait for output
	defer tick.Stop()
	for {
		st, err := cl.CommandStatus(cmd.Context(), sandbox, id) // before the output, so that none is missed
		if err != nil {
			return err
		}
		if cursor, err = cl.CommandLogs(cmd.Context(), sandbox, id, cursor, w); err != nil || !st.Running {
			return err
		}
		select {
		case <-cmd.Context().Done():
			return cmd.Context().Err()
		case <-tick.C:
		}
	}
}

func newCommandStatus(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:   "status SANDBOX COMMAND-ID",
		Short: "Print the state of a command as JSON",
		Args:  cobra.ExactArgs(2),
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
		Args:  cobra.ExactArgs(2),
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
