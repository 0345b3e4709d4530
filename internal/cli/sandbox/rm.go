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
		Short: "Remove sandboxes, even running ones",
		Example: `  sandboxctl rm lab
  sandboxctl rm -f $(sandboxctl ps -aq)`,
	}, func(ctx context.Context, cl *client.Client, id string) error {
		err := cl.Delete(ctx, id)
		if force && errs.Is(err, errs.NotFound) {
			return command.ErrNothing
		}
		return err
	})
	cmd.Flags().BoolVarP(&force, "force", "f", false, "ignore sandboxes that do not exist")
	return cmd
}
