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
		err := startAgain(ctx, cl, id)
		if errs.Is(err, errs.WrongState) {
			return already(ctx, cl, id, err, wire.Running)
		}
		return err
	})
}

// startAgain starts a sandbox that has ended, and returns when it runs.
func startAgain(ctx context.Context, cl *client.Client, id string) error {
	sb, err := cl.Restart(ctx, id, true)
	if err == nil && sb.Status.State == wire.Failed {
		err = notUp(sb, errs.New(errs.Internal, "sandbox %s failed (%s): %s; its files are kept",
			sb.ID, sb.Status.Reason, sb.Status.Message))
	}
	if err == nil {
		err = unready(sb)
	}
	return err
}

func newStop(p *command.Program) *cobra.Command {
	var seconds int
	cmd := p.Verb(&cobra.Command{
		Use:   "stop [-t SECONDS] SANDBOX...",
		Short: "Stop sandboxes and keep their files until they expire or are removed",
		Long: `Stop sandboxes and keep their files until they expire or are removed. The entrypoint gets
SIGTERM, or the signal that --stop-signal of create, or else STOPSIGNAL of the image, names.
After the seconds of -t all processes are killed.`,
		Example: `  sandboxctl stop lab
  sandboxctl stop -t 60 lab`,
	}, func(ctx context.Context, cl *client.Client, id string) error {
		err := cl.Stop(ctx, id, time.Duration(seconds)*time.Second)
		if errs.Is(err, errs.WrongState) {
			return already(ctx, cl, id, err, wire.Terminated, wire.Failed)
		}
		return err
	})
	graceFlag(cmd, &seconds)
	return cmd
}

func graceFlag(cmd *cobra.Command, seconds *int) {
	cmd.Flags().IntVarP(seconds, "time", "t", 10, "seconds to wait after the stop signal before all processes are killed")
}

func newRestart(p *command.Program) *cobra.Command {
	var seconds int
	cmd := p.Verb(&cobra.Command{
		Use:   "restart [-t SECONDS] SANDBOX...",
		Short: "Stop sandboxes and start them again, with their files",
		Long: `Stop sandboxes and start them again, with their files. A sandbox that has ended is
started. Its id, its name and its address stay.`,
		Example: `  sandboxctl restart lab
  sandboxctl restart -t 60 lab`,
	}, func(ctx context.Context, cl *client.Client, id string) error {
		err := cl.Stop(ctx, id, time.Duration(seconds)*time.Second)
		if err != nil && !(errs.Is(err, errs.WrongState) && is(ctx, cl, id, wire.Terminated, wire.Failed) != "") {
			return err
		}
		return startAgain(ctx, cl, id)
	})
	graceFlag(cmd, &seconds)
	return cmd
}

// already turns a refusal into a note if the sandbox has the wanted state already, as
// docker does.
func already(ctx context.Context, cl *client.Client, id string, refused error, want ...string) error {
	state := is(ctx, cl, id, want...)
	if state == "" {
		return refused
	}
	command.Note(fmt.Sprintf("sandbox %s is already %s", id, state))
	return nil
}

// is returns the state of a sandbox if it is one of want, or "".
func is(ctx context.Context, cl *client.Client, id string, want ...string) string {
	sb, err := cl.Get(ctx, id)
	if err != nil || !slices.Contains(want, sb.Status.State) {
		return ""
	}
	return sb.Status.State
}
