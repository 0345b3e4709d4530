package secret

import (
	"context"
	"slices"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// bindFlags are a binding.
type bindFlags struct {
	credential    string
	match         wire.CredentialMatch
	bearer, basic bool
	header        string
	substitute    []string
	placeholder   string
}

func newBind(p *command.Program) *cobra.Command {
	var (
		o command.Output
		b bindFlags
	)
	cmd := &cobra.Command{
		Use:   "bind [flags] SANDBOX BINDING",
		Short: "Say in which requests of a sandbox a secret is put, and print the name of the binding",
		Long: `Say in which requests of a sandbox a secret is put, and print the name of the binding. A
binding of that name is replaced. The network policy of the sandbox must allow the hosts.

By default, and with --bearer, requests get the header "Authorization: Bearer VALUE". With
--basic the value is base64 of USER:PASSWORD. A header of that name which the sandbox sends
is removed. With --substitute the sandbox sends a text, the placeholder, in that part of a
request, and the secret replaces it.`,
		Example: `  sandboxctl secret bind lab api --credential token --host api.example.com
  sandboxctl secret bind lab hub --credential hub --host '*.example.com' --path '/v2/*' --basic
  sandboxctl secret bind lab search --credential key --host search.example.com --header X-Api-Key
  sandboxctl secret bind lab maps --credential key --host maps.example.com --substitute query`,
		Args: cobra.ExactArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			binding, err := b.binding(args[1])
			if err != nil {
				return err
			}
			v, err := edit(ctx, cl.Vault(args[0]), func(now wire.CredentialVault) wire.CredentialVaultPatch {
				all := []wire.NewBinding{binding}
				if slices.ContainsFunc(now.Bindings, func(o wire.CredentialBinding) bool { return o.Name == binding.Name }) {
					return wire.CredentialVaultPatch{Bindings: &wire.BindingChanges{Replace: all}}
				}
				return wire.CredentialVaultPatch{Bindings: &wire.BindingChanges{Add: all}}
			})
			if err != nil {
				return err
			}
			return o.One(v, args[1])
		}),
	}
	o.Flags(cmd, true)
	f := cmd.Flags()
	f.StringVar(&b.credential, "credential", "", "the secret, by its name")
	f.StringSliceVar(&b.match.Hosts, "host", nil, "host of the requests: api.example.com, or *.example.com for all names below it")
	f.StringSliceVar(&b.match.Schemes, "scheme", nil, "https or http (default https)")
	f.StringSliceVar(&b.match.Methods, "method", nil, "method of the requests (default GET, POST, PUT, PATCH and DELETE)")
	f.StringArrayVar(&b.match.Paths, "path", nil, "path of the requests, such as /v1/*; a * stands for any text (default all)")
	f.BoolVar(&b.bearer, "bearer", false, "put it into the header Authorization, as Bearer")
	f.BoolVar(&b.basic, "basic", false, "put it into the header Authorization, as Basic")
	f.StringVar(&b.header, "header", "", "put it into the header of this name")
	f.StringSliceVar(&b.substitute, "substitute", nil, "replace the placeholder in this part of requests: path, query, header or body")
	f.StringVar(&b.placeholder, "placeholder", "", "with --substitute: the text to replace (default the name of the secret with __ "+
		"around it: __token__)")
	command.Choices(cmd, "scheme", "https", "http")
	command.Choices(cmd, "substitute", "path", "query", "header", "body")
	return cmd
}

// binding is what the flags say. The daemon checks the rest.
func (b *bindFlags) binding(name string) (wire.NewBinding, error) {
	ways := 0
	for _, on := range []bool{b.bearer, b.basic, b.header != "", len(b.substitute) > 0} {
		if on {
			ways++
		}
	}
	switch {
	case b.credential == "":
		return wire.NewBinding{}, errs.New(errs.Invalid, "--credential is missing: the name of a secret (sandboxctl secret ls)")
	case len(b.match.Hosts) == 0:
		return wire.NewBinding{}, errs.New(errs.Invalid, "--host is missing: the host that gets secret %s, such as api.example.com",
			text.Clip(b.credential, 80))
	case ways > 1:
		return wire.NewBinding{}, errs.New(errs.Invalid, "--bearer, --basic, --header and --substitute exclude each other; make a binding "+
			"for each")
	case b.placeholder != "" && len(b.substitute) == 0:
		return wire.NewBinding{}, errs.New(errs.Invalid, "--placeholder is for --substitute, which says in which part of a request it is "+
			"replaced")
	}
	out := wire.NewBinding{Name: name, Match: b.match, Auth: wire.CredentialAuth{Type: "bearer", Credential: b.credential}}
	switch {
	case b.basic:
		out.Auth.Type = "basic"
	case b.header != "":
		out.Auth.Type, out.Auth.Name = "apiKey", b.header
	case len(b.substitute) > 0:
		placeholder := b.placeholder
		if placeholder == "" {
			placeholder = "__" + b.credential + "__"
		}
		out.Auth = wire.CredentialAuth{Type: "passthrough", Substitutions: []wire.CredentialSubstitution{
			{Credential: b.credential, Placeholder: placeholder, In: b.substitute},
		}}
	}
	return out, nil
}
