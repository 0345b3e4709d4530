package observe

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newDiagnostics(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "diagnostics",
		Short: "Show what is wrong with a sandbox in any state",
		Long: `Show what is wrong with a sandbox in any state. The output is for people; its format
may change. Warnings on standard error name the parts that are missing.`,
		Example: `  sandboxctl diagnostics summary lab
  sandboxctl diagnostics events --scope network lab`,
	}
	cmd.AddCommand(
		newDiagnostic(p, "logs", "Print the output of a sandbox's entrypoint and what the daemon did with the sandbox",
			"container", "lifecycle", "all"),
		newDiagnostic(p, "events", "Print the events of a sandbox and the flows that were refused",
			"lifecycle", "runtime", "network", "all"),
		newDiagnosticInspect(p), newDiagnosticSummary(p),
	)
	return cmd
}

func newDiagnostic(p *command.Program, kind, short string, scopes ...string) *cobra.Command {
	var (
		o     command.Output
		scope string
	)
	cmd := &cobra.Command{
		Use:   kind + " [flags] SANDBOX",
		Short: short,
		Example: fmt.Sprintf(`  sandboxctl diagnostics %s lab
  sandboxctl diagnostics %s --scope %s -o json lab`, kind, kind, scopes[0]),
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			if !slices.Contains(scopes, scope) {
				return errs.New(errs.Invalid, "--scope %q: the scopes of %s are %s",
					text.Clip(scope, 40), kind, strings.Join(scopes, ", "))
			}
			d, err := cl.Diagnostics(args[0]).Get(ctx, kind, scope)
			if err != nil {
				return err
			}
			if o.Format == command.JSON {
				return text.JSON(os.Stdout, d)
			}
			for _, w := range d.Warnings {
				command.Note(w)
			}
			if d.Truncated {
				command.Note("the output is longer; this is the end of it")
			}
			return printText(d.Content)
		}),
	}
	o.Flags(cmd, false)
	cmd.Flags().StringVarP(&scope, "scope", "s", "all", "part to print: "+strings.Join(scopes, ", "))
	command.Choices(cmd, "scope", scopes...)
	return cmd
}

func newDiagnosticInspect(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:     "inspect SANDBOX",
		Short:   "Print the details of a sandbox, as in a summary",
		Long:    "Print the details of a sandbox, as in a summary. Programs should read sandboxctl inspect.",
		Example: `  sandboxctl diagnostics inspect lab`,
		Args:    cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			report, err := cl.Diagnostics(args[0]).Text(ctx, "inspect", nil)
			if err != nil {
				return err
			}
			return printText(report)
		}),
	}
}

func newDiagnosticSummary(p *command.Program) *cobra.Command {
	var lines, events int
	cmd := &cobra.Command{
		Use:   "summary [flags] SANDBOX",
		Short: "Print the details of a sandbox, its last events and its last output",
		Example: `  sandboxctl diagnostics summary lab
  sandboxctl diagnostics summary -n 500 lab >report.txt`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			report, err := cl.Diagnostics(args[0]).Text(ctx, "summary", url.Values{
				"tail": {strconv.Itoa(lines)}, "event_limit": {strconv.Itoa(events)},
			})
			if err != nil {
				return err
			}
			return printText(report)
		}),
	}
	cmd.Flags().IntVarP(&lines, "tail", "n", 50, "number of lines to show from the end of the output")
	cmd.Flags().IntVar(&events, "event-limit", 20, "number of events to show, the last ones")
	return cmd
}

// printText prints lines; a guest may have written some of them.
func printText(lines string) error {
	_, err := fmt.Print(text.Tabbed(lines))
	return err
}
