package network

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newEgress(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "egress",
		Short: "Show what sandboxes may reach, and change it while they exist",
		Long: `Show what sandboxes may reach, and change it while they exist. The first rule that
matches a flow decides; if no rule matches, the default decides. A change applies at
once, even if the sandbox is paused: open flows that it denies are closed.`,
		Example: `  sandboxctl egress get lab
  sandboxctl egress patch --allow pypi.org:443 lab
  sandboxctl egress rm lab pypi.org
  sandboxctl egress explain lab pypi.org:443`,
	}
	cmd.AddCommand(
		newEgressGet(p), newEgressSet(p), newEgressPatch(p), newEgressRm(p), newEgressTest(p), newEgressExplain(p), newEgressDenials(p),
	)
	return cmd
}

func newEgressGet(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "get [flags] SANDBOX",
		Short: "Print what a sandbox may reach",
		Example: `  sandboxctl egress get lab
  sandboxctl egress get -o json lab | jq .policy.egress`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			p, err := cl.Policy(args[0]).Get(ctx)
			if err != nil {
				return err
			}
			if p.Policy == nil {
				return errs.New(errs.Internal, "the answer contains no policy; are sandboxctl and sandboxd of the same release?")
			}
			if o.Format == command.JSON {
				return text.JSON(os.Stdout, p)
			}
			rules := p.Policy.Egress
			if o.Format == command.Table {
				rules = append(rules, wire.NetworkRule{Action: p.Policy.DefaultAction, Target: "(all else)"})
			}
			return showRules(&o, rules)
		}),
	}
	o.Flags(cmd, false)
	return cmd
}

// showRules prints rules, with a column for requests if one is about some of them.
func showRules(o *command.Output, rules []wire.NetworkRule) error {
	l := policyRules
	if slices.ContainsFunc(rules, func(r wire.NetworkRule) bool { return r.HTTP != nil }) {
		l.Header = append(slices.Clone(l.Header), "REQUESTS")
		l.Row = func(r wire.NetworkRule) []string {
			return append(policyRules.Row(r), cmp.Or(command.Requests(r.HTTP), "all"))
		}
	}
	return l.Show(os.Stdout, o, rules)
}

var policyRules = command.Listing[wire.NetworkRule]{
	Name:   func(r wire.NetworkRule) string { return r.Target },
	Header: []string{"ACTION", "TARGET", "PORTS", "PROTOCOL"},
	Row: func(r wire.NetworkRule) []string {
		ports := make([]string, len(r.Ports))
		for i, p := range r.Ports {
			ports[i] = fmt.Sprint(p)
		}
		return []string{r.Action, r.Target, cmp.Or(strings.Join(ports, ","), "all"), cmp.Or(r.Protocol, "all")}
	},
}

func newEgressSet(p *command.Program) *cobra.Command {
	var (
		rules  command.Rules
		policy string
		def    string
	)
	cmd := &cobra.Command{
		Use:   "set [flags] SANDBOX...",
		Short: "Replace what sandboxes may reach",
		Long: `Replace what sandboxes may reach, and print the sandboxes. The rules are those of the
flags, in the order in which they are given, and then those of the file. With the name of a
policy (sandboxctl policy) they follow that policy from then on. Rules about requests need a
sandbox that was created with one, or with --credential-proxy.`,
		Example: `  sandboxctl egress set --policy policy.json lab
  sandboxctl egress set --policy build lab
  sandboxctl egress set --allow pypi.org:443 --allow '*.pythonhosted.org:443' lab
  sandboxctl egress set --allow 'GET api.example.com/v1/*' --allow pypi.org:443 lab
  sandboxctl egress set --default allow --deny 203.0.113.0/24 lab`,
		Args: cobra.MinimumNArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			if policy != "" && !command.IsPolicyFile(policy) && def == "" && len(rules) == 0 {
				return command.Each(args, func(id string) error {
					_, err := cl.Policy(id).Use(ctx, policy)
					return err
				})
			}
			raw, err := wholePolicy(policy, def, rules)
			if err != nil {
				return err
			}
			return command.Each(args, func(id string) error {
				_, err := cl.Policy(id).Put(ctx, raw)
				return err
			})
		}),
	}
	f := cmd.Flags()
	rules.Flags(f)
	rules.RuleFlag(f)
	f.StringVar(&policy, "policy", "", "NAME of a policy to follow, NAME@VERSION to keep that version, or a JSON file, "+
		"{\"defaultAction\", \"egress\"}, - for standard input")
	f.StringVar(&def, "default", "", "what happens to flows that no rule matches: deny or allow (default deny)")
	command.Choices(cmd, "default", "deny", "allow")
	return cmd
}

// wholePolicy is the policy that the flags of set describe.
func wholePolicy(file, def string, rules command.Rules) (json.RawMessage, error) {
	switch {
	case def != "" && def != "allow" && def != "deny":
		return nil, errs.New(errs.Invalid, "--default %q: want allow or deny", text.Clip(def, 20))
	case file == "" && def == "" && len(rules) == 0:
		return nil, errs.New(errs.Invalid, "no policy is given; example: sandboxctl egress set --allow pypi.org:443; `--default deny` "+
			"alone denies everything")
	case file == "":
		return json.Marshal(wire.NetworkPolicy{DefaultAction: def, Egress: append([]wire.NetworkRule{}, rules...)})
	case def != "":
		return nil, errs.New(errs.Invalid, "--policy and --default exclude each other: the defaultAction of the policy is the default")
	case !command.IsPolicyFile(file):
		return nil, errs.New(errs.Invalid, "--policy %q: want a file: a path with a slash, or a name that ends in .json",
			text.Clip(file, 60))
	}
	return command.ReadPolicy(file, rules)
}

func newEgressPatch(p *command.Program) *cobra.Command {
	var rules command.Rules
	cmd := &cobra.Command{
		Use:   "patch [flags] SANDBOX...",
		Short: "Add rules before the existing rules of sandboxes",
		Long: `Add rules before the existing rules of sandboxes, in the order in which they are
given, and print the sandboxes. Existing rules that the new rules cover completely are
removed.`,
		Example: `  sandboxctl egress patch --allow pypi.org:443 --allow 198.51.100.7:123/udp lab
  sandboxctl egress patch --deny 203.0.113.9 lab
  sandboxctl egress patch --rule allow=203.0.113.0/24 lab`,
		Args: cobra.MinimumNArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			if len(rules) == 0 {
				return errs.New(errs.Invalid, "no rule is given; example: sandboxctl egress patch --allow pypi.org:443 %s", args[0])
			}
			return command.Each(args, func(id string) error {
				_, err := cl.Policy(id).Patch(ctx, rules)
				return err
			})
		}),
	}
	rules.Flags(cmd.Flags())
	rules.RuleFlag(cmd.Flags())
	return cmd
}

func newEgressRm(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:     "rm SANDBOX TARGET...",
		Short:   "Remove the rules for targets, whatever their ports, and print the targets",
		Example: `  sandboxctl egress rm lab pypi.org 203.0.113.0/24`,
		Args:    cobra.MinimumNArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			return command.Each(args[1:], func(target string) error {
				p, err := cl.Policy(args[0]).Remove(ctx, []string{target})
				if err != nil {
					return err
				}
				if p.Reason != "" {
					return errs.New(errs.NotFound,
						"sandbox %s has no rule for %s (%s); `sandboxctl egress get %s` lists the targets, which have no ports",
						args[0], text.Clip(target, 80), p.Reason, args[0])
				}
				return nil
			})
		}),
	}
}
