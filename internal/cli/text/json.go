package text

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// JSON prints v in several lines, indented.
func JSON(w io.Writer, v any) error { return writeJSON(w, v, "  ") }

// JSONLine prints v in one line.
func JSONLine(w io.Writer, v any) error { return writeJSON(w, v, "") }

// writeJSON writes v and a new line. encoding/json escapes the control
// characters of ASCII except DEL; unsteered escapes the others.
func writeJSON(w io.Writer, v any, indent string) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	if err := e.Encode(v); err != nil {
		return errs.Wrap(err, errs.Internal, "the answer cannot be printed as JSON")
	}
	_, err := w.Write(unsteered(b.Bytes()))
	return err
}

// unsteered escapes characters in JSON that are not printable; only strings have some.
func unsteered(b []byte) []byte {
	fit := func(r rune) bool { return r < 0x7f || r != utf8.RuneError && unicode.IsPrint(r) }
	if bytes.IndexFunc(b, func(r rune) bool { return !fit(r) }) < 0 {
		return b
	}
	out := make([]byte, 0, len(b)+64)
	for _, r := range string(b) {
		switch {
		case fit(r):
			out = utf8.AppendRune(out, r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default: // a byte that is no UTF-8, too
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return out
}
