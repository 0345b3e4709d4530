package network

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
)

func newEgressExplain(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "explain [flags] SANDBOX HOST:PORT[/PROTO]",
		Short: "Print which rule of a sandbox decides about a target",
		Long: `Print which rule of a sandbox decides about a target. If the target is denied, print the
command that would allow it. No packet is sent; see egress test. If the sandbox does not
run, its stored policy answers; names that DNS gave to addresses are not known then.`,
		Example: `  sandboxctl egress explain lab pypi.org:443
  sandboxctl egress explain lab 203.0.113.7:123/udp`,
		Args: cobra.ExactArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			e, err := cl.Policy(args[0]).Explain(ctx, args[1])
			if err != nil {
				return err
			}
			if o.Format == command.JSON {
				return text.JSON(os.Stdout, e)
			}
			_, err = fmt.Print(explained(e, args[0]))
			return err
		}),
	}
	o.Flags(cmd, false)
	return cmd
}

// explained is an explanation as people read it.
func explained(e wire.Explanation, sandbox string) string {
	var b strings.Builder
	word := "denied"
	if e.Verdict == wire.VerdictAllow {
		word = "allowed"
	}
	fmt.Fprintf(&b, "%s: %s: %s\n", word, text.Printable(e.Target), text.Printable(e.Reason))
	if len(e.Names) > 0 {
		fmt.Fprintf(&b, "the address is one of %s\n", text.Printable(strings.Join(e.Names, ", ")))
	}
	if e.Note != "" {
		fmt.Fprintf(&b, "note: %s\n", text.Printable(e.Note))
	}
	switch {
	case e.Verdict == wire.VerdictAllow:
	case e.Allow == "":
		b.WriteString("no rule of the sandbox for this target can allow it\n")
	default:
		// By the name that was given, so that the line can be copied.
		fmt.Fprintf(&b, "to allow it:\n  sandboxctl egress patch --allow %s %s\n", text.Printable(e.Allow), text.Printable(sandbox))
	}
	return b.String()
}

func newEgressTest(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "test [flags] SANDBOX HOST:PORT",
		Short: "Have a sandbox try to reach a target by TCP",
		Long: `Have a sandbox try to reach a target by TCP, as a program inside of it would: its agent
asks the sandbox's DNS for the name and connects. On port 443 it begins TLS, and on port 80
it sends HEAD /, both with the name of the host. The exit status is 1 if that fails; then
the output says whether the policy or something else is the cause. UDP and ICMP cannot be
tested, because a server need not answer them: use egress explain.`,
		Example: `  sandboxctl egress test lab pypi.org:443
  sandboxctl egress test -o json lab 203.0.113.7:5432`,
		Args: cobra.ExactArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			t, err := cl.Policy(args[0]).Test(ctx, args[1])
			if err != nil {
				return err
			}
			if o.Format == command.JSON {
				err = text.JSON(os.Stdout, t)
			} else {
				_, err = fmt.Print(tested(t, args[0]))
			}
			if err == nil && !t.Reached {
				return command.Status{Code: 1}
			}
			return err
		}),
	}
	o.Flags(cmd, false)
	return cmd
}

// tested is the result of a test as people read it.
func tested(t wire.NetworkTest, sandbox string) string {
	var b strings.Builder
	at := ""
	if t.Address != "" {
		at = " (" + text.Printable(t.Address) + ")"
	}
	word := "not reached"
	resolver := t.Explanation.By == "dns"
	switch {
	case t.Reached && resolver:
		word = "answered by sandboxd's resolver"
	case t.Reached:
		word = "reached"
	}
	fmt.Fprintf(&b, "%s: %s%s in %.1f ms\n", word, text.Printable(t.Target), at, t.Took)
	if t.Error != "" {
		fmt.Fprintf(&b, "%s: %s\n", text.Printable(t.Step), text.Printable(t.Error))
	}
	switch {
	case resolver && (t.Reached || t.Denied == nil):
		fmt.Fprintf(&b, "note: %s\n", text.Printable(t.Explanation.Reason))
	case t.Reached:
		fmt.Fprintf(&b, "allowed: %s\n", text.Printable(t.Explanation.Reason))
	case t.Denied != nil && t.Explanation.Verdict == wire.VerdictAllow:
		fmt.Fprintf(&b, "denied: %s\n", text.Printable(t.Denied.Reason))
	case t.Explanation.Verdict == wire.VerdictAllow:
		fmt.Fprintf(&b, "the policy allows it (%s): the cause is elsewhere\n", text.Printable(t.Explanation.Reason))
	default:
		b.WriteString(explained(t.Explanation, sandbox))
	}
	return b.String()
}

func newEgressDenials(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "denials [flags] SANDBOX",
		Short: "List what the network refused a sandbox",
		Long: `List what the network refused a sandbox since the daemon was started: the last 64
different targets, the newest last. Names are those that the sandbox asked for.`,
		Example: `  sandboxctl egress denials lab
  sandboxctl egress denials -o json lab | jq -r .items[].allow`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			d, err := cl.Policy(args[0]).Denials(ctx)
			if err != nil {
				return err
			}
			if o.Format == command.JSON {
				return text.JSON(os.Stdout, d)
			}
			return denied.Show(os.Stdout, &o, d.Items)
		}),
	}
	o.Flags(cmd, false)
	return cmd
}

var denied = command.Listing[wire.Denial]{
	Name:   func(d wire.Denial) string { return d.Target() },
	Header: []string{"LAST", "TIMES", "PROTOCOL", "TARGET", "REASON", "ALLOW WITH"},
	Row: func(d wire.Denial) []string {
		allow := "-"
		if d.Allow != "" {
			allow = "--allow " + d.Allow
		}
		return []string{d.Time.Local().Format(time.DateTime), fmt.Sprint(d.Times), d.Protocol, d.Target(), d.Reason, allow}
	},
}
