package sandbox

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

func newInspect(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "inspect SANDBOX...",
		Short: "Print detailed information on sandboxes, as JSON",
		Example: `  sandboxctl inspect lab
  sandboxctl inspect lab | jq -r '.[0].status.reason'`,
		Args: cobra.MinimumNArgs(1),
		RunE: command.Inspect(p, func(ctx context.Context, cl *client.Client, id string) (wire.Inspection, error) {
			return cl.Inspect(ctx, id)
		}),
	}
}
