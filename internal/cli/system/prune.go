package system

import (
	"bufio"
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
that failed, and unused layers; with -a, also images that no sandbox and no snapshot uses;
with --volumes, also volumes that no sandbox has mounted. Snapshots that are ready stay:
the table [snapshots] of the daemon's configuration limits them.

prune asks before it removes anything. With -f, which it needs where nobody can be asked,
it does not.`,
		Example: `  sandboxctl system prune
  sandboxctl system prune -af --filter until=24h`,
		Args: cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			before, err := until(filters, volumes)
			if err != nil {
				return err
			}
			if !force {
				if err := confirm(all, volumes, filters); err != nil {
					return err
				}
			}
			report, err := cl.System().Prune(ctx, all, volumes, before)
			if err != nil {
				return err
			}
			return printPruned(&o, report)
		}),
	}
	o.Flags(cmd, true)
	f := cmd.Flags()
	f.BoolVarP(&all, "all", "a", false, "also remove images that no sandbox and no snapshot uses")
	f.BoolVarP(&force, "force", "f", false, "do not ask")
	f.BoolVar(&volumes, "volumes", false, "also remove volumes that no sandbox has mounted")
	f.StringArrayVar(&filters, "filter", nil,
		"until=TIME: remove only what was made before TIME: a duration such as 24h, a time or Unix seconds")
	return cmd
}

// until reads the filters: the time before which things were made that are to go.
func until(filters []string, volumes bool) (before time.Time, err error) {
	for _, f := range filters {
		value, ok := strings.CutPrefix(f, "until=")
		switch {
		case !ok || value == "":
			return before, errs.New(errs.Invalid, "--filter %q: want until=TIME, such as until=24h", text.Clip(f, 60))
		case volumes:
			return before, errs.New(errs.Invalid, `the filter until does not go with --volumes`)
		}
		if before, err = command.Since("--filter until", value, time.Now()); err != nil {
			return before, err
		}
	}
	return before, nil
}

// confirm says what goes and asks whether it may.
func confirm(all, volumes bool, filters []string) error {
	if !command.IsTerminal(os.Stdin) {
		return errs.New(errs.Invalid, "this permanently removes ended sandboxes and their files, and more; use -f to confirm "+
			"(`sandboxctl system df` shows what there is)")
	}
	w := os.Stderr // standard output is for what was removed
	fmt.Fprintln(w, "WARNING! This will remove:\n  - all sandboxes that have ended, with their files\n  - all snapshots that failed")
	if volumes {
		fmt.Fprintln(w, "  - all volumes that no sandbox has mounted, with their files")
	}
	if all {
		fmt.Fprintln(w, "  - all images that no sandbox and no snapshot uses")
	} else {
		fmt.Fprintln(w, "  - all layers that no image uses")
	}
	if len(filters) > 0 {
		fmt.Fprintf(w, "\n  Items to be removed will be filtered with:\n  - %s\n", text.Printable(strings.Join(filters, "\n  - ")))
	}
	fmt.Fprint(w, "\nAre you sure you want to continue? [y/N] ")
	line, _ := bufio.NewReader(os.Stdin).ReadString('\n') // without an answer it is no
	switch strings.ToLower(strings.TrimSpace(line)) {
	case "y", "yes":
		return nil
	}
	return errs.New(errs.Invalid, "nothing was removed")
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
		{"Deleted Volumes:", r.Volumes},
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
