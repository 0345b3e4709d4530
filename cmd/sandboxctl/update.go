package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newUpdate(c *cli) *cobra.Command {
	var l limits
	cmd := &cobra.Command{
		Use:   "update [flags] SANDBOX...",
		Short: "Change limits of sandboxes that run",
		Long: `Change limits of sandboxes that run or are paused, and print their ids. What
they use already they keep: less memory or disk than that is refused. For their
timeout see sandboxctl renew.`,
		Example: `  sandboxctl update --memory 1Gi --cpu 2 lab
  sandboxctl update --io-write-bps max lab`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			change := map[string]string{}
			if err := l.into(change); err != nil {
				return err
			}
			if len(change) == 0 {
				return errs.New(errs.Invalid, "nothing to change: name a limit, as in: sandboxctl update --memory 1Gi %s", args[0])
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			return each(args, func(id string) error {
				i, err := cl.Update(cmd.Context(), id, change)
				if err != nil {
					return err
				}
				for _, note := range i.Notes {
					fmt.Fprintln(os.Stderr, "sandboxctl: note:", printable(note, false))
				}
				_, err = fmt.Println(i.ID)
				return err
			})
		},
	}
	l.flags(cmd)
	return cmd
}
