package system

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newSystemPrune(p *command.Program) *cobra.Command {
	var (
		o                   command.Output
		all, force, volumes bool
		filters             []string
	)
	cmd := &cobra.Command{
		Use:   "prune [-af]",
		Short: "Remove ended sandboxes, failed snapshots and unused layers; with -a, also unused images",
		Long: `Remove sandboxes that have ended and wait for no restart, with their files, snapshots
that failed, and unused layers; with -a, also images that no sandbox and no snapshot uses.
Snapshots that are ready stay: the table [snapshots] of the daemon's configuration limits
them. Volumes stay: like docker's, --volumes keeps those that have a name, and here all
have one. sandboxctl volume prune -a removes them.

prune asks before it removes anything. With -f, which it needs where nobody can be asked,
it does not.`,
		Example: `  sandboxctl system prune
  sandboxctl system prune -af --filter until=24h`,
		Args: cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			before, err := until(filters)
			if err != nil {
				return err
			}
			if !force {
				if err := command.Confirm("sandboxctl system df", goes(all), filters); err != nil {
					return err
				}
			}
			report, err := cl.System().Prune(ctx, all, before)
			if err != nil {
				return err
			}
			if volumes {
				fmt.Fprintln(os.Stderr, "sandboxctl: no volume was removed: all volumes have names, and --volumes keeps those, as docker "+
					"does; sandboxctl volume prune -a removes those that no sandbox has mounted")
			}
			return printPruned(&o, report)
		}),
	}
	o.Flags(cmd, true)
	f := cmd.Flags()
	f.BoolVarP(&all, "all", "a", false, "also remove images that no sandbox and no snapshot uses")
	f.BoolVarP(&force, "force", "f", false, "do not ask")
	f.BoolVar(&volumes, "volumes", false, "for scripts made for docker; volumes that have a name stay, and all have one")
	f.StringArrayVar(&filters, "filter", nil,
		"until=TIME: remove only what was made before TIME: a duration such as 24h, a time or Unix seconds")
	return cmd
}

// until reads the filters: the time before which things were made that are to go.
func until(filters []string) (before time.Time, err error) {
	for _, f := range filters {
		value, ok := strings.CutPrefix(f, "until=")
		switch {
		case !ok || value == "":
			return before, errs.New(errs.Invalid, "--filter %q: want until=TIME, such as until=24h", text.Clip(f, 60))
		}
		if before, err = command.Since("--filter until", value, time.Now()); err != nil {
			return before, err
		}
	}
	return before, nil
}

// goes says what a prune removes.
func goes(all bool) []string {
	list := []string{"all sandboxes that have ended, with their files", "all snapshots that failed"}
	if all {
		return append(list, "all images that no sandbox and no snapshot uses")
	}
	return append(list, "all layers that no image uses")
}

// printPruned prints as docker does, or with -q the names alone.
func printPruned(o *command.Output, r wire.SystemPruneReport) error {
	if o.Format == command.JSON {
		return text.JSON(os.Stdout, r)
	}
	for _, kind := range []struct {
		title string
		names []string
	}{
		{"Deleted Sandboxes:", r.Sandboxes},
		{"Deleted Snapshots:", r.Snapshots},
		{"Deleted Images:", append(r.Images, r.Layers...)},
	} {
		if len(kind.names) == 0 {
			continue
		}
		if o.Format == command.Table {
			fmt.Println(kind.title)
		}
		for _, name := range kind.names {
			fmt.Println(text.Printable(name))
		}
		if o.Format == command.Table {
			fmt.Println()
		}
	}
	if o.Format == command.Table {
		fmt.Println("Total reclaimed space:", text.Bytes(r.BytesReclaimed))
	}
	return nil
}
