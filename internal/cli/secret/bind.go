package secret

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// bindFlags are a binding.
type bindFlags struct {
	credential    string
	match         wire.CredentialMatch
	bearer, basic bool
	headers       []string
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
--basic the value is base64 of USER:PASSWORD. With --header the value stands in the header
of that name; several headers have a secret each: --header NAME=SECRET. A header of that
name which the sandbox sends is removed. With --substitute the sandbox sends a text, the
placeholder, in that part of a request, and the secret replaces it.`,
		Example: `  sandboxctl secret bind lab api --credential token --host api.example.com
  sandboxctl secret bind lab hub --credential hub --host '*.example.com' --path '/v2/*' --basic
  sandboxctl secret bind lab search --credential key --host search.example.com --header X-Api-Key
  sandboxctl secret bind lab shop --host shop.example.com --header X-Key-Id=id --header X-Key=key
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
	f.StringArrayVar(&b.headers, "header", nil, "put it into the header of this name, or with NAME=SECRET that other secret")
	f.StringSliceVar(&b.substitute, "substitute", nil, "replace the placeholder in this part of requests: path, query, header or body")
	f.StringVar(&b.placeholder, "placeholder", "", "with --substitute: the text to replace (default the name of the secret with __ "+
		"around it: __token__)")
	command.Choices(cmd, "scheme", "https", "http")
	command.Choices(cmd, "substitute", "path", "query", "header", "body")
	return cmd
}

// binding is what the flags say. The daemon checks the rest.
func (b *bindFlags) binding(name string) (wire.NewBinding, error) {
	out := wire.NewBinding{Name: name, Match: b.match}
	ways := 0
	for _, on := range []bool{b.bearer, b.basic, len(b.headers) > 0, len(b.substitute) > 0} {
		if on {
			ways++
		}
	}
	headers := b.eachHeader()
	own := func(h wire.CredentialHeader) bool { return h.Credential != "" }
	switch {
	case b.credential == "" && (len(headers) == 0 || slices.ContainsFunc(headers, func(h wire.CredentialHeader) bool { return !own(h) })):
		return out, errs.New(errs.Invalid, "--credential is missing: the name of a secret (sandboxctl secret ls)")
	case len(b.match.Hosts) == 0:
		return out, errs.New(errs.Invalid, "--host is missing: the host that gets the secret, such as api.example.com")
	case ways > 1:
		return out, errs.New(errs.Invalid, "--bearer, --basic, --header and --substitute exclude each other; make a binding for each")
	case b.credential != "" && len(headers) > 0 && !slices.ContainsFunc(headers, func(h wire.CredentialHeader) bool { return !own(h) }):
		return out, errs.New(errs.Invalid, "each --header names a secret of its own, so --credential has no use; leave it out")
	case b.placeholder != "" && len(b.substitute) == 0:
		return out, errs.New(errs.Invalid, "--placeholder is for --substitute, which says in which part of a request it is replaced")
	}
	for i := range headers {
		headers[i].Credential = cmp.Or(headers[i].Credential, b.credential)
	}
	switch {
	case len(headers) == 1:
		out.Auth = wire.CredentialAuth{Type: "apiKey", Name: headers[0].Name, Credential: headers[0].Credential}
	case len(headers) > 1:
		out.Auth = wire.CredentialAuth{Type: "customHeaders", Headers: headers}
	case len(b.substitute) > 0:
		out.Auth = wire.CredentialAuth{Type: "passthrough", Substitutions: []wire.CredentialSubstitution{
			{Credential: b.credential, Placeholder: cmp.Or(b.placeholder, "__"+b.credential+"__"), In: b.substitute},
		}}
	case b.basic:
		out.Auth = wire.CredentialAuth{Type: "basic", Credential: b.credential}
	default:
		out.Auth = wire.CredentialAuth{Type: "bearer", Credential: b.credential}
	}
	return out, nil
}

// eachHeader reads the headers: NAME, or NAME=SECRET.
func (b *bindFlags) eachHeader() (all []wire.CredentialHeader) {
	for _, h := range b.headers {
		name, credential, _ := strings.Cut(h, "=")
		all = append(all, wire.CredentialHeader{Name: name, Credential: credential})
	}
	return all
}
