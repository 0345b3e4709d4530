// Package vault is the credential vault of a sandbox as a model: what a client may write into
// it, how it is changed, what of it may be shown, and how it is stored. It does no I/O.
//
//	POST  /credential-vault ──▶ Create ──▶ Vault, revision 1
//	PATCH /credential-vault ──▶ Patch  ──▶ another Vault, revision +1, or an error and the old one
//	GET                     ◀── State, CredentialList, BindingList: never a value
//	store                   ◀─▶ Encode, Decode: with values, to be sealed
//	requests                ◀── pkg/egress/vault/inject
//
// A credential has a name and a value, or says where the value comes from. A binding says in
// which requests the value may stand, and where in them. Both are those of OpenSandbox
// (api/opensandbox/egress.yaml), with what its SDK 1.1.1 sends beyond that document:
// substitutions, and the kind passthrough.
//
// What surprises: an error never contains a value, nor a part of one. So the JSON is read token
// by token (json.go): the errors of encoding/json quote what they could not read.
package vault

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/paths"
)

// Limits of a vault. Errors name the limit that was hit.
const (
	MaxCredentials   = 256
	MaxBindings      = 256
	MaxValue         = 64 << 10       // bytes of a value
	MaxSize          = 1 << 20        // bytes of all texts of a vault, and of the JSON of one request
	MaxEncoded       = MaxSize - 1024 // bytes of Encode: sealed it must fit into a record of 1 MiB (record.MaxSecretBytes)
	MaxName          = 128            // bytes of the name of a credential or a binding
	MaxHosts         = 64             // of a binding
	MaxPaths         = 64             // of a binding
	MaxMethods       = 32             // of a binding
	MaxHeaders       = 32             // of a binding of the kind customHeaders
	MaxSubstitutions = 32             // of a binding
	MaxAllHosts      = 1024           // of all bindings: each is compared with each, see overlap.go
	MaxAllPaths      = 1024           // of all bindings
)

// A Vault is the credentials and bindings of one sandbox. It is immutable: Patch makes another.
// No method changes what an earlier one has returned; callers change nothing of it either.
type Vault struct {
	revision    int64
	credentials map[string]*Credential
	bindings    map[string]*Binding
}

// A Credential is a secret by name.
type Credential struct {
	Name   string
	Source Source
	// Placeholder is what the guest may hold in place of the value: "sbxph_" and 26 characters
	// of base32. It is drawn when the credential is added, and stays when its value is replaced:
	// it may stand in the guest's environment.
	Placeholder string
	// Env, if not empty, names the variable of the guest's environment that has the placeholder.
	// A change that does not mention it keeps it. No two credentials have the same.
	Env      string
	Revision int64 // the vault's when this was last written

	keepsEnv bool // of one that is being read: it does not mention Env
}

// A SourceType says where the value of a credential is.
type SourceType string

// The types of sources. An API client may write Inline only: whoever may name files or commands
// of the host is root.
const (
	Inline  SourceType = "inline"  // in the vault
	File    SourceType = "file"    // in a file of the host
	Command SourceType = "command" // what a command of the host prints
)

// A Source is where the value of a credential comes from.
type Source struct {
	Type  SourceType
	Value Secret        // of Inline
	Path  string        // of File: absolute
	Argv  []string      // of Command: the first is an absolute path; there is no shell
	Cache time.Duration // of File and Command: how long a value may be used before it is read again
}

// DefaultCache is the Cache of a source that says nothing, MaxCache the longest.
const (
	DefaultCache = time.Minute
	MaxCache     = 24 * time.Hour
)

// A Binding says in which requests credentials are put, and where.
type Binding struct {
	Name     string
	Match    Match
	Auth     Auth
	Revision int64 // the vault's when this was last written

	patterns []paths.Pattern // of Match.Paths
}

// A Match says which requests a binding is for: those that one of each list matches. The lists
// have no duplicates, and are never empty.
type Match struct {
	Schemes []string `json:"schemes"` // "https", "http"; the port is 443 or 80
	Hosts   []string `json:"hosts"`   // as policy.NormalName writes them: api.example.com, *.example.com
	Methods []string `json:"methods"` // upper case
	Paths   []string `json:"paths"`   // see paths.Pattern
}

// An AuthType is a way to put credentials into a request.
type AuthType string

// The types.
const (
	Bearer        AuthType = "bearer"        // Authorization: Bearer VALUE
	Basic         AuthType = "basic"         // Authorization: Basic VALUE, which is base64(user:password)
	APIKey        AuthType = "apiKey"        // a header
	CustomHeaders AuthType = "customHeaders" // several headers
	Passthrough   AuthType = "passthrough"   // substitutions only
)

// An Auth says what a binding puts into a request.
type Auth struct {
	Type AuthType `json:"type"`
	// Headers are set to the value of their credential; Bearer and Basic have one, Authorization.
	// Names are in the form of http.CanonicalHeaderKey.
	Headers       []Header       `json:"headers,omitempty"`
	Substitutions []Substitution `json:"substitutions,omitempty"`
}

// A Header is a header and the credential that gives its value.
type Header struct {
	Name       string `json:"name"`
	Credential string `json:"credential"`
}

// Prefix is what stands before the value in a header of this type.
func (t AuthType) Prefix() string {
	switch t {
	case Bearer:
		return "Bearer "
	case Basic:
		return "Basic "
	}
	return ""
}

// A Place is a part of a request.
type Place string

// The places.
const (
	InPath   Place = "path"
	InQuery  Place = "query"
	InHeader Place = "header"
	InBody   Place = "body"
)

// A Substitution replaces a text that the guest sends by the value of a credential.
type Substitution struct {
	Credential  string  `json:"credential"`
	Placeholder string  `json:"placeholder"` // is compared byte by byte
	In          []Place `json:"in"`
}

// Revision is 1 after Create, and one more after each Patch.
func (v *Vault) Revision() int64 { return v.revision }

// Credentials are all credentials by name, sorted.
func (v *Vault) Credentials() []*Credential { return sorted(v.credentials) }

// Bindings are all bindings by name, sorted.
func (v *Vault) Bindings() []*Binding { return sorted(v.bindings) }

// Copy returns the same vault for another sandbox: with placeholders that are drawn anew, as a
// placeholder is of use in one sandbox only.
func (v *Vault) Copy() *Vault {
	out := &Vault{v.revision, map[string]*Credential{}, maps.Clone(v.bindings)}
	for name, c := range v.credentials {
		other := *c
		other.Placeholder = newPlaceholder()
		out.credentials[name] = &other
	}
	return out
}

// Credential returns the credential with this name, or nil.
func (v *Vault) Credential(name string) *Credential { return v.credentials[name] }

func sorted[T any](m map[string]T) []T {
	out := make([]T, 0, len(m))
	for _, name := range slices.Sorted(maps.Keys(m)) {
		out = append(out, m[name])
	}
	return out
}

// Uses are the names of the credentials that a binding uses, sorted.
func (b *Binding) Uses() []string {
	var names []string
	for _, h := range b.Auth.Headers {
		names = append(names, h.Credential)
	}
	for _, s := range b.Auth.Substitutions {
		names = append(names, s.Credential)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// MatchesHost reports whether the binding is for a host, which is a name in normal form.
func (b *Binding) MatchesHost(name string) bool {
	return slices.ContainsFunc(b.Match.Hosts, func(p string) bool { return hostMatches(p, name) })
}

// Matches reports whether the binding is for a request. path is a reading of its
// path (paths.Read).
func (b *Binding) Matches(scheme, host, method, path string) bool {
	return slices.Contains(b.Match.Schemes, scheme) && slices.Contains(b.Match.Methods, method) && b.MatchesHost(host) &&
		slices.ContainsFunc(b.patterns, func(p paths.Pattern) bool { return p.Match(path) })
}

// Port is the one port of a scheme.
func Port(scheme string) uint16 {
	if scheme == "http" {
		return 80
	}
	return 443
}

// An Uncovered is a host of a binding that no rule of a policy allows.
type Uncovered struct {
	Binding, Host string
	Port          uint16
	New           bool // the change that made this vault has added or replaced the binding
}

// Uncovered returns the hosts of bindings for which allowed says no, sorted by binding. A host
// may begin with "*.": then allowed is asked about all names below it (policy.Policy.Covers).
func (v *Vault) Uncovered(allowed func(host string, port uint16) bool) (out []Uncovered) {
	for _, b := range v.Bindings() {
		for _, host := range b.Match.Hosts {
			for _, scheme := range b.Match.Schemes {
				if port := Port(scheme); !allowed(host, port) {
					out = append(out, Uncovered{b.Name, host, port, b.Revision == v.revision})
				}
			}
		}
	}
	slices.SortStableFunc(out, func(a, b Uncovered) int { return cmp.Compare(a.Binding, b.Binding) })
	return out
}
