package network

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newPort(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "port [flags] SANDBOX [PORT[/tcp]]",
		Short: "List the published ports of a sandbox, or the addresses of one port",
		Long: `List the ports that a sandbox publishes on the host (--publish of create and run), or the
addresses of one port. The daemon serves them while the sandbox runs. Any port can also be
reached through the API: see sandboxctl endpoint.`,
		Example: `  sandboxctl port lab
  sandboxctl port lab 80
  sandboxctl port lab -o json`,
		Args: cobra.RangeArgs(1, 2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			var want uint64
			if len(args) == 2 {
				var err error
				want, err = strconv.ParseUint(strings.TrimSuffix(args[1], "/tcp"), 10, 16)
				if err != nil || want == 0 {
					return errs.New(errs.Invalid, "port %q: want a number from 1 to 65535, optionally with /tcp", text.Clip(args[1], 20))
				}
			}
			sb, err := cl.Get(ctx, args[0])
			if err != nil {
				return err
			}
			ports := []wire.PublishedPort{}
			if sb.Sandboxd != nil {
				for _, p := range sb.Sandboxd.Ports {
					if want == 0 || uint64(p.Port) == want {
						ports = append(ports, p)
					}
				}
			}
			if want != 0 && len(ports) == 0 {
				return errs.New(errs.NotFound, "sandbox %s does not publish port %d; `sandboxctl port %s` lists the published "+
					"ports", args[0], want, args[0])
			}
			return printPorts(&o, ports, want != 0)
		}),
	}
	o.Flags(cmd, false)
	return cmd
}

// printPorts prints as docker does: of one port the addresses alone.
func printPorts(o *command.Output, ports []wire.PublishedPort, one bool) error {
	if o.Format == command.JSON {
		return text.JSON(os.Stdout, ports)
	}
	for _, p := range ports {
		line := net.JoinHostPort(p.HostIP, strconv.Itoa(int(p.HostPort)))
		if !one && o.Format != "name" {
			line = fmt.Sprintf("%d/%s -> %s", p.Port, p.Protocol, line)
		}
		if _, err := fmt.Println(text.Printable(line)); err != nil {
			return err
		}
	}
	return nil
}
