package wire

// CredentialVault is the credential vault of a sandbox without its values: OpenSandbox's
// CredentialVaultState. Lists are sorted by name and never null.
type CredentialVault struct {
	Revision    int64               `json:"revision"` // 1, and one more after each change
	Credentials []Credential        `json:"credentials"`
	Bindings    []CredentialBinding `json:"bindings"`
}

// CodeNoVault is the code of the error about a sandbox without a vault, or a vault without what
// was asked for. That about no sandbox has another.
const CodeNoVault = "CREDENTIAL_VAULT::NOT_FOUND"

// CredentialList answers GET …/credential-vault/credentials.
type CredentialList struct {
	Revision    int64        `json:"revision"`
	Credentials []Credential `json:"credentials"`
}

// CredentialBindingList answers GET …/credential-vault/bindings.
type CredentialBindingList struct {
	Revision int64               `json:"revision"`
	Bindings []CredentialBinding `json:"bindings"`
}

// CredentialList is v without its bindings.
func (v CredentialVault) CredentialList() CredentialList {
	return CredentialList{v.Revision, v.Credentials}
}

// BindingList is v without its credentials.
func (v CredentialVault) BindingList() CredentialBindingList {
	return CredentialBindingList{v.Revision, v.Bindings}
}

// Credential is a secret without its value.
type Credential struct {
	Name       string `json:"name"`
	SourceType string `json:"sourceType"` // inline, file or command
	Revision   int64  `json:"revision"`   // of the vault, when it was last written
	// Placeholder is what the guest may send in the place of the value. (ours; not at port 18080)
	Placeholder string `json:"placeholder,omitempty"`
	// Env is the variable of the guest's environment that has the placeholder. (ours; not at port 18080)
	Env string `json:"env,omitempty"`
}

// CredentialBinding says in which requests credentials are put, without naming them.
type CredentialBinding struct {
	Name     string             `json:"name"`
	Revision int64              `json:"revision"`
	Match    CredentialMatch    `json:"match"`
	Auth     CredentialAuthKind `json:"auth"`
}

// CredentialMatch says which requests a binding is for: those that one of each list matches. In
// a request a missing list means its default: https, all paths, and GET, POST, PUT, PATCH and
// DELETE.
type CredentialMatch struct {
	Schemes []string `json:"schemes,omitempty"` // https, http
	Hosts   []string `json:"hosts"`             // api.example.com, *.example.com
	Methods []string `json:"methods,omitempty"`
	Paths   []string `json:"paths,omitempty"` // /v1/*
}

// CredentialAuthKind is how a binding puts its credentials into requests.
type CredentialAuthKind struct {
	Type string `json:"type"`           // bearer, basic, apiKey, customHeaders or passthrough
	Name string `json:"name,omitempty"` // the header of an apiKey
}

// CredentialSource says where the value of a credential is. It is only ever sent to the daemon.
type CredentialSource struct {
	Type         string   `json:"type"`            // inline, file or command
	Value        string   `json:"value,omitempty"` // of inline
	Path         string   `json:"path,omitempty"`  // of file, on the daemon's host (ours)
	Argv         []string `json:"argv,omitempty"`  // of command, on the daemon's host; no shell (ours)
	CacheSeconds *int64   `json:"cacheSeconds,omitempty"`
}

// String hides the value, whatever prints it.
func (CredentialSource) String() string { return "(hidden)" }

// GoString hides it too.
func (CredentialSource) GoString() string { return "(hidden)" }

// NewCredential is a credential in a request.
type NewCredential struct {
	Name   string           `json:"name"`
	Source CredentialSource `json:"source"`
	// Env names the variable of the guest's environment that gets the placeholder: "" is none. If
	// it is nil, a credential that is replaced keeps its own. (ours)
	Env *string `json:"env,omitempty"`
}

// NewBinding is a binding in a request.
type NewBinding struct {
	Name  string          `json:"name"`
	Match CredentialMatch `json:"match"`
	Auth  CredentialAuth  `json:"auth"`
}

// CredentialAuth is how a binding is to put credentials into requests.
type CredentialAuth struct {
	Type          string                   `json:"type"`
	Credential    string                   `json:"credential,omitempty"` // of bearer, basic and apiKey
	Name          string                   `json:"name,omitempty"`       // of apiKey
	Headers       []CredentialHeader       `json:"headers,omitempty"`    // of customHeaders
	Substitutions []CredentialSubstitution `json:"substitutions,omitempty"`
}

// CredentialHeader is a header and the credential that gives its value.
type CredentialHeader struct {
	Name       string `json:"name"`
	Credential string `json:"credential"`
}

// CredentialSubstitution replaces a text that the guest sends by the value of a credential.
type CredentialSubstitution struct {
	Credential  string   `json:"credential"`
	Placeholder string   `json:"placeholder"`
	In          []string `json:"in"` // path, query, header, body
}

// CredentialVaultRequest is the body of POST …/credential-vault.
type CredentialVaultRequest struct {
	Credentials []NewCredential `json:"credentials"`
	Bindings    []NewBinding    `json:"bindings"`
}

// CredentialVaultPatch is the body of PATCH …/credential-vault. All of it holds, or nothing.
type CredentialVaultPatch struct {
	ExpectedRevision *int64             `json:"expectedRevision,omitempty"` // 409 if it is another
	Credentials      *CredentialChanges `json:"credentials,omitempty"`
	Bindings         *BindingChanges    `json:"bindings,omitempty"`
}

// CredentialChanges changes the credentials of a vault.
type CredentialChanges struct {
	Add     []NewCredential `json:"add,omitempty"`
	Replace []NewCredential `json:"replace,omitempty"`
	Delete  []string        `json:"delete,omitempty"` // by name
}

// BindingChanges changes the bindings of a vault.
type BindingChanges struct {
	Add     []NewBinding `json:"add,omitempty"`
	Replace []NewBinding `json:"replace,omitempty"`
	Delete  []string     `json:"delete,omitempty"` // by name
}
