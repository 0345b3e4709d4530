package spec

import (
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// Vault shows a credential vault, with the placeholders of its credentials, by name, as far as
// they are given.
func Vault(st vault.State, placeholders map[string]string) wire.CredentialVault {
	out := wire.CredentialVault{Revision: st.Revision, Credentials: []wire.Credential{}, Bindings: []wire.CredentialBinding{}}
	for _, c := range st.Credentials {
		out.Credentials = append(out.Credentials, wire.Credential{
			Name: c.Name, SourceType: string(c.SourceType), Revision: c.Revision, Placeholder: placeholders[c.Name],
		})
	}
	for _, b := range st.Bindings {
		out.Bindings = append(out.Bindings, wire.CredentialBinding{
			Name: b.Name, Revision: b.Revision, Auth: wire.CredentialAuthKind{Type: string(b.Auth.Type), Name: b.Auth.Name},
			Match: wire.CredentialMatch{Schemes: b.Match.Schemes, Hosts: b.Match.Hosts, Methods: b.Match.Methods, Paths: b.Match.Paths},
		})
	}
	return out
}
