package sandbox

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newStart(p *command.Program) *cobra.Command {
	return p.Verb(&cobra.Command{
		Use:   "start SANDBOX...",
		Short: "Start sandboxes that have ended, with their files",
		Example: `  sandboxctl start lab
  sandboxctl start $(sandboxctl ps -aq --filter state=Terminated)`,
	}, func(ctx context.Context, cl *client.Client, id string) error {
		sb, err := cl.Restart(ctx, id, true)
		if errs.Is(err, errs.WrongState) {
			return already(ctx, cl, id, err, wire.Running)
		}
		if err == nil && sb.Status.State == wire.Failed {
			err = notUp(sb, errs.New(errs.Internal, "sandbox %s failed (%s): %s; its files are kept",
				sb.ID, sb.Status.Reason, sb.Status.Message))
		}
		if err == nil {
			err = unready(sb)
		}
		return err
	})
}

func newStop(p *command.Program) *cobra.Command {
	var seconds int
	cmd := p.Verb(&cobra.Command{
		Use:   "stop [-t SECONDS] SANDBOX...",
		Short: "Stop sandboxes and keep their files until they expire or are removed",
		Example: `  sandboxctl stop lab
  sandboxctl stop -t 60 lab`,
	}, func(ctx context.Context, cl *client.Client, id string) error {
		err := cl.Stop(ctx, id, time.Duration(seconds)*time.Second)
		if errs.Is(err, errs.WrongState) {
			return already(ctx, cl, id, err, wire.Terminated, wire.Failed)
		}
		return err
	})
	cmd.Flags().IntVarP(&seconds, "time", "t", 10, "seconds to wait after SIGTERM to the entrypoint before all processes are killed")
	return cmd
}

// already turns a refusal into a note if the sandbox has the wanted state already, as
// docker does.
func already(ctx context.Context, cl *client.Client, id string, refused error, want ...string) error {
	sb, err := cl.Get(ctx, id)
	if err != nil || !slices.Contains(want, sb.Status.State) {
		return refused
	}
	command.Note(fmt.Sprintf("sandbox %s is already %s", id, sb.Status.State))
	return nil
}
