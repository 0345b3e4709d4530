package cli

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newKey(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "key",
		Aliases: []string{"keys"},
		Short:   "Make, list and remove API keys",
		Long: `Make, list and remove the keys with which clients use the API over TCP. They work,
and stop working, at once. A key has a role:

  viewer    looks at sandboxes, but at nothing that opens one
  operator  makes, uses and ends sandboxes, and adds images
  admin     does everything: removes images, makes keys

Those of the daemon's configuration are admins', and so is who uses the Unix
socket.`,
		Example: `  sandboxctl key create ci --role operator --expires 720h
  sandboxctl key ls
  sandboxctl key rm ci`,
	}
	rm := verb(c, "rm NAME...", "Remove API keys; from then on they open nothing", (*client.Client).RemoveKey)
	rm.Example = `  sandboxctl key rm ci`
	cmd.AddCommand(newKeyCreate(c), newKeyLs(c), rm)
	return cmd
}

func newKeyCreate(c *cli) *cobra.Command {
	var (
		o       output
		role    string
		expires time.Duration
	)
	cmd := &cobra.Command{
		Use:   "create [flags] NAME",
		Short: "Make an API key and print it, this once",
		Long: `Make an API key and print it. The daemon keeps a digest of it alone, so that it can
not be shown again: make another if it is lost.`,
		Example: `  sandboxctl key create ci
  sandboxctl key create dashboard --role viewer --expires 720h
  export OPEN_SANDBOX_API_KEY=$(sandboxctl key create me --role admin)`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(); err != nil {
				return err
			}
			var at time.Time
			if cmd.Flags().Changed("expires") {
				if expires <= 0 {
					return errs.New(errs.Invalid, "--expires %s: want a time to come, as 720h; leave it out for a key that does not expire", expires)
				}
				at = time.Now().Add(expires)
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			k, err := cl.CreateKey(cmd.Context(), args[0], role, at)
			if err != nil {
				return err
			}
			if o.format == "json" {
				return printJSON(os.Stdout, k)
			}
			_, err = fmt.Println(k.Secret)
			return err
		},
	}
	o.flags(cmd, false)
	cmd.Flags().StringVar(&role, "role", "operator", "viewer, operator or admin")
	_ = cmd.RegisterFlagCompletionFunc("role", cobra.FixedCompletions([]string{"viewer", "operator", "admin"}, cobra.ShellCompDirectiveNoFileComp))
	cmd.Flags().DurationVar(&expires, "expires", 0, "how long it works, as 720h (default: until it is removed)")
	return cmd
}

func newKeyLs(c *cli) *cobra.Command {
	var o output
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List API keys",
		Example: `  sandboxctl key ls
  sandboxctl key ls -o json`,
		Args: cobra.NoArgs,
		RunE: keys.of(c, &o, func(ctx context.Context, cl *client.Client, _ []string) ([]client.Key, error) { return cl.Keys(ctx) }),
	}
	o.flags(cmd, true)
	return cmd
}

var keys = listing[client.Key]{
	name:   func(k client.Key) string { return k.Name },
	header: []string{"NAME", "ROLE", "CREATED", "EXPIRES", "FROM"},
	row: func(k client.Key) []string {
		created := ""
		if k.CreatedAt != nil {
			created = ago(*k.CreatedAt)
		}
		expires := until(k.ExpiresAt)
		if k.ExpiresAt != nil && !k.ExpiresAt.After(time.Now()) {
			expires = "expired"
		}
		return []string{k.Name, k.Role, created, expires, k.Source}
	},
}
