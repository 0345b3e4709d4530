package sandbox

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newUpdate(p *command.Program) *cobra.Command {
	var (
		l              limits
		labels, remove []string
	)
	cmd := &cobra.Command{
		Use:   "update [flags] SANDBOX...",
		Short: "Change limits and labels of sandboxes",
		Long: `Change the limits of running or paused sandboxes and the labels of any sandbox, and
print the names or ids as they were given. The daemon refuses a memory or disk limit
below what the sandbox already uses. To change the timeout see sandboxctl renew, to
change the network rules sandboxctl egress.`,
		Example: `  sandboxctl update --memory 1Gi --cpu 2 lab
  sandboxctl update --io-write-bps max lab
  sandboxctl update --label team=b --label-rm owner lab`,
		Args: cobra.MinimumNArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			change := map[string]string{}
			if err := l.into(change); err != nil {
				return err
			}
			patch, err := labelPatch(labels, remove)
			if err != nil {
				return err
			}
			if len(change)+len(patch) == 0 {
				return errs.New(errs.Invalid,
					"nothing to change: give a limit or a label; example: sandboxctl update --memory 1Gi --label team=a %s", args[0])
			}
			return command.Each(args, func(id string) error { return updateOne(ctx, cl, id, change, patch) })
		}),
	}
	l.flags(cmd)
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "set the label KEY=VALUE")
	cmd.Flags().StringArrayVar(&remove, "label-rm", nil, "remove the label KEY")
	return cmd
}

func newRename(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "rename SANDBOX NAME",
		Short: "Give a sandbox another name",
		Long: `Give a sandbox another name. Its host name inside, if that is its name, changes when it
is started again.`,
		Example: `  sandboxctl rename lab old-lab`,
		Args:    cobra.ExactArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			_, err := cl.Rename(ctx, args[0], args[1])
			return err
		}),
	}
}

// labelPatch is what PatchMetadata takes; nil takes a label away.
func labelPatch(set, remove []string) (map[string]*string, error) {
	patch := map[string]*string{}
	values, err := pairs("--label", set)
	if err != nil {
		return nil, err
	}
	for k, v := range values {
		patch[k] = &v
	}
	for _, k := range remove {
		if _, both := values[k]; both {
			return nil, errs.New(errs.Invalid, "--label and --label-rm both name %q; leave one out", text.Clip(k, 60))
		}
		patch[k] = nil
	}
	return patch, nil
}

// updateOne changes one sandbox. Limits come first, since only they may be refused.
func updateOne(
	ctx context.Context, cl *client.Client, id string, limits map[string]string, labels map[string]*string,
) error {
	if len(limits) > 0 {
		i, err := cl.Update(ctx, id, limits)
		if err != nil {
			return err
		}
		for _, note := range i.Notes {
			command.Note(note)
		}
		if _, changed := limits["memory"]; changed {
			noted(i.Sandbox)
		}
		id = i.ID
	}
	if len(labels) > 0 {
		if _, err := cl.PatchMetadata(ctx, id, labels); err != nil {
			return err
		}
	}
	return nil
}
