package sandbox

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newKill(p *command.Program) *cobra.Command {
	var signal string
	cmd := p.Verb(&cobra.Command{
		Use:   "kill [-s SIGNAL] SANDBOX...",
		Short: "Kill sandboxes and keep their files, or send a signal to their entrypoints",
		Long: `Kill all processes of sandboxes at once, and keep the files as sandboxctl stop does.

With another signal than SIGKILL, the entrypoint of each sandbox gets that signal, and
the sandbox lives on if its entrypoint does. To signal a command of exec -d, use
sandboxctl command kill.`,
		Example: `  sandboxctl kill lab
  sandboxctl kill -s HUP web`,
	}, func(ctx context.Context, cl *client.Client, id string) error {
		if name := command.SignalName(signal); name != "SIGKILL" {
			return signalEntrypoint(ctx, cl, id, name)
		}
		return cl.Stop(ctx, id, 0) // also a sandbox whose agent does not answer, or that is paused
	})
	cmd.Flags().StringVarP(&signal, "signal", "s", "SIGKILL", "signal to send, by name or number")
	return cmd
}

func signalEntrypoint(ctx context.Context, cl *client.Client, id, name string) error {
	sb, err := cl.Get(ctx, id)
	if err != nil {
		return err
	}
	if len(sb.Entrypoint) == 0 {
		return errs.New(errs.WrongState, "sandbox %s was created without an entrypoint, so there is nothing to send %s to; "+
			"`sandboxctl kill %s` kills the sandbox, `sandboxctl command kill -s %s` signals a command in it", id, name, id, name)
	}
	return cl.Commands(sb.ID).Signal(ctx, agent.EntrypointID, name)
}
