package cli

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newSnapshot(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "snapshot",
		Aliases: []string{"snapshots"},
		Short:   "Keep the files of a sandbox, and start others from them",
		Example: `  sandboxctl snapshot create lab --name before-upgrade
  sandboxctl create --from before-upgrade --name lab2`,
	}
	cmd.AddCommand(newSnapshotCreate(c), newSnapshotLs(c), newSnapshotInspect(c), newSnapshotRm(c))
	return cmd
}

func newSnapshotCreate(c *cli) *cobra.Command {
	var (
		o      output
		name   string
		noWait bool
	)
	cmd := &cobra.Command{
		Use:   "create [flags] SANDBOX",
		Short: "Take a snapshot of the files of a sandbox and print its id",
		Long: `Take a snapshot of the files of a sandbox and print its id.

The sandbox may run, be paused or have ended. One that runs stands still for
some milliseconds, or, where the storage pool is a plain directory, for as long
as copying its files takes. Memory and processes are not part of a snapshot.`,
		Example: `  sandboxctl snapshot create lab
  sandboxctl snapshot create lab --name before-upgrade`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(); err != nil {
				return err
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			s, err := cl.CreateSnapshot(cmd.Context(), args[0], name, !noWait)
			if err != nil {
				return err
			}
			if o.format == "json" {
				err = printJSON(os.Stdout, s)
			} else {
				_, err = fmt.Println(s.ID)
			}
			if err == nil && s.Status.State == client.SnapshotFailed {
				err = errs.New(errs.Internal, "snapshot %s failed: %s; `sandboxctl snapshot rm %s` removes what is left of it", s.ID, s.Status.Message, s.ID)
			}
			return err
		},
	}
	o.flags(cmd, true)
	cmd.Flags().StringVar(&name, "name", "", "name of the snapshot; it need not be unique")
	cmd.Flags().BoolVar(&noWait, "no-wait", false, "print the id at once, while the snapshot is still being taken")
	return cmd
}

func newSnapshotLs(c *cli) *cobra.Command {
	var (
		o       output
		sandbox string
	)
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List snapshots",
		Example: `  sandboxctl snapshot ls
  sandboxctl snapshot ls --sandbox dnruqjdutkuk -o json`,
		Args: cobra.NoArgs,
		RunE: snapshots.of(c, &o, func(ctx context.Context, cl *client.Client, _ []string) ([]client.Snapshot, error) {
			return cl.Snapshots(ctx, sandbox)
		}),
	}
	o.flags(cmd, true)
	cmd.Flags().StringVar(&sandbox, "sandbox", "", "only those of the sandbox with this id, which may be gone")
	return cmd
}

var snapshots = listing[client.Snapshot]{
	name:   func(s client.Snapshot) string { return s.ID },
	header: []string{"ID", "NAME", "SANDBOX", "STATE", "CREATED"},
	row: func(s client.Snapshot) []string {
		state := s.Status.State
		if state == client.SnapshotFailed {
			state += " (" + clip(s.Status.Message, 60) + ")"
		}
		return []string{s.ID, s.Name, s.SandboxID, state, ago(s.CreatedAt)}
	},
}

func newSnapshotInspect(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:     "inspect SNAPSHOT...",
		Short:   "Show all there is to know of snapshots, as JSON",
		Example: `  sandboxctl snapshot inspect before-upgrade`,
		Args:    cobra.MinimumNArgs(1),
		RunE:    inspecting(c, (*client.Client).InspectSnapshot),
	}
}

func newSnapshotRm(c *cli) *cobra.Command {
	cmd := verb(c, "rm SNAPSHOT...", "Remove snapshots; what was made from them stays", (*client.Client).RemoveSnapshot)
	cmd.Example = `  sandboxctl snapshot rm before-upgrade
  sandboxctl snapshot rm $(sandboxctl snapshot ls -q)`
	return cmd
}
