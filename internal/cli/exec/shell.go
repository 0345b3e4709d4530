package exec

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/foreground"
	"github.com/sandboxd/sandboxd/pkg/client"
)

func newShell(p *command.Program) *cobra.Command {
	f := foreground.Flags{Interactive: true, TTY: true}
	var env []string
	cmd := &cobra.Command{
		Use:   "shell [flags] SANDBOX",
		Short: "Open a shell in a sandbox at this terminal",
		Long: `Open bash in a sandbox at this terminal, as exec -it does, or sh if there is no bash.
The exit status is the shell's. The detach keys leave the shell running: see
sandboxctl attach.`,
		Example: "  sandboxctl shell lab\n  sandboxctl shell -u root -w / lab",
		Args:    cobra.ExactArgs(1),
		RunE: p.Run(func(_ context.Context, cl *client.Client, args []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			vars, err := command.Environment(env, nil)
			if err != nil {
				return err
			}
			sig := foreground.Catch()
			defer sig.Stop()
			return f.Run(foreground.Job{
				Client: cl, Signals: sig, Sandbox: args[0], Command: f.Command(nil, command.Flat(vars)), User: f.User,
			})
		}),
	}
	cmd.Flags().StringVarP(&f.Workdir, "workdir", "w", "", "directory to start in (default: the image's)")
	cmd.Flags().StringVarP(&f.User, "user", "u", "", "user to run as, NAME|UID[:GROUP|GID] (default: the image's)")
	cmd.Flags().StringArrayVarP(&env, "env", "e", nil, "environment variable: NAME=VALUE, or NAME to pass on the local value")
	foreground.DetachKeysFlag(cmd, &f.DetachKeys)
	return cmd
}
