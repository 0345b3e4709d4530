package sealed

import (
	"fmt"
	"log/slog"
)

// String, and the others below, print the ID of the key that seals in the place of keys.
// They are methods of Key and not of its pointer, so that a copy prints no more. fmt does
// not call them for unexported fields; there it prints the fields, and of the keys an
// address (see page).
func (k Key) String() string {
	if len(k.ids) == 0 {
		return "sealed.Key()"
	}
	return "sealed.Key(" + k.ids[0] + ")"
}

// GoString implements fmt.GoStringer.
func (k Key) GoString() string { return k.String() }

// Format implements fmt.Formatter, for every verb.
func (k Key) Format(f fmt.State, _ rune) { fmt.Fprint(f, k.String()) }

// MarshalText implements encoding.TextMarshaler, of which JSON makes a string.
func (k Key) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// LogValue implements slog.LogValuer.
func (k Key) LogValue() slog.Value { return slog.StringValue(k.String()) }
