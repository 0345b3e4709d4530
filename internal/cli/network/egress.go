package network

import (
	"cmp"
	"context"
	"fmt"
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

func newEgress(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "egress",
		Short: "Show what sandboxes may reach, and change it while they exist",
		Long: `Show what sandboxes may reach, and change it while they exist. The first rule that
matches a flow decides; if no rule matches, the default decides. A change applies at
once, even if the sandbox is paused: open flows that it denies are closed.`,
		Example: `  sandboxctl egress get lab
  sandboxctl egress patch --allow 203.0.113.0/24:443 lab
  sandboxctl egress rm lab 203.0.113.0/24`,
	}
	cmd.AddCommand(newEgressGet(p), newEgressPatch(p), newEgressRm(p))
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
			return policyRules.Show(os.Stdout, &o, rules)
		}),
	}
	o.Flags(cmd, false)
	return cmd
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

func newEgressPatch(p *command.Program) *cobra.Command {
	var rules []wire.NetworkRule
	cmd := &cobra.Command{
		Use:   "patch [flags] SANDBOX...",
		Short: "Add rules before the existing rules of sandboxes",
		Long: `Add rules before the existing rules of sandboxes, in the order in which they are
given, and print the sandboxes. Existing rules that the new rules cover completely are
removed.`,
		Example: `  sandboxctl egress patch --allow 203.0.113.0/24:443 --allow 198.51.100.7:53/udp lab
  sandboxctl egress patch --deny 203.0.113.9 lab
  sandboxctl egress patch --rule allow=203.0.113.0/24 lab`,
		Args: cobra.MinimumNArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			if len(rules) == 0 {
				return errs.New(errs.Invalid, "no rule is given; example: sandboxctl egress patch --allow 203.0.113.0/24:443 %s", args[0])
			}
			return command.Each(args, func(id string) error {
				_, err := cl.Policy(id).Patch(ctx, rules)
				return err
			})
		}),
	}
	f := cmd.Flags()
	f.Var(&ruleFlag{"allow", &rules}, "allow", "allow flows to CIDR[:port[-port]][/proto], such as 203.0.113.0/24:443")
	f.Var(&ruleFlag{"deny", &rules}, "deny", "deny flows to CIDR[:port[-port]][/proto]")
	f.Var(&ruleFlag{"", &rules}, "rule", "either of them, allow=CIDR… or deny=CIDR…, as for OpenSandbox's osb")
	return cmd
}

// ruleFlag is a flag that adds to a list which several have in common, so that
// their order on the command line is that of the rules.
type ruleFlag struct {
	action string // "": the value begins with it
	rules  *[]wire.NetworkRule
}

func (f *ruleFlag) Type() string   { return "string" }
func (f *ruleFlag) String() string { return "" }

func (f *ruleFlag) Set(s string) error {
	action, target := f.action, s
	if action == "" {
		ok := false
		if action, target, ok = strings.Cut(s, "="); !ok || action != "allow" && action != "deny" {
			return fmt.Errorf("want allow=TARGET or deny=TARGET, such as allow=203.0.113.0/24:443")
		}
	}
	if target == "" {
		return fmt.Errorf("want CIDR[:port[-port]][/proto], such as 203.0.113.0/24:443")
	}
	*f.rules = append(*f.rules, ruleOf(action, target))
	return nil
}

// ruleOf splits CIDR[:PORT[-PORT]][/PROTO]. The daemon says whether the parts
// make sense, and why not.
func ruleOf(action, s string) wire.NetworkRule {
	r := wire.NetworkRule{Action: action, Target: s}
	// What follows the last slash is a protocol unless it begins as a number.
	if i := strings.LastIndexByte(s, '/'); i >= 0 && i+1 < len(s) && (s[i+1] < '0' || s[i+1] > '9') {
		r.Target, r.Protocol = s[:i], s[i+1:]
	}
	if strings.Count(r.Target, ":") != 1 { // IPv6 has more
		return r
	}
	target, ports, _ := strings.Cut(r.Target, ":")
	r.Target, r.Ports = target, []any{ports}
	if n, err := strconv.Atoi(ports); err == nil {
		r.Ports[0] = n
	}
	return r
}

func newEgressRm(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:     "rm SANDBOX TARGET...",
		Short:   "Remove the rules for targets, whatever their ports, and print the targets",
		Example: `  sandboxctl egress rm lab 203.0.113.0/24`,
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
