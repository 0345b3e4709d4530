package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newWait(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "wait SANDBOX...",
		Short: "Wait until sandboxes have ended, and print their exit codes",
		Long: `Wait until sandboxes have ended, and print the exit codes of their entrypoints, one a
line, in the order of the arguments. A sandbox that its restart policy starts again has
not ended. 137 stands for a sandbox whose processes were killed: by kill, rm, its
timeout or its memory limit.`,
		Example: `  sandboxctl wait lab
  code=$(sandboxctl wait $(sandboxctl run -d python -- python3 job.py))`,
		Args: cobra.MinimumNArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			news := hear(ctx, cl)
			return command.Every(args, func(name string) error {
				code, err := awaitEnd(ctx, cl, name, news)
				if err == nil {
					_, err = fmt.Println(code)
				}
				return err
			})
		}),
	}
}

// How often to look at a sandbox of which no event comes, and how long a daemon may be
// away: it restarts, and sandboxes live on.
const (
	lookAgain = time.Second
	away      = time.Minute
)

// hear returns a channel that has a value when something has happened to a sandbox.
func hear(ctx context.Context, cl *client.Client) <-chan struct{} {
	news := make(chan struct{}, 1)
	go func() {
		for range cl.Events(ctx, time.Time{}, client.Notices{}) {
			select {
			case news <- struct{}{}:
			default:
			}
		}
	}()
	return news
}

// awaitEnd returns the exit code of a sandbox once it has ended. news only saves time:
// without any, the sandbox is looked at every second.
func awaitEnd(ctx context.Context, cl *client.Client, name string, news <-chan struct{}) (int, error) {
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	var seen time.Time
	for {
		sb, err := cl.Get(ctx, name)
		switch {
		case err == nil && (sb.Status.State == wire.Terminated || sb.Status.State == wire.Failed):
			return exitCode(sb), nil
		case err == nil:
			seen, name = time.Now(), sb.ID // its name may soon be another's
		case ctx.Err() != nil:
			return 0, ctx.Err()
		case errs.Is(err, errs.NotFound) && !seen.IsZero():
			return command.ExitKilled, nil // it was removed, which kills
		case !errs.Is(err, errs.Unavailable) || time.Since(seen) > away:
			return 0, err
		}
		select {
		case <-news:
		case <-tick.C:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// exitCode is that of the entrypoint of an ended sandbox, or the one that a shell would
// give it.
func exitCode(sb wire.Sandbox) int {
	switch {
	case sb.Sandboxd != nil && sb.Sandboxd.ExitCode != nil:
		return *sb.Sandboxd.ExitCode
	case sb.Status.Reason == "create_failed", sb.Status.Reason == "start_failed", sb.Status.Reason == "timeout":
		return command.ExitFailed
	}
	return command.ExitKilled
}
