package cli

import (
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
)

func newResume(c *cli) *cobra.Command {
	cmd := verb(c, "resume SANDBOX...", "Thaw sandboxes that were paused", (*client.Client).Resume)
	cmd.Aliases = []string{"unpause"}
	cmd.Example = `  sandboxctl resume lab`
	return cmd
}
