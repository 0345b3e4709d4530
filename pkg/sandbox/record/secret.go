package record

import "bytes"

// Secret is one value of a sandbox that the state file keeps encrypted; package
// internal/sealed makes it. A sandbox has one of each kind, or none. All that describes the
// value, such as its revision, is in what is sealed.
type Secret struct {
	Sandbox string     `json:"sandbox"` // the ID
	Kind    SecretKind `json:"kind"`
	Sealed  []byte     `json:"sealed"` // for Name
}

// SecretKind says what is sealed. It is part of names in the state file: no value may
// change, or have a "/".
type SecretKind string

// The kinds. Each comes and goes by itself, and all go with the sandbox.
const (
	Vault     SecretKind = "vault"     // the credentials, with their revision
	Authority SecretKind = "authority" // the certificate authority that the sandbox trusts, with its key
)

// The secrets of a host are kept in memory and in the state file.
const (
	MaxSecretBytes  = 1 << 20  // of one, sealed: sealed.Overhead more than what is in it
	MaxSecretsBytes = 64 << 20 // of all, as JSON, which takes a third more than what is sealed
)

// Name is unique on the host, such as "d2k7qf4h3x5a/vault". A secret is stored under its
// name and sealed for it, so it does not open as that of another sandbox or as another
// kind.
func (s Secret) Name() string { return s.Sandbox + "/" + string(s.Kind) }

// Same reports whether o is s and not an edit of it: what is sealed twice differs, even if
// it is the same secret.
func (s Secret) Same(o Secret) bool { return s.Name() == o.Name() && bytes.Equal(s.Sealed, o.Sealed) }
