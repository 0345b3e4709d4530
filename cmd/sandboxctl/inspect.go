package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
)

func newInspect(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:   "inspect SANDBOX...",
		Short: "Print all there is to know of sandboxes, as JSON",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.connect()
			if err != nil {
				return err
			}
			all := []client.Inspection{}
			err = each(args, func(id string) error {
				i, err := cl.Inspect(cmd.Context(), id)
				if err == nil {
					all = append(all, i)
				}
				return err
			})
			if perr := printJSON(os.Stdout, all); err == nil {
				err = perr
			}
			return err
		},
	}
}
