package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newRm(c *cli) *cobra.Command {
	var force bool
	cmd := verb(c, "rm [-f] SANDBOX...", "Destroy sandboxes, running ones too", func(cl *client.Client, ctx context.Context, id string) error {
		err := cl.Delete(ctx, id)
		if force && errs.Is(err, errs.NotFound) {
			return errNothing
		}
		return err
	})
	cmd.Example = `  sandboxctl rm lab
  sandboxctl rm -f $(sandboxctl ps -aq)`
	cmd.Flags().BoolVarP(&force, "force", "f", false, "what does not exist is no error")
	return cmd
}
