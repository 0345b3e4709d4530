package cli

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newStart(c *cli) *cobra.Command {
	cmd := verb(c, "start SANDBOX...", "Run sandboxes again that have ended, with their files", func(cl *client.Client, ctx context.Context, id string) error {
		sb, err := cl.Restart(ctx, id, true)
		if errs.Is(err, errs.WrongState) {
			return already(ctx, cl, id, err, client.Running)
		}
		if err == nil && sb.Status.State == client.Failed {
			err = notUp(sb, errs.New(errs.Internal, "sandbox %s failed (%s): %s; its files are kept", sb.ID, sb.Status.Reason, sb.Status.Message))
		}
		if err == nil {
			err = unready(sb)
		}
		return err
	})
	cmd.Example = `  sandboxctl start lab
  sandboxctl start $(sandboxctl ps -aq --filter state=Terminated)`
	return cmd
}

func newStop(c *cli) *cobra.Command {
	var seconds int
	cmd := verb(c, "stop [-t SECONDS] SANDBOX...", "End sandboxes and keep their files, until they expire or are removed", func(cl *client.Client, ctx context.Context, id string) error {
		err := cl.Stop(ctx, id, time.Duration(seconds)*time.Second)
		if errs.Is(err, errs.WrongState) {
			return already(ctx, cl, id, err, client.Terminated, client.Failed)
		}
		return err
	})
	cmd.Example = `  sandboxctl stop lab
  sandboxctl stop -t 60 lab`
	cmd.Flags().IntVarP(&seconds, "time", "t", 10, "seconds that the entrypoint has to end after SIGTERM")
	return cmd
}

// already forgives a refusal where the sandbox is as it was to become, as docker
// does, and says so.
func already(ctx context.Context, cl *client.Client, id string, refused error, want ...string) error {
	sb, err := cl.Get(ctx, id)
	if err != nil || !slices.Contains(want, sb.Status.State) {
		return refused
	}
	fmt.Fprintf(os.Stderr, "sandboxctl: note: sandbox %s is %s already\n", printable(id, false), sb.Status.State)
	return nil
}
