package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newRenew(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:     "renew SANDBOX DURATION",
		Short:   "Make a sandbox expire DURATION from now, and print that time",
		Example: `  sandboxctl renew lab 30m`,
		Args:    cobra.ExactArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			d, err := command.Duration(args[1])
			if err != nil || d <= 0 {
				return errs.New(errs.Invalid, "%q: want a duration above 0, such as 90s, 30m, 2h or a number of seconds",
					text.Clip(args[1], 40))
			}
			t, err := cl.Renew(ctx, args[0], time.Now().Add(d))
			if err != nil {
				return err
			}
			_, err = fmt.Println(t.Format(time.RFC3339))
			return err
		}),
	}
}
