package system

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newKey(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "key",
		Aliases: []string{"keys"},
		Short:   "Create, list and remove API keys",
		Long: `Create, list and remove the keys with which clients use the API over TCP. A new key
works at once, and a removed key stops working at once. A key has a role:

  viewer    reads the state of sandboxes, but nothing that gives access to one
  operator  creates, uses and ends sandboxes, and adds images under new names
  admin     does everything, such as replacing images and creating keys

Keys in the daemon's configuration have the role admin, as have clients of the Unix
socket.`,
		Example: `  sandboxctl key create ci --role operator --expires 720h
  sandboxctl key ls
  sandboxctl key rm ci`,
	}
	cmd.AddCommand(newKeyCreate(p), newKeyLs(p), newKeyRm(p))
	return cmd
}

func newKeyRm(p *command.Program) *cobra.Command {
	return p.Verb(&cobra.Command{
		Use:     "rm NAME...",
		Short:   "Remove API keys; they stop working at once",
		Example: `  sandboxctl key rm ci`,
	}, func(ctx context.Context, cl *client.Client, name string) error { return cl.Keys().Remove(ctx, name) })
}

func newKeyCreate(p *command.Program) *cobra.Command {
	var (
		o       command.Output
		role    string
		expires time.Duration
	)
	cmd := &cobra.Command{
		Use:   "create [flags] NAME",
		Short: "Create an API key and print it, this once",
		Long: `Create an API key and print it. The daemon stores only a digest of the key, so it cannot
be shown again. If a key is lost, create another.`,
		Example: `  sandboxctl key create ci
  sandboxctl key create dashboard --role viewer --expires 720h
  export OPEN_SANDBOX_API_KEY=$(sandboxctl key create me --role admin)`,
		Args: cobra.ExactArgs(1),
	}
	cmd.RunE = p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
		var at time.Time
		if cmd.Flags().Changed("expires") {
			if expires <= 0 {
				return errs.New(errs.Invalid,
					"--expires %s: want a duration above 0, such as 720h; leave it out for a key that does not expire", expires)
			}
			at = time.Now().Add(expires)
		}
		k, err := cl.Keys().Create(ctx, args[0], role, at)
		if err != nil {
			return err
		}
		return o.One(k, k.Secret)
	})
	o.Flags(cmd, false)
	cmd.Flags().StringVar(&role, "role", "operator", "viewer, operator or admin")
	command.Choices(cmd, "role", "viewer", "operator", "admin")
	command.DurationFlag(cmd.Flags(), &expires, "expires", "", 0, "time until the key expires, such as 720h (default: it does not expire)")
	return cmd
}

func newKeyLs(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List API keys",
		Example: `  sandboxctl key ls
  sandboxctl key ls -o json`,
		Args: cobra.NoArgs,
		RunE: keys.Of(p, &o, func(ctx context.Context, cl *client.Client, _ []string) ([]wire.Key, error) {
			return cl.Keys().List(ctx)
		}),
	}
	o.Flags(cmd, true)
	return cmd
}

var keys = command.Listing[wire.Key]{
	Name:   func(k wire.Key) string { return k.Name },
	Header: []string{"NAME", "ROLE", "CREATED", "EXPIRES", "FROM"},
	Row: func(k wire.Key) []string {
		created := ""
		if k.CreatedAt != nil {
			created = text.Ago(*k.CreatedAt)
		}
		expires := text.Until(k.ExpiresAt)
		if k.ExpiresAt != nil && !k.ExpiresAt.After(time.Now()) {
			expires = "expired"
		}
		return []string{k.Name, k.Role, created, expires, k.Source}
	},
}
