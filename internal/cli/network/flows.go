package network

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

func newNetwork(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "network",
		Short: "Show what sandboxes sent, received and connected to",
		Long: `Show what sandboxes sent, received and connected to. The daemon counts from the first
start of a sandbox until it is deleted, over stops and restarts.`,
		Example: `  sandboxctl network flows lab
  sandboxctl network stats lab`,
	}
	cmd.AddCommand(newFlows(p), newTraffic(p))
	return cmd
}

func newFlows(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "flows [flags] SANDBOX",
		Short: "List where a sandbox connected to, and where it tried to",
		Long: `List where a sandbox connected to, and where it tried to, the latest first. A
destination is a name if the daemon knows it, else an address. The list has the last 128
destinations that the sandbox reached and the last 128 that it was only refused. All
others are one row, (other).`,
		Example: `  sandboxctl network flows lab
  sandboxctl network flows -o json lab | jq -r '.flows[] | select(.denied > 0) | .destination'`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			f, err := cl.Policy(args[0]).Flows(ctx)
			if err != nil {
				return err
			}
			if done, err := o.Value(os.Stdout, f, nil); done {
				return err
			}
			if f.Other != nil && o.Format == command.Table {
				f.Flows = append(f.Flows, wire.Flow{Destination: "(other)", Connections: *f.Other})
			}
			return destinations.Show(os.Stdout, &o, f.Flows)
		}),
	}
	o.Flags(cmd, false)
	return cmd
}

var destinations = command.Listing[wire.Flow]{
	Name:   func(f wire.Flow) string { return f.Destination },
	Header: []string{"DESTINATION", "PORT", "ALLOWED", "DENIED", "FIRST SEEN", "LAST SEEN"},
	Row: func(f wire.Flow) []string {
		port := f.Protocol // as docker: 443/tcp
		if f.Port != 0 {
			port = fmt.Sprintf("%d/%s", f.Port, f.Protocol)
		}
		return []string{
			f.Destination, port, strconv.FormatInt(f.Allowed, 10), strconv.FormatInt(f.Denied, 10), text.Ago(f.FirstSeen),
			text.Ago(f.LastSeen),
		}
	},
}

func newTraffic(p *command.Program) *cobra.Command {
	var (
		o    command.Output
		once bool
	)
	cmd := &cobra.Command{
		Use:   "stats [flags] SANDBOX...",
		Short: "Show the traffic of sandboxes once a second",
		Long: `Show the traffic of sandboxes once a second, from the first start of each. Traffic is
all that passed the sandbox's link: also commands and files of clients. With -o json each
measurement is an array. It is printed on one line, except with --no-stream.`,
		Example: `  sandboxctl network stats lab
  sandboxctl network stats --no-stream -o json lab other | jq '.[].txBytes'`,
		Args: cobra.MinimumNArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			o.Lines = !once
			for {
				list, err := measure(ctx, cl, args)
				if err != nil {
					return err
				}
				if !once && o.Format == command.Table && command.IsTerminal(os.Stdout) {
					fmt.Print("\x1b[H\x1b[2J") // home, clear
				}
				if err := traffics.Show(os.Stdout, &o, list); err != nil || once {
					return err
				}
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(time.Second):
				}
			}
		}),
	}
	o.Flags(cmd, false)
	traffics.FormatFlag(cmd, &o)
	cmd.Flags().BoolVar(&once, "no-stream", false, "print one measurement")
	return cmd
}

// traffic is one measurement of a sandbox.
type traffic struct {
	ID   string `json:"id"`
	Name string `json:"name,omitempty"`
	wire.NetworkStats
}

func measure(ctx context.Context, cl *client.Client, names []string) ([]traffic, error) {
	list := make([]traffic, 0, len(names))
	for _, name := range names {
		sb, err := cl.Get(ctx, name)
		if err != nil {
			return nil, err
		}
		s, err := cl.Policy(sb.ID).Traffic(ctx)
		if err != nil {
			return nil, err
		}
		list = append(list, traffic{sb.ID, command.NameOf(sb), s})
	}
	return list, nil
}

var traffics = command.Listing[traffic]{
	Name:   func(t traffic) string { return t.ID },
	Header: []string{"ID", "NAME", "NET IN / OUT", "PACKETS IN / OUT", "ALLOWED", "DENIED"},
	Row: func(t traffic) []string {
		return []string{
			t.ID, t.Name, netIO(t), fmt.Sprintf("%d / %d", t.RxPackets, t.TxPackets), strconv.FormatInt(t.Allowed, 10),
			strconv.FormatInt(t.Denied, 10),
		}
	},
	Docker: func(t traffic) command.Fields {
		return command.Fields{"ID": t.ID, "Container": t.ID, "Name": t.Name, "NetIO": netIO(t)}
	},
}

func netIO(t traffic) string { return text.Bytes(t.RxBytes) + " / " + text.Bytes(t.TxBytes) }
