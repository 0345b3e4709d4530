package sandbox

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newRm(p *command.Program) *cobra.Command {
	var force bool
	cmd := p.Verb(&cobra.Command{
		Use:   "rm [-f] SANDBOX...",
		Short: "Remove sandboxes that have ended; with -f, also those that have not",
		Long: `Remove sandboxes that have ended, with their files. A sandbox that has not ended, as one
that runs, is paused or hibernates, is removed only with -f, which kills it first.`,
		Example: `  sandboxctl rm lab
  sandboxctl rm -f $(sandboxctl ps -aq)`,
	}, func(ctx context.Context, cl *client.Client, id string) error {
		if !force {
			return client.Remove(ctx, cl, id)
		}
		err := cl.Delete(ctx, id)
		if errs.Is(err, errs.NotFound) {
			return command.ErrNothing
		}
		return err
	})
	cmd.Flags().BoolVarP(&force, "force", "f", false, "also remove sandboxes that have not ended, and ignore those that do not exist")
	return cmd
}
