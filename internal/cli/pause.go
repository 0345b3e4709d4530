package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
)

func newPause(c *cli) *cobra.Command {
	cmd := verb(c, "pause SANDBOX...", "Freeze all processes of sandboxes", (*client.Client).Pause)
	cmd.Example = `  sandboxctl pause lab
  sandboxctl pause $(sandboxctl ps -q --filter label=team=a)`
	return cmd
}

// errNothing is no error, but nothing was done that is worth a word.
var errNothing = errors.New("nothing done")

// verb makes a command that does one thing to every sandbox named and prints
// the names it did it to, as docker does.
func verb(c *cli, use, short string, f func(*client.Client, context.Context, string) error) *cobra.Command {
	return &cobra.Command{
		Use:   use,
		Short: short,
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.connect()
			if err != nil {
				return err
			}
			return each(args, func(id string) error {
				switch err := f(cl, cmd.Context(), id); {
				case errors.Is(err, errNothing):
					return nil
				case err != nil:
					return err
				}
				_, err := fmt.Println(id)
				return err
			})
		},
	}
}
