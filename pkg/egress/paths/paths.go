// Package paths reads the paths of requests as rules and bindings are about them.
//
// What surprises: servers read one path in different ways. Some take an escaped slash for a
// slash, and some cut what follows a semicolon in a segment. So a path has several readings. A
// rule that allows, and a binding, must hold in each of them. A path whose readings lead out of
// a directory is refused.
//
// No rule by path is a wall where a server has more ways to say one thing: /ADMIN and /admin/,
// or another method in a header such as X-HTTP-Method-Override.
package paths

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// Read returns the readings of a path, as it is escaped in a request, in the form that patterns
// are compared with: every escape is decoded but those of the slash and of the percent sign,
// which are %2F and %25. The first reading is the path as it is written; there are four at most.
// why, if not "", says what makes the path one that servers read in other ways.
func Read(escaped string) (readings []string, why string) {
	if !strings.HasPrefix(escaped, "/") {
		return nil, "it does not begin with a slash"
	}
	for i := range len(escaped) {
		switch c := escaped[i]; {
		case c == '%':
			switch d, ok := unhex(escaped[i:]); {
			case !ok:
				return nil, "it has a % without two digits"
			case d < ' ' || d == 0x7f:
				return nil, "it has an encoded control character"
			case d == '\\':
				return nil, "it has an encoded backslash"
			}
		case c <= ' ' || c >= 0x7f || strings.IndexByte("\"<>\\^`{|}?#", c) >= 0:
			return nil, "it has a character that stands in paths only as an escape"
		}
	}
	f := Form(escaped)
	if !utf8.ValidString(f) {
		return nil, "its escapes are not UTF-8"
	}
	for i := range len(f) {
		if strings.HasPrefix(f[i:], "%25") {
			if _, ok := unhex("%" + f[i+3:]); ok {
				return nil, "it is encoded twice"
			}
		}
	}
	readings = []string{f}
	for _, other := range []func(string) string{slashed, withoutParameters} {
		for _, r := range readings {
			if o := other(r); !slices.Contains(readings, o) {
				readings = append(readings, o)
			}
		}
	}
	for _, r := range readings {
		if strings.Contains(r, "//") {
			return nil, "it has an empty segment (//)"
		}
		if dotted(r) {
			return nil, "it has a segment . or .."
		}
	}
	return readings, ""
}

func slashed(f string) string { return strings.ReplaceAll(f, "%2F", "/") }

// withoutParameters cuts segments at their first semicolon, as servlet containers do.
func withoutParameters(f string) string {
	if !strings.Contains(f, ";") {
		return f
	}
	segments := strings.Split(f, "/")
	for i := range segments {
		segments[i], _, _ = strings.Cut(segments[i], ";")
	}
	return strings.Join(segments, "/")
}

// dotted reports whether a path has a segment "." or "..".
func dotted(f string) bool {
	for segment := range strings.SplitSeq(f, "/") {
		if segment == "." || segment == ".." {
			return true
		}
	}
	return false
}

// Form decodes every escape but those of the slash and of the percent sign.
func Form(escaped string) string {
	if !strings.Contains(escaped, "%") {
		return escaped
	}
	var b strings.Builder
	for i := 0; i < len(escaped); i++ {
		c, ok := unhex(escaped[i:])
		switch {
		case !ok:
			b.WriteByte(escaped[i])
			continue
		case c == '/':
			b.WriteString("%2F")
		case c == '%':
			b.WriteString("%25")
		default:
			b.WriteByte(c)
		}
		i += 2
	}
	return b.String()
}

// unhex reads the escape at the beginning of s.
func unhex(s string) (c byte, ok bool) {
	if len(s) < 3 || s[0] != '%' {
		return 0, false
	}
	hi, lo := strings.IndexByte(hex, lower(s[1])), strings.IndexByte(hex, lower(s[2]))
	return byte(hi<<4 | lo), hi >= 0 && lo >= 0
}

const hex = "0123456789abcdef"

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		c += 'a' - 'A'
	}
	return c
}
