package system

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newSystemDrain(p *command.Program) *cobra.Command {
	var (
		off, wait bool
		timeout   time.Duration
	)
	cmd := &cobra.Command{
		Use:   "drain",
		Short: "Refuse to create and start sandboxes; running ones keep running",
		Long: `Make the daemon refuse to create and start sandboxes, even after a restart, until
"drain --off". Running sandboxes keep running. Sandboxes that wait to be created are still created.`,
		Example: `  sandboxctl system drain --wait --timeout 1h && systemctl reboot
  sandboxctl system drain --off`,
		Args: cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			if off && wait || timeout != 0 && !wait {
				return errs.New(errs.Invalid, "--wait and --off exclude each other, and --timeout needs --wait")
			}
			if err := cl.System().Drain(ctx, !off); err != nil || !wait {
				return err
			}
			return awaitNone(ctx, cl, timeout)
		}),
	}
	cmd.Flags().BoolVar(&off, "off", false, "create sandboxes again")
	cmd.Flags().BoolVar(&wait, "wait", false, "return when no sandbox runs or is paused")
	command.DurationFlag(cmd.Flags(), &timeout, "timeout", "", 0, "maximum time to wait, such as 10m (default: no limit)")
	return cmd
}

// lookAgain is how often to count without an event: a stream of events may lose
// some, and may end.
const lookAgain = 5 * time.Second

// awaitNone returns when no sandbox has processes or is about to have some. It
// counts the sandboxes at least once, however short the timeout is: the error says
// how many are left.
func awaitNone(ctx context.Context, cl *client.Client, timeout time.Duration) error {
	count := ctx
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	changed := make(chan struct{}, 1)
	go func() {
		for range cl.Events(ctx, time.Time{}, client.Notices{}) {
			select {
			case changed <- struct{}{}:
			default:
			}
		}
	}()
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	for last := -1; ; {
		n, err := alive(count, cl)
		count = ctx
		switch {
		case err == nil && n == 0, err != nil && last < 0:
			return err
		case errors.Is(ctx.Err(), context.DeadlineExceeded):
			return errs.New(errs.Unavailable, "%s after %s; the host keeps draining",
				errs.Count(max(last, n), "sandbox still runs, waits or is paused", "sandboxes still run, wait or are paused"), timeout)
		case err != nil:
			return err
		case n != last && command.IsTerminal(os.Stderr):
			fmt.Fprintln(os.Stderr, errs.Count(n, "sandbox is left", "sandboxes are left"))
		}
		last = n
		select {
		case <-ctx.Done():
		case <-changed:
		case <-tick.C:
		}
	}
}

// alive counts the sandboxes that have not ended.
func alive(ctx context.Context, cl *client.Client) (n int, err error) {
	i, err := cl.System().Info(ctx)
	for state, count := range i.Sandboxes {
		if state != wire.Terminated && state != wire.Failed {
			n += count
		}
	}
	return n, err
}
