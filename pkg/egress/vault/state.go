package vault

import (
	"maps"
	"slices"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A State is a vault without its values: CredentialVaultState of api/opensandbox/egress.yaml.
// Arrays are sorted by name and never null.
type State struct {
	Revision    int64                `json:"revision"`
	Credentials []CredentialMetadata `json:"credentials"`
	Bindings    []BindingMetadata    `json:"bindings"`
}

// A CredentialList is CredentialListResponse of that document.
type CredentialList struct {
	Revision    int64                `json:"revision"`
	Credentials []CredentialMetadata `json:"credentials"`
}

// A BindingList is CredentialBindingListResponse of that document.
type BindingList struct {
	Revision int64             `json:"revision"`
	Bindings []BindingMetadata `json:"bindings"`
}

// CredentialMetadata is a credential without its value.
type CredentialMetadata struct {
	Name       string     `json:"name"`
	SourceType SourceType `json:"sourceType"`
	Revision   int64      `json:"revision"`
	// What that document does not have: Credential.Placeholder and Env.
	Placeholder string `json:"-"`
	Env         string `json:"-"`
}

// BindingMetadata is a binding without the names of its credentials. The defaults of its match
// are filled in.
type BindingMetadata struct {
	Name     string       `json:"name"`
	Revision int64        `json:"revision"`
	Match    Match        `json:"match"`
	Auth     AuthMetadata `json:"auth"`
}

// AuthMetadata is the type of an Auth, and the header of an apiKey.
type AuthMetadata struct {
	Type AuthType `json:"type"`
	Name string   `json:"name,omitempty"`
}

// State returns all that may be shown.
func (v *Vault) State() State {
	return State{v.revision, v.CredentialList().Credentials, v.BindingList().Bindings}
}

// CredentialList returns what may be shown of the credentials.
func (v *Vault) CredentialList() CredentialList {
	out := CredentialList{v.revision, []CredentialMetadata{}}
	for _, c := range v.Credentials() {
		out.Credentials = append(out.Credentials, c.metadata())
	}
	return out
}

// BindingList returns what may be shown of the bindings.
func (v *Vault) BindingList() BindingList {
	out := BindingList{v.revision, []BindingMetadata{}}
	for _, b := range v.Bindings() {
		out.Bindings = append(out.Bindings, b.metadata())
	}
	return out
}

// CredentialMetadata returns what may be shown of one credential, or errs.NotFound.
func (v *Vault) CredentialMetadata(name string) (CredentialMetadata, error) {
	if c := v.credentials[name]; c != nil {
		return c.metadata(), nil
	}
	return CredentialMetadata{}, errs.New(errs.NotFound, "credential vault: no credential is named %q", short(name))
}

// BindingMetadata returns what may be shown of one binding, or errs.NotFound.
func (v *Vault) BindingMetadata(name string) (BindingMetadata, error) {
	if b := v.bindings[name]; b != nil {
		return b.metadata(), nil
	}
	return BindingMetadata{}, errs.New(errs.NotFound, "credential vault: no binding is named %q", short(name))
}

func (c *Credential) metadata() CredentialMetadata {
	return CredentialMetadata{c.Name, c.Source.Type, c.Revision, c.Placeholder, c.Env}
}

func (b *Binding) metadata() BindingMetadata {
	auth := AuthMetadata{Type: b.Auth.Type}
	if b.Auth.Type == APIKey {
		auth.Name = b.Auth.Headers[0].Name
	}
	return BindingMetadata{b.Name, b.Revision, b.Match, auth}
}

func sortedKeys[T any](m map[string]T) []string { return slices.Sorted(maps.Keys(m)) }
