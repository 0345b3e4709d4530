package text

import "testing"

func TestParsing(t *testing.T) {
	for s, want := range map[string]string{
		"plain ü": "plain ü", "\x1b[31m": `\x1b[31m`, "a\nb": `a\nb`, "\u202e": `\u202e`,
		"\x9b": "\ufffd",
	} {
		if got := Printable(s); got != want {
			t.Errorf("Printable(%q) = %q", s, got)
		}
	}
}
