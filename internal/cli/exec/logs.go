package exec

import (
	"context"
	"io"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// tailFlag adds docker's flag for the end of an output. The function that it
// returns gives the number of lines, or client.AllLines.
func tailFlag(cmd *cobra.Command) func() (int, error) {
	tail := cmd.Flags().StringP("tail", "n", "all", "number of lines to show from the end; with -f, 0 shows new output only")
	return func() (int, error) {
		if *tail == "all" {
			return client.AllLines, nil
		}
		n, err := strconv.Atoi(*tail)
		if err != nil || n < 0 || n > agent.MaxLines {
			return 0, errs.New(errs.Invalid, "--tail %q: want a number of lines from 0 to %d, or all",
				text.Clip(*tail, 40), agent.MaxLines)
		}
		return n, nil
	}
}

func newLogs(p *command.Program) *cobra.Command {
	var (
		follow bool
		tail   func() (int, error)
	)
	cmd := &cobra.Command{
		Use:   "logs [-f] [-n LINES] SANDBOX",
		Short: "Print the output of a sandbox's entrypoint",
		Example: `  sandboxctl logs lab
  sandboxctl logs -f lab
  sandboxctl logs -f -n 20 lab`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			lines, err := tail()
			if err != nil {
				return err
			}
			if follow {
				err = cl.FollowLogs(ctx, args[0], lines, command.Notices(), os.Stdout)
			} else {
				err = printLogs(ctx, cl, args[0], lines)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return err
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "follow the output until the entrypoint ends, also over restarts of the daemon")
	tail = tailFlag(cmd)
	return cmd
}

func printLogs(ctx context.Context, cl *client.Client, sandbox string, lines int) error {
	rc, err := cl.Logs(ctx, sandbox, lines)
	if err != nil {
		return err
	}
	defer rc.Close()
	_, err = io.Copy(os.Stdout, rc)
	return err
}
