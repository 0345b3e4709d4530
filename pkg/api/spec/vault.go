package spec

import (
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// Vault shows a credential vault; native: also what OpenSandbox's does not have.
func Vault(st vault.State, native bool) wire.CredentialVault {
	out := wire.CredentialVault{Revision: st.Revision, Credentials: []wire.Credential{}, Bindings: []wire.CredentialBinding{}}
	for _, c := range st.Credentials {
		shown := wire.Credential{Name: c.Name, SourceType: string(c.SourceType), Revision: c.Revision}
		if native {
			shown.Placeholder, shown.Env = c.Placeholder, c.Env
		}
		out.Credentials = append(out.Credentials, shown)
	}
	for _, b := range st.Bindings {
		out.Bindings = append(out.Bindings, wire.CredentialBinding{
			Name: b.Name, Revision: b.Revision, Auth: wire.CredentialAuthKind{Type: string(b.Auth.Type), Name: b.Auth.Name},
			Match: wire.CredentialMatch{Schemes: b.Match.Schemes, Hosts: b.Match.Hosts, Methods: b.Match.Methods, Paths: b.Match.Paths},
		})
	}
	return out
}
