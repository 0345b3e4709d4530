// Package snapshot has the commands for snapshots: the files of a sandbox as of one
// moment. `create --from`, in package sandbox, starts another from one.
package snapshot

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	return []*cobra.Command{newSnapshot(p)}
}

func newSnapshot(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "snapshot",
		Aliases: []string{"snapshots"},
		Short:   "Save the files of a sandbox and start other sandboxes from them",
		Example: `  sandboxctl snapshot create lab --name before-upgrade
  sandboxctl create --from before-upgrade --name lab2`,
	}
	cmd.AddCommand(newSnapshotCreate(p), newSnapshotLs(p), newSnapshotInspect(p), newSnapshotRm(p))
	return cmd
}

func newSnapshotCreate(p *command.Program) *cobra.Command {
	var (
		o      command.Output
		name   string
		noWait bool
		memory bool
		leave  bool
	)
	cmd := &cobra.Command{
		Use:   "create [flags] SANDBOX",
		Short: "Take a snapshot of the files of a sandbox and print its id",
		Long: `Take a snapshot of the files of a sandbox and print its id.

The sandbox may run, be paused or have ended. A running sandbox is frozen for some
milliseconds. If the storage pool is a plain directory, it is frozen for as long as
copying its files takes.

With --memory, the snapshot also has the memory and the processes of the sandbox, which
runs on gVisor: "create --from SNAPSHOT --with-memory" makes sandboxes in which the
programs go on where they were. The sandbox stands still for some 0.3 ms for each MB of
its memory. With --leave-running=false, it is stopped when the snapshot is ready.`,
		Example: `  sandboxctl snapshot create lab
  sandboxctl snapshot create lab --name before-upgrade
  sandboxctl snapshot create --memory lab --name warmed-up`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			if !leave && (!memory || noWait) {
				return errs.New(errs.Invalid, "--leave-running=false stops the sandbox when its memory has been kept: it needs --memory, "+
					"and excludes --no-wait")
			}
			create := cl.Snapshots().Create
			if memory {
				create = cl.Snapshots().CreateWithMemory
			}
			s, err := create(ctx, args[0], name, !noWait)
			if err != nil {
				return err
			}
			err = o.One(s, s.ID)
			if err == nil && !leave && s.Status.State == wire.SnapshotReady {
				err = cl.Stop(ctx, args[0], 0)
			}
			if err == nil && s.Status.State == wire.SnapshotFailed {
				err = errs.New(errs.Internal, "snapshot %s failed: %s; `sandboxctl snapshot rm %s` removes what is left of it",
					s.ID, s.Status.Message, s.ID)
			}
			return err
		}),
	}
	o.Flags(cmd, true)
	cmd.Flags().StringVar(&name, "name", "", "name of the snapshot, which no other snapshot has")
	cmd.Flags().BoolVar(&memory, "memory", false, "also keep the memory and the processes of the sandbox, which must run on gVisor")
	cmd.Flags().BoolVar(&leave, "leave-running", true, "with --memory: let the sandbox run on when its memory has been kept")
	cmd.Flags().BoolVar(&noWait, "no-wait", false, "print the id at once, without waiting for the snapshot")
	return cmd
}

func newSnapshotLs(p *command.Program) *cobra.Command {
	var (
		o       command.Output
		sandbox string
	)
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List snapshots",
		Example: `  sandboxctl snapshot ls
  sandboxctl snapshot ls --sandbox dnruqjdutkuk -o json`,
		Args: cobra.NoArgs,
		RunE: snapshots.Of(p, &o, func(ctx context.Context, cl *client.Client, _ []string) ([]wire.Snapshot, error) {
			return cl.Snapshots().List(ctx, sandbox)
		}),
	}
	o.Flags(cmd, true)
	snapshots.FormatFlag(cmd, &o)
	cmd.Flags().StringVar(&sandbox, "sandbox", "", "list only snapshots of the sandbox with this id; the sandbox may be gone")
	return cmd
}

// snapshots is how snapshots are listed.
var snapshots = command.Listing[wire.Snapshot]{
	Name:   func(s wire.Snapshot) string { return s.ID },
	Header: []string{"ID", "NAME", "SANDBOX", "STATE", "CREATED"},
	Row: func(s wire.Snapshot) []string {
		state := s.Status.State
		if state == wire.SnapshotFailed {
			state += " (" + text.Clip(s.Status.Message, 60) + ")"
		}
		return []string{s.ID, s.Name, s.SandboxID, state, text.Ago(s.CreatedAt)}
	},
}

func newSnapshotInspect(p *command.Program) *cobra.Command {
	return command.Inspect(p, &cobra.Command{
		Use:     "inspect SNAPSHOT...",
		Short:   "Print detailed information on snapshots, as JSON",
		Example: `  sandboxctl snapshot inspect before-upgrade`,
	}, nil, func(ctx context.Context, cl *client.Client, id string) (wire.SnapshotInspection, error) {
		return cl.Snapshots().Inspect(ctx, id)
	})
}

func newSnapshotRm(p *command.Program) *cobra.Command {
	return p.Verb(&cobra.Command{
		Use:   "rm SNAPSHOT...",
		Short: "Remove snapshots; sandboxes made from them stay",
		Example: `  sandboxctl snapshot rm before-upgrade
  sandboxctl snapshot rm $(sandboxctl snapshot ls -q)`,
	}, func(ctx context.Context, cl *client.Client, id string) error { return cl.Snapshots().Remove(ctx, id) })
}
