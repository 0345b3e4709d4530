// Package text turns values into what sandboxctl prints: lines, sizes, ages,
// tables and JSON.
//
// What surprises: a string may come from a guest, or from another client, and
// goes to somebody's terminal. Printable, Lines, Table and the JSON functions
// escape what would steer it; nothing else does.
package text

import (
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/docker/go-units"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Printable returns s as one line: control characters, ESC among them, line
// breaks and direction overrides are escaped.
func Printable(s string) string { return escape(s, false) }

// Lines is Printable that keeps line breaks.
func Lines(s string) string { return escape(s, true) }

// Tabbed is Lines that keeps tabs.
func Tabbed(s string) string {
	words := strings.Split(s, "\t")
	for i, w := range words {
		words[i] = Lines(w)
	}
	return strings.Join(words, "\t")
}

func escape(s string, lines bool) string {
	s = strings.ToValidUTF8(s, "\ufffd") // some terminals take a lone 0x9b for ESC [
	if strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		switch {
		case unicode.IsPrint(r), lines && r == '\n':
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r < 0x80:
			fmt.Fprintf(&b, `\x%02x`, r)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// Clip returns the first n characters of s; a longer one ends in "…".
func Clip(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

// Bytes prints a size as docker does, in powers of 1024.
func Bytes(n int64) string { return units.BytesSize(float64(n)) }

// CPUs describes the CPUs of a host. An older daemon says nothing of them (0), and some
// kernels do not say the model.
func CPUs(n int, model string) string {
	if n == 0 {
		return "unknown"
	}
	s := errs.Count(n, "CPU", "CPUs")
	if model != "" {
		s += " (" + model + ")"
	}
	return s
}

// Ago prints how long ago t was.
func Ago(t time.Time) string {
	d := time.Since(t)
	if d < time.Second {
		return "just now"
	}
	return units.HumanDuration(d) + " ago"
}

// Until prints how long it is to t; nil is never.
func Until(t *time.Time) string {
	if t == nil {
		return "never"
	}
	d := time.Until(*t)
	if d <= 0 {
		return "now"
	}
	return "in " + units.HumanDuration(d)
}
