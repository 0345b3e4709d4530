package text

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode"
)

// TestJSONSteersNoTerminal: what a guest chose is printed as JSON that says the
// same and that no terminal acts on.
func TestJSONSteersNoTerminal(t *testing.T) {
	const said = "a\x1b[2J\x7f\u009b2J\u202emoc\u2066\ufeff\U000e0001 é 你好 😀 <b>&"
	for _, v := range []any{
		map[string]string{"s": said},
		map[string]any{"s": json.RawMessage(`"` + strings.ReplaceAll(said, "\x1b", `\u001b`) + `"`)},
	} {
		for _, indent := range []string{"", "  "} {
			var b bytes.Buffer
			if err := writeJSON(&b, v, indent); err != nil {
				t.Fatal(err)
			}
			out := b.String()
			if i := strings.IndexFunc(out, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }); i >= 0 {
				t.Errorf("%q at %d of %q", out[i:], i, out)
			}
			if !strings.Contains(out, `\u007f\u009b2J\u202emoc\u2066\ufeff\udb40\udc01 é 你好 😀 <b>&`) {
				t.Errorf("%s", out)
			}
			if n := strings.Count(out, "\n"); n != 1 && indent == "" {
				t.Errorf("%d lines", n)
			}
			var back map[string]string
			if err := json.Unmarshal(b.Bytes(), &back); err != nil || back["s"] != said {
				t.Errorf("%v: it reads as %q", err, back["s"])
			}
		}
	}
	var b bytes.Buffer
	if err := writeJSON(&b, json.RawMessage("\"\x9b2J\""), ""); err != nil || b.String() != `"\ufffd2J"`+"\n" {
		t.Errorf("%q, %v", b.String(), err)
	}
}
