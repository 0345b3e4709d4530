package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newCreate(c *cli) *cobra.Command {
	var (
		s       spec
		o       output
		timeout time.Duration
		noWait  bool
	)
	cmd := &cobra.Command{
		Use:   "create [flags] IMAGE [-- COMMAND [ARG...]]",
		Short: "Create a sandbox and print its id",
		Long: `Create a sandbox and print its id.

With a COMMAND the sandbox ends when the command does; without, it lives until
its timeout or until it is removed.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(); err != nil {
				return err
			}
			r, err := s.request(args[0])
			if err != nil {
				return err
			}
			return c.create(cmd.Context(), r, argv(s.entrypoint, args[1:]), timeout, !noWait, o)
		},
	}
	s.flags(cmd)
	o.flags(cmd, true)
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "remove the sandbox after this time, as 30m (default: never)")
	cmd.Flags().BoolVar(&noWait, "no-wait", false, "print the id at once, while the sandbox is still being made")
	return cmd
}

// create makes a sandbox that stays and prints it.
func (c *cli) create(ctx context.Context, r client.CreateRequest, entrypoint []string, timeout time.Duration, wait bool, o output) error {
	cl, err := c.connect()
	if err != nil {
		return err
	}
	r.Entrypoint = entrypoint
	if len(entrypoint) == 0 {
		r.Extensions[client.ExtIdle] = "true"
	}
	if timeout != 0 {
		r.Extensions[client.ExtTimeout] = timeout.String()
	}
	sb, err := cl.Create(ctx, r, wait)
	if err != nil {
		return err
	}
	if o.format == "json" {
		err = printJSON(os.Stdout, sb)
	} else {
		_, err = fmt.Println(sb.ID)
	}
	if err != nil {
		return err
	}
	if sb.Status.State == client.Failed {
		return errs.New(errs.Internal, "sandbox %s failed (%s): %s; `sandboxctl inspect %s` shows what is left, `sandboxctl rm %s` removes it",
			sb.ID, sb.Status.Reason, sb.Status.Message, sb.ID, sb.ID)
	}
	return nil
}
