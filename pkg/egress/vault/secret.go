package vault

import (
	"fmt"
	"io"
)

// redacted is what is shown in place of a value.
const redacted = "[redacted]"

// A Secret is a value that no formatter shows: fmt with any verb, log/slog, and the encoders
// for JSON, XML and text write "[redacted]"; gob refuses it. Reveal alone gives it.
//
// The value stands behind a pointer. fmt cannot call the methods of a field that is not
// exported and prints what it holds; of a pointer in a struct it prints the address.
//
// The value is not wiped from memory: a Go string cannot be.
type Secret struct{ p *string }

// NewSecret hides s.
func NewSecret(s string) Secret { return Secret{&s} }

// Reveal returns the value. Its callers are what puts it into a request, seals it, or checks it.
func (s Secret) Reveal() string {
	if s.p == nil {
		return ""
	}
	return *s.p
}

// String hides the value.
func (Secret) String() string { return redacted }

// Format hides the value, whatever the verb.
func (Secret) Format(f fmt.State, _ rune) { io.WriteString(f, redacted) } //nolint:errcheck // fmt keeps no errors

// MarshalText hides the value.
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }
