package network

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newEndpoint(p *command.Program) *cobra.Command {
	var (
		o       command.Output
		expires time.Duration
	)
	cmd := &cobra.Command{
		Use:   "endpoint [flags] SANDBOX PORT",
		Short: "Print the address of a port of a sandbox and the headers to send",
		Long: `Print the address at which other hosts reach a port of a sandbox, and below it the
headers to send, which contain the token of the port. With --expires the address itself
is signed and needs no headers: anyone who has it can reach the port until that time, or
until the sandbox ends.

The address has no scheme. Use https if the daemon has a certificate, else http. The
address does not work if the daemon's configuration has neither a TCP listener nor a
gateway.`,
		Example: `  sandboxctl endpoint lab 8000
  curl "http://$(sandboxctl endpoint lab 8000 --expires 1h)/"
  sandboxctl endpoint lab 8000 -o json | jq -r .endpoint`,
		Args: cobra.ExactArgs(2),
	}
	cmd.RunE = p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
		port, err := strconv.ParseUint(args[1], 10, 16)
		if err != nil || port == 0 {
			return errs.New(errs.Invalid, "port %q: want a number from 1 to 65535", text.Clip(args[1], 20))
		}
		var e wire.Endpoint
		if cmd.Flags().Changed("expires") {
			if expires < time.Second {
				return errs.New(errs.Invalid, "--expires %s: want at least 1s, such as 1h", expires)
			}
			e, err = cl.SignedEndpoint(ctx, args[0], uint16(port), time.Now().Add(expires))
		} else {
			e, err = cl.Endpoint(ctx, args[0], uint16(port))
		}
		if err != nil {
			return err
		}
		return printEndpoint(&o, e)
	})
	o.Flags(cmd, true)
	command.DurationFlag(cmd.Flags(), &expires, "expires", "", 0,
		"sign the address, so that it needs no headers for this time, such as 1h")
	return cmd
}

// printEndpoint prints an address and, unless its name alone is wanted, the
// headers to send.
func printEndpoint(o *command.Output, e wire.Endpoint) error {
	if err := o.One(e, e.Endpoint); err != nil || o.Format != command.Table {
		return err
	}
	for _, k := range slices.Sorted(maps.Keys(e.Headers)) {
		if _, err := fmt.Printf("%s: %s\n", text.Printable(k), text.Printable(e.Headers[k])); err != nil {
			return err
		}
	}
	return nil
}
