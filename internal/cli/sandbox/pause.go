package sandbox

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/client"
)

func newPause(p *command.Program) *cobra.Command {
	return p.Verb(&cobra.Command{
		Use:   "pause SANDBOX...",
		Short: "Pause all processes of sandboxes",
		Example: `  sandboxctl pause lab
  sandboxctl pause $(sandboxctl ps -q --filter label=team=a)`,
	}, func(ctx context.Context, cl *client.Client, id string) error { return cl.Pause(ctx, id) })
}

func newHibernate(p *command.Program) *cobra.Command {
	return p.Verb(&cobra.Command{
		Use:   "hibernate SANDBOX...",
		Short: "Put the memory of sandboxes on disk, and free it",
		Long: `Put the memory of sandboxes on disk, and free it. sandboxctl resume brings it back,
also after a restart of the daemon or of the host: the programs go on where they were.
Connections to the outside end. Runtime runsc only.`,
		Example: `  sandboxctl hibernate lab
  sandboxctl resume lab`,
	}, func(ctx context.Context, cl *client.Client, id string) error { return client.Hibernate(ctx, cl, id) })
}

func newResume(p *command.Program) *cobra.Command {
	return p.Verb(&cobra.Command{
		Use:     "resume SANDBOX...",
		Aliases: []string{"unpause"},
		Short:   "Resume paused and hibernated sandboxes",
		Example: `  sandboxctl resume lab`,
	}, func(ctx context.Context, cl *client.Client, id string) error { return cl.Resume(ctx, id) })
}
