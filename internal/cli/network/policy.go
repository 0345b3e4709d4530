package network

import (
	"context"
	"fmt"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newPolicy(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "policy",
		Aliases: []string{"policies"},
		Short:   "Keep network policies by name, and change what the sandboxes that follow them may reach",
		Long: `Keep network policies by name, and change what the sandboxes that follow them may reach.

A sandbox that is created with --policy NAME follows the policy: each edit moves it to the
new version at once, also if it is paused or has ended. One that is created with
--policy NAME@VERSION keeps that version. A sandbox whose own policy is changed
(sandboxctl egress) no longer follows; sandboxctl inspect says so. The newest ten versions
are kept. Policies of the daemon's configuration are edited there.`,
		Example: `  sandboxctl policy set build --allow pypi.org:443 --allow '*.pythonhosted.org:443'
  sandboxctl run --policy build python -- pip install requests
  sandboxctl policy ls`,
	}
	cmd.AddCommand(newPolicyLs(p), newPolicyGet(p), newPolicySet(p), newPolicyRm(p))
	return cmd
}

func newPolicyLs(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List named network policies",
		Example: `  sandboxctl policy ls
  sandboxctl policy ls -o json`,
		Args: cobra.NoArgs,
		RunE: policies.Of(p, &o, func(ctx context.Context, cl *client.Client, _ []string) ([]wire.PolicySummary, error) {
			return cl.Policies().List(ctx)
		}),
	}
	o.Flags(cmd, true)
	return cmd
}

// policies is how named policies are listed.
var policies = command.Listing[wire.PolicySummary]{
	Name:   func(p wire.PolicySummary) string { return p.Name },
	Header: []string{"NAME", "VERSION", "RULES", "DEFAULT", "SANDBOXES", "SOURCE", "EDITED"},
	Row: func(p wire.PolicySummary) []string {
		return []string{
			p.Name, strconv.Itoa(p.Version), strconv.Itoa(p.Rules), p.DefaultAction, strconv.Itoa(len(p.UsedBy)), p.Source,
			text.Ago(p.EditedAt),
		}
	},
}

func newPolicyGet(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "get [flags] POLICY",
		Short: "Print the rules of a named network policy",
		Long: `Print the rules of a named network policy, NAME, or of one of its versions,
NAME@VERSION. As JSON it has the versions that are kept and the sandboxes that use it.`,
		Example: `  sandboxctl policy get build
  sandboxctl policy get build@3
  sandboxctl policy get -o json build | jq .usedBy`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			p, err := cl.Policies().Get(ctx, args[0])
			if err != nil {
				return err
			}
			if o.Format == command.JSON {
				return text.JSON(os.Stdout, p)
			}
			rules := p.NetworkPolicy.Egress
			if o.Format == command.Table {
				rules = append(rules, wire.NetworkRule{Action: p.NetworkPolicy.DefaultAction, Target: "(all else)"})
			}
			return showRules(&o, rules)
		}),
	}
	o.Flags(cmd, false)
	return cmd
}

func newPolicySet(p *command.Program) *cobra.Command {
	var (
		o         command.Output
		file, def string
		rules     command.Rules
	)
	cmd := &cobra.Command{
		Use:   "set [flags] POLICY",
		Short: "Make a named network policy, or replace its rules, and print the sandboxes that it moves",
		Long: `Make a named network policy, or replace its rules, and print its version and the
sandboxes that it moves: a line each, "moved", or "pending" if another operation holds the
sandbox, which then moves when that ends. A sandbox that cannot be moved is an error; the
daemon tries again every minute.`,
		Example: `  sandboxctl policy set build --allow pypi.org:443 --allow '*.pythonhosted.org:443'
  sandboxctl policy set web --default allow --deny 203.0.113.0/24
  sandboxctl policy set build --policy build.json`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			raw, err := wholePolicy(file, def, rules)
			if err != nil {
				return err
			}
			e, err := cl.Policies().Put(ctx, args[0], raw)
			if err != nil {
				return err
			}
			return printEdit(&o, e)
		}),
	}
	o.Flags(cmd, true)
	f := cmd.Flags()
	f.StringVar(&file, "policy", "", "JSON file, {\"defaultAction\", \"egress\"}, or - for standard input")
	cmd.MarkFlagFilename("policy", "json") //nolint:errcheck // the flag is there
	f.StringVar(&def, "default", "", "what happens to flows that no rule matches: deny or allow (default deny)")
	command.Choices(cmd, "default", "deny", "allow")
	rules.Flags(f)
	return cmd
}

// printEdit prints the version of a policy and what became of the sandboxes that follow it.
func printEdit(o *command.Output, e wire.PolicyEdit) error {
	version := e.Name + "@" + strconv.Itoa(e.Version)
	if err := o.One(e, version); err != nil {
		return err
	}
	if o.Format == command.Table {
		for _, of := range []struct {
			what string
			all  []wire.PolicyUser
		}{{"moved", e.Moved}, {"pending", e.Pending}} {
			for _, u := range of.all {
				if _, err := fmt.Printf("%s %s\n", of.what, text.Printable(userName(u))); err != nil {
					return err
				}
			}
		}
	}
	return command.Every(failed(e), func(why string) error { return errs.New(errs.Unavailable, "%s", why) })
}

func failed(e wire.PolicyEdit) (all []string) {
	for _, u := range e.Failed {
		all = append(all, fmt.Sprintf("sandbox %s could not be moved to version %d of policy %s: %s; the daemon tries again within a "+
			"minute", userName(u), e.Version, e.Name, u.Message))
	}
	return all
}

func userName(u wire.PolicyUser) string {
	if u.Name != "" {
		return u.Name
	}
	return u.ID
}

func newPolicyRm(p *command.Program) *cobra.Command {
	return p.Verb(&cobra.Command{
		Use:   "rm POLICY...",
		Short: "Remove named network policies that no sandbox uses",
		Long: `Remove named network policies that no sandbox uses, and print their names. If sandboxes
use a policy, in whatever state, the error names them and the policy stays.`,
		Example: `  sandboxctl policy rm build`,
	}, func(ctx context.Context, cl *client.Client, name string) error {
		return cl.Policies().Remove(ctx, name)
	})
}
