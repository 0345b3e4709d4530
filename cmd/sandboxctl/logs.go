package main

import (
	"io"
	"os"

	"github.com/spf13/cobra"
)

func newLogs(c *cli) *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "logs [-f] SANDBOX",
		Short: "Print the output of a sandbox's entrypoint",
		Example: `  sandboxctl logs lab
  sandboxctl logs -f lab`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.connect()
			if err != nil {
				return err
			}
			rc, err := cl.Logs(cmd.Context(), args[0], follow)
			if err != nil {
				return err
			}
			defer rc.Close()
			_, err = io.Copy(os.Stdout, rc)
			if cmd.Context().Err() != nil {
				return cmd.Context().Err()
			}
			return err
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "until the entrypoint ends")
	return cmd
}
