package cli

import (
	"fmt"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newDiagnostics(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "diagnostics",
		Short: "Ask what is wrong with a sandbox, in any state",
		Long: `Ask what is wrong with a sandbox, in any state: texts for people, which promise
nothing to programs. What can not be had is said on standard error.`,
		Example: `  sandboxctl diagnostics summary lab
  sandboxctl diagnostics events --scope network lab`,
	}
	cmd.AddCommand(
		newDiagnostic(c, "logs", "Print what a sandbox's entrypoint wrote and what the daemon did with it", "container", "lifecycle", "all"),
		newDiagnostic(c, "events", "Print what happened to a sandbox, and which flows were refused to it", "lifecycle", "runtime", "network", "all"),
		newDiagnosticInspect(c), newDiagnosticSummary(c),
	)
	return cmd
}

func newDiagnostic(c *cli, kind, short string, scopes ...string) *cobra.Command {
	var (
		o     output
		scope string
	)
	cmd := &cobra.Command{
		Use:   kind + " [flags] SANDBOX",
		Short: short,
		Example: fmt.Sprintf(`  sandboxctl diagnostics %s lab
  sandboxctl diagnostics %s --scope %s -o json lab`, kind, kind, scopes[0]),
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(); err != nil {
				return err
			}
			if !slices.Contains(scopes, scope) {
				return errs.New(errs.Invalid, "--scope %q: the scopes of %s are %s", clip(scope, 40), kind, strings.Join(scopes, ", "))
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			d, err := cl.Diagnostic(cmd.Context(), args[0], kind, scope)
			if err != nil {
				return err
			}
			if o.format == "json" {
				return printJSON(os.Stdout, d)
			}
			for _, w := range d.Warnings {
				fmt.Fprintln(os.Stderr, "sandboxctl: note:", printable(w, false))
			}
			if d.Truncated {
				fmt.Fprintln(os.Stderr, "sandboxctl: note: the output is longer; this is the end of it")
			}
			return printText(d.Content)
		},
	}
	o.flags(cmd, false)
	cmd.Flags().StringVarP(&scope, "scope", "s", "all", "what it is about: "+strings.Join(scopes, ", "))
	_ = cmd.RegisterFlagCompletionFunc("scope", cobra.FixedCompletions(scopes, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func newDiagnosticInspect(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:     "inspect SANDBOX",
		Short:   "Print what is known of a sandbox, as a summary has it",
		Long:    "Print what is known of a sandbox, as a summary has it. Programs read sandboxctl inspect.",
		Example: `  sandboxctl diagnostics inspect lab`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.connect()
			if err != nil {
				return err
			}
			text, err := cl.DiagnosticText(cmd.Context(), args[0], "inspect", nil)
			if err != nil {
				return err
			}
			return printText(text)
		},
	}
}

func newDiagnosticSummary(c *cli) *cobra.Command {
	var lines, events int
	cmd := &cobra.Command{
		Use:   "summary [flags] SANDBOX",
		Short: "Print what is known of a sandbox, its last events and its last output",
		Example: `  sandboxctl diagnostics summary lab
  sandboxctl diagnostics summary -n 500 lab >report.txt`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.connect()
			if err != nil {
				return err
			}
			text, err := cl.DiagnosticText(cmd.Context(), args[0], "summary", url.Values{
				"tail": {strconv.Itoa(lines)}, "event_limit": {strconv.Itoa(events)},
			})
			if err != nil {
				return err
			}
			return printText(text)
		},
	}
	cmd.Flags().IntVarP(&lines, "tail", "n", 50, "how many lines of the output, from its end")
	cmd.Flags().IntVar(&events, "event-limit", 20, "how many events, the last ones")
	return cmd
}

// printText prints lines of which a guest may have written some.
func printText(text string) error {
	words := strings.Split(text, "\t")
	for i, w := range words {
		words[i] = printable(w, true)
	}
	_, err := fmt.Print(strings.Join(words, "\t"))
	return err
}
