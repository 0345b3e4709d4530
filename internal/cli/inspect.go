package cli

import (
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
)

func newInspect(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:   "inspect SANDBOX...",
		Short: "Print all there is to know of sandboxes, as JSON",
		Example: `  sandboxctl inspect lab
  sandboxctl inspect lab | jq -r '.[0].status.reason'`,
		Args: cobra.MinimumNArgs(1),
		RunE: inspecting(c, (*client.Client).Inspect),
	}
}
