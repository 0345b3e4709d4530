// Package fork has the commands that copy sandboxes: fork, which can run a command in each copy
// at once; tree, which shows what is a copy of what; and promote.
package fork

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	return []*cobra.Command{newFork(p), newTree(p), newPromote(p)}
}

// flags are the flags of fork.
type flags struct {
	output  command.Output
	count   int
	memory  bool
	name    string
	env     []string
	timeout time.Duration
	first   bool
}

func newFork(p *command.Program) *cobra.Command {
	var o flags
	cmd := &cobra.Command{
		Use:   "fork [flags] SANDBOX [-- COMMAND [ARG...]]",
		Short: "Copy a sandbox, and run a command in each copy",
		Long: `Copy a sandbox and print the ids of the copies, one a line.

Each copy has the files of SANDBOX as of one moment, over the same image, and an id, an
address, limits, a network policy and secrets of its own, which begin as those of SANDBOX.
Published ports are not copied. Its entrypoint is started. With --memory, it also has the
memory and the processes of SANDBOX, which must run on gVisor: they go on where they were,
in each copy. SANDBOX itself goes on, too.

A few copies come up at once; while the CPUs of the host are busy, one at a time. Standard
error shows how many are made. If sandboxctl ends before all are (Ctrl-C, or a kill), no
further copy is begun. Those that were begun come up, and stay until their --timeout:
sandboxctl tree shows them.

With a COMMAND, it is run in all copies at once. Each line of output begins with the name
or the id of its copy. With --until-success, the first copy in which COMMAND exits with 0
is kept and its id printed, and the others are removed. A note on standard error says which
copy that is.`,
		Example: `  sandboxctl fork lab -n 3
  sandboxctl fork lab -n 8 --memory --until-success -- python3 solve.py`,
		Args: func(cmd *cobra.Command, args []string) error {
			n := cmd.ArgsLenAtDash()
			if n < 0 {
				n = len(args)
			}
			if n != 1 {
				return fmt.Errorf("accepts 1 sandbox, received %d; put a command after --", n)
			}
			return nil
		},
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			return o.run(ctx, cl, args[0], args[1:])
		}),
	}
	f := cmd.Flags()
	f.IntVarP(&o.count, "count", "n", 1, "number of copies, 1 to 256")
	f.BoolVar(&o.memory, "memory", false, "copy memory and processes, too")
	f.StringVar(&o.name, "name", "", "name of the copies; with more than one, each gets a number: NAME-1, NAME-2")
	f.StringArrayVarP(&o.env, "env", "e", nil, "environment variable of what is started in the copies: NAME=VALUE, or NAME to pass on the "+
		"local value")
	command.DurationFlag(f, &o.timeout, "timeout", "", time.Hour, "remove each copy after this time, such as 10m")
	f.BoolVar(&o.first, "until-success", false, "keep the first copy in which COMMAND exits with 0, and remove the others")
	o.output.Flags(cmd, true)
	return cmd
}

func (o *flags) run(ctx context.Context, cl *client.Client, sandbox string, argv []string) error {
	if o.first && len(argv) == 0 {
		return errs.New(errs.Invalid, "--until-success needs a command: put it after --")
	}
	env, err := command.Environment(o.env, nil)
	if err != nil {
		return err
	}
	r := wire.ForkRequest{
		Count: o.count, Mode: wire.ForkFiles,
		Overrides: &wire.ForkOverrides{Env: env, Extensions: map[string]string{wire.ExtTimeout: o.timeout.String()}},
	}
	if o.memory {
		r.Mode = wire.ForkMemory
	}
	if o.name != "" {
		r.Overrides.Extensions[wire.ExtName] = o.name
	}
	f, err := shown(ctx, cl, sandbox, o.count, func() (wire.Fork, error) { return cl.Snapshots().Fork(ctx, sandbox, r, true) })
	if err != nil {
		return err
	}
	if len(argv) == 0 {
		if err := o.show(f); err != nil {
			return err
		}
		return incomplete(f)
	}
	if err := incomplete(f); err != nil {
		return err
	}
	race := newRace(f.Sandboxes, os.Stdout, os.Stderr)
	if o.first {
		return race.untilSuccess(ctx, cl, argv)
	}
	return race.all(ctx, cl, argv)
}

// show prints a fork: as JSON all of it, else the ids of its copies.
func (o *flags) show(f wire.Fork) error {
	if o.output.Format == command.JSON {
		return text.JSON(os.Stdout, f)
	}
	for _, c := range f.Sandboxes {
		if err := o.output.One(c, c.ID); err != nil {
			return err
		}
	}
	return nil
}

// incomplete is the error of a fork some of whose copies could not be made.
func incomplete(f wire.Fork) error {
	if f.Status.State != wire.ForkFailed {
		return nil
	}
	return errs.New(errs.Internal, "fork %s is not whole: %s; it has %s (`sandboxctl tree`)", f.ID, text.Printable(f.Status.Message),
		errs.Count(len(f.Sandboxes), "copy", "copies"))
}

func newPromote(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "promote SANDBOX",
		Short: "Put a copy in the place of the sandbox that it is a copy of",
		Long: `Put a copy in the place of the sandbox that it is a copy of: the two trade their names and
the times at which they expire. So the copy is found where the other one was, also by
clients that reach its ports by the name, and the other one is removed when the copy would
have been. Ids and addresses stay, and host names until the next start. It prints what the
two are called now.`,
		Example: `  sandboxctl promote lab-3`,
		Args:    cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			sb, err := cl.Snapshots().Promote(ctx, args[0])
			if err != nil {
				return err
			}
			source, err := cl.Get(ctx, forkOf(sb).Source)
			if err != nil {
				return errs.Wrap(err, errs.CodeOf(err), "%s is in the place of its source, but what that is called now cannot be read: %s",
					sb.ID, err)
			}
			_, err = fmt.Fprintln(os.Stdout, promoted(sb, source))
			return err
		}),
	}
}

// promoted says what a copy and its source are called, now that they have traded their names.
func promoted(sb, source wire.Sandbox) string {
	is := func(id, prefix, was, now string) string {
		if was != "" {
			id = prefix + was + " (" + id + ")"
		}
		if now == "" {
			return id + " has no name now"
		}
		return id + " is now called " + now
	}
	of, to := text.Printable(command.NameOf(source)), text.Printable(command.NameOf(sb)) // the former names of copy and source
	return is(sb.ID, "", of, to) + "; " + is(source.ID, "the former ", to, of)
}

func newTree(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:     "tree",
		Short:   "Show which sandboxes are copies of which",
		Long:    "Show all sandboxes, each copy below the sandbox that it is a copy of. One that is gone is shown by its id.",
		Example: `  sandboxctl tree`,
		Args:    cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			all, err := cl.List(ctx, client.Filter{})
			if err != nil {
				return err
			}
			return writeTree(os.Stdout, all)
		}),
	}
}

// forkOf is the fork that a sandbox is a copy of; nil: none.
func forkOf(sb wire.Sandbox) *wire.ForkOf {
	if sb.Sandboxd == nil {
		return nil
	}
	return sb.Sandboxd.Fork
}

// writeTree writes each sandbox on a line of its own, below its source.
func writeTree(w io.Writer, all []wire.Sandbox) error {
	here, below := map[string]bool{}, map[string][]wire.Sandbox{}
	for _, sb := range all {
		here[sb.ID] = true
	}
	var roots []string                   // IDs of sources that are gone, in order
	for i := len(all) - 1; i >= 0; i-- { // the oldest first
		from := ""
		if f := forkOf(all[i]); f != nil {
			from = f.Source
		}
		if from != "" && !here[from] && below[from] == nil {
			roots = append(roots, from)
		}
		below[from] = append(below[from], all[i])
	}
	var write func(sb wire.Sandbox, indent, mark string) error
	children := func(of, indent string) error {
		for i, sb := range below[of] {
			mark := "├─ "
			if i == len(below[of])-1 {
				mark = "└─ "
			}
			if err := write(sb, indent, mark); err != nil {
				return err
			}
		}
		return nil
	}
	write = func(sb wire.Sandbox, indent, mark string) error {
		line := indent + mark + sb.ID
		if name := command.NameOf(sb); name != "" {
			line += " " + name
		}
		line += " " + sb.Status.State
		if f := forkOf(sb); f != nil {
			line += " (" + f.Mode + ")"
		}
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
		switch mark {
		case "├─ ":
			indent += "│  "
		case "└─ ":
			indent += "   "
		}
		return children(sb.ID, indent)
	}
	for _, sb := range below[""] {
		if err := write(sb, "", ""); err != nil {
			return err
		}
	}
	for _, gone := range roots {
		if _, err := fmt.Fprintln(w, gone+" (gone)"); err != nil {
			return err
		}
		if err := children(gone, ""); err != nil {
			return err
		}
	}
	return nil
}
