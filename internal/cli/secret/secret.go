// Package secret has the commands for secrets that a sandbox uses and never has: the
// credential vault.
//
// What surprises: the first secret makes the vault. And a command reads the vault before it
// changes it, to know whether a name is new. If somebody else was faster, it begins anew.
package secret

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	cmd := &cobra.Command{
		Use:     "secret",
		Aliases: []string{"secrets"},
		Short:   "Let sandboxes use secrets that they never have",
		Long: `Let sandboxes use secrets that they never have.

The daemon puts a secret into requests of the sandbox on their way to the hosts that it is
bound to. The sandbox has a placeholder at most. It must have been created with
--credential-proxy, or with a rule about requests, and its network policy must allow the
hosts.`,
		Example: `  sandboxctl create --credential-proxy --allow api.example.com:443 --name lab python
  sandboxctl secret set lab token < token.txt
  sandboxctl secret bind lab api --credential token --host api.example.com
  sandboxctl exec lab -- curl https://api.example.com/v1/me`,
	}
	cmd.AddCommand(newSet(p), newBind(p), newLs(p), newUnbind(p), newRm(p))
	return []*cobra.Command{cmd}
}

func newLs(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:     "ls [flags] SANDBOX",
		Aliases: []string{"list"},
		Short:   "List the secrets of a sandbox, and where they are bound",
		Long: `List the secrets of a sandbox, without their values, and where they are bound. A program
of the sandbox may send the placeholder of a secret where a binding puts that secret; the
daemon replaces it. A sandbox without a vault has none.`,
		Example: `  sandboxctl secret ls lab
  sandboxctl secret ls -o json lab | jq -r '.credentials[].placeholder'`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			v, err := cl.Vault(args[0]).Get(ctx)
			if err != nil && !client.NoVault(err) {
				return err
			}
			return show(&o, v)
		}),
	}
	o.Flags(cmd, true)
	return cmd
}

// show prints a vault: as JSON all of it, else its secrets, and in a table its bindings too.
func show(o *command.Output, v wire.CredentialVault) error {
	if o.Format == command.JSON {
		if v.Credentials == nil { // there is no vault
			v.Credentials, v.Bindings = []wire.Credential{}, []wire.CredentialBinding{}
		}
		return text.JSON(os.Stdout, v)
	}
	if err := secrets.Show(os.Stdout, o, v.Credentials); err != nil || o.Format != command.Table || len(v.Bindings) == 0 {
		return err
	}
	if _, err := os.Stdout.WriteString("\n"); err != nil {
		return err
	}
	return bindings.Show(os.Stdout, o, v.Bindings)
}

var secrets = command.Listing[wire.Credential]{
	Name:   func(c wire.Credential) string { return c.Name },
	Header: []string{"SECRET", "SOURCE", "REVISION", "ENV", "PLACEHOLDER"},
	Row: func(c wire.Credential) []string {
		return []string{c.Name, c.SourceType, strconv.FormatInt(c.Revision, 10), c.Env, c.Placeholder}
	},
}

var bindings = command.Listing[wire.CredentialBinding]{
	Name:   func(b wire.CredentialBinding) string { return b.Name },
	Header: []string{"BINDING", "SCHEMES", "HOSTS", "METHODS", "PATHS", "AUTH"},
	Row: func(b wire.CredentialBinding) []string {
		m := b.Match
		return []string{
			b.Name, strings.Join(m.Schemes, ","), strings.Join(m.Hosts, ","), strings.Join(m.Methods, ","), strings.Join(m.Paths, ","),
			strings.TrimSpace(b.Auth.Type + " " + b.Auth.Name),
		}
	},
}

func newUnbind(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:     "unbind SANDBOX BINDING...",
		Short:   "Remove bindings of secrets, and print their names",
		Example: `  sandboxctl secret unbind lab api`,
		Args:    cobra.MinimumNArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			return command.Each(args[1:], func(name string) error {
				_, err := cl.Vault(args[0]).Patch(ctx, wire.CredentialVaultPatch{Bindings: &wire.BindingChanges{Delete: []string{name}}})
				return err
			})
		}),
	}
}

func newRm(p *command.Program) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "rm SANDBOX SECRET...",
		Short: "Remove secrets that no binding uses, and print their names",
		Long: `Remove secrets that no binding uses, and print their names. With --all, remove all secrets
and all bindings of the sandbox.`,
		Example: `  sandboxctl secret rm lab token
  sandboxctl secret rm --all lab`,
		Args: func(cmd *cobra.Command, args []string) error {
			if all {
				return cobra.ExactArgs(1)(cmd, args)
			}
			return cobra.MinimumNArgs(2)(cmd, args)
		},
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			v := cl.Vault(args[0])
			if all {
				return command.Each(args, func(string) error { return v.Delete(ctx) })
			}
			return command.Each(args[1:], func(name string) error {
				_, err := v.Patch(ctx, wire.CredentialVaultPatch{Credentials: &wire.CredentialChanges{Delete: []string{name}}})
				return err
			})
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "remove all secrets and bindings")
	return cmd
}

// maxTries is how often edit begins anew because somebody else has changed the vault.
const maxTries = 5

// edit changes the vault by what change makes of its present state.
func edit(ctx context.Context, v client.Vault, change func(wire.CredentialVault) wire.CredentialVaultPatch) (wire.CredentialVault, error) {
	for try := 1; ; try++ {
		now, err := v.Get(ctx)
		if err != nil {
			return now, err
		}
		p := change(now)
		p.ExpectedRevision = &now.Revision
		next, err := v.Patch(ctx, p)
		if !changedMeanwhile(err) || try == maxTries {
			return next, err
		}
	}
}

// changedMeanwhile reports whether err says that the vault has another revision than it was seen
// with.
func changedMeanwhile(err error) bool {
	e, ok := errors.AsType[*errs.Error](err)
	return ok && e.Code == errs.WrongState && e.Wire == "SANDBOX::INVALID_STATE"
}
