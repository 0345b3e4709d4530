package cli

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newPort(c *cli) *cobra.Command {
	var o output
	cmd := &cobra.Command{
		Use:   "port [flags] SANDBOX [PORT[/tcp]]",
		Short: "List the ports that a sandbox publishes, or where one of them is",
		Long: `List the ports that a sandbox publishes on the host (--publish of create and run), or the
addresses of one of them. They are served while the sandbox runs. Any port is reached
through the API, too: see sandboxctl endpoint.`,
		Example: `  sandboxctl port lab
  sandboxctl port lab 80
  sandboxctl port lab -o json`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(); err != nil {
				return err
			}
			var want uint64
			if len(args) == 2 {
				var err error
				if want, err = strconv.ParseUint(strings.TrimSuffix(args[1], "/tcp"), 10, 16); err != nil || want == 0 {
					return errs.New(errs.Invalid, "port %q: want a number from 1 to 65535, and perhaps /tcp", clip(args[1], 20))
				}
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			sb, err := cl.Get(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			ports := []client.PublishedPort{}
			if sb.Sandboxd != nil {
				for _, p := range sb.Sandboxd.Ports {
					if want == 0 || uint64(p.Port) == want {
						ports = append(ports, p)
					}
				}
			}
			if want != 0 && len(ports) == 0 {
				return errs.New(errs.NotFound, "sandbox %s does not publish port %d; `sandboxctl port %s` lists what it does", args[0], want, args[0])
			}
			return o.ports(ports, want != 0)
		},
	}
	o.flags(cmd, false)
	return cmd
}

// ports prints as docker does: of one port the addresses alone.
func (o *output) ports(ports []client.PublishedPort, one bool) error {
	if o.format == "json" {
		return printJSON(os.Stdout, ports)
	}
	for _, p := range ports {
		line := net.JoinHostPort(p.HostIP, strconv.Itoa(int(p.HostPort)))
		if !one && o.format != "name" {
			line = fmt.Sprintf("%d/%s -> %s", p.Port, p.Protocol, line)
		}
		if _, err := fmt.Println(printable(line, false)); err != nil {
			return err
		}
	}
	return nil
}
