package exec

import (
	"context"
	"io"
	"os"
	"strconv"
	"time"

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
		times  client.LogTimes
		since  string
		tail   func() (int, error)
	)
	cmd := &cobra.Command{
		Use:   "logs [-ft] [-n LINES] [--since TIME] SANDBOX",
		Short: "Print the output of a sandbox's entrypoint",
		Long: `Print the output of a sandbox's entrypoint: all that is kept, also after the end of the
sandbox. The times of -t and --since are exact for new output and rougher for older
output. They are not kept when the sandbox has ended.`,
		Example: `  sandboxctl logs lab
  sandboxctl logs -f lab
  sandboxctl logs -t --since 10m lab
  sandboxctl logs -f -n 20 lab`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			lines, err := tail()
			if err != nil {
				return err
			}
			if times.Since, err = command.Since("--since", since, time.Now()); err != nil {
				return err
			}
			if follow {
				err = cl.FollowLogs(ctx, args[0], lines, times, command.Notices(), os.Stdout)
			} else {
				err = printLogs(ctx, cl, args[0], lines, times)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return err
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "follow the output until the entrypoint ends, also over restarts of the daemon")
	cmd.Flags().BoolVarP(&times.Stamps, "timestamps", "t", false, "print the time before each line")
	cmd.Flags().StringVar(&since, "since", "", "begin with the output since this time: a duration such as 10m, a time or Unix seconds")
	tail = tailFlag(cmd)
	return cmd
}

func printLogs(ctx context.Context, cl *client.Client, sandbox string, lines int, times client.LogTimes) error {
	rc, err := cl.Logs(ctx, sandbox, lines, times)
	if err != nil {
		return err
	}
	defer rc.Close()
	_, err = io.Copy(os.Stdout, rc)
	return err
}
