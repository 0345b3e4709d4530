package paths

import (
	"slices"
	"strings"
	"unicode"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// maxPattern is how long a pattern of paths may be, in bytes.
const maxPattern = 512

// A Pattern matches paths of requests. In it * stands for any characters, also none and also
// slashes: OpenSandbox's default "/*" means every path. There may be several. A pattern without
// a * matches one path only: "/v1" does not match "/v1/".
//
// Each other character stands for itself, and an escape such as %2A for what it encodes: %2A is
// a star, "/ü" and "/%C3%BC" are one pattern. An escaped slash and a
// semicolon are refused, because of the readings of Read: write * for them.
type Pattern struct {
	parts []string // what stands around the stars, in the form of Read
}

// ParsePattern reads a pattern. The error says why it is none, without naming it.
func ParsePattern(s string) (Pattern, error) {
	bad := func(why string) (Pattern, error) {
		return Pattern{}, errs.New(errs.Invalid, "%s; write /v1/* for all paths that begin with /v1/", why)
	}
	switch {
	case len(s) > maxPattern:
		return bad("a pattern of paths has at most 512 bytes")
	case !strings.HasPrefix(s, "/"):
		return bad("a pattern of paths begins with /")
	case strings.ContainsAny(s, "?#"):
		return bad("a query is no part of a path, and ? and # of a path are written %3F and %23")
	case strings.Contains(s, "//") || strings.Contains(s, `\`):
		return bad("paths with // or a backslash are refused, so no pattern can match them")
	case strings.ContainsFunc(s, func(c rune) bool { return !unicode.IsPrint(c) }):
		return bad("a pattern of paths has only printable characters")
	}
	for i := range len(s) {
		if c, ok := unhex(s[i:]); s[i] == '%' && (!ok || c < ' ' || c == 0x7f) {
			return bad("a % stands before two hexadecimal digits, and these encode no control character")
		}
	}
	switch f := Form(s); {
	case strings.Contains(f, "%2F") || strings.Contains(f, ";"):
		return bad("servers read an escaped slash, and a semicolon, in different ways; write * in its place")
	case dotted(f):
		return bad("paths with a segment . or .. are refused, so no pattern can match them")
	}
	parts := strings.Split(s, "*")
	for i := range parts {
		parts[i] = Form(parts[i])
	}
	// Two stars are one.
	for i := 1; i < len(parts)-1; {
		if parts[i] != "" {
			i++
			continue
		}
		parts = slices.Delete(parts, i, i+1)
	}
	return Pattern{parts}, nil
}

// Equal reports whether two patterns match the same for the same reason.
func (p Pattern) Equal(q Pattern) bool { return slices.Equal(p.parts, q.parts) }

// Match reports whether the pattern matches a path in the form of Read. It takes time
// linear in the path for each star.
func (p Pattern) Match(path string) bool {
	first, last := p.parts[0], p.parts[len(p.parts)-1]
	if len(p.parts) == 1 {
		return path == first
	}
	if len(path) < len(first)+len(last) || !strings.HasPrefix(path, first) || !strings.HasSuffix(path, last) {
		return false
	}
	path = path[len(first) : len(path)-len(last)]
	for _, part := range p.parts[1 : len(p.parts)-1] {
		_, after, ok := strings.Cut(path, part)
		if !ok {
			return false
		}
		path = after
	}
	return true
}

// Overlaps reports whether some text is matched by both patterns.
//
// If both have stars, it is enough that one's beginning, before its first star, is a beginning
// of the other's, and the same for the ends: the longer beginning, all the middle parts of the
// one, all of the other, and the longer end make a text that both match, because a star takes
// anything.
func (p Pattern) Overlaps(q Pattern) bool {
	switch {
	case len(p.parts) == 1:
		return q.Match(p.parts[0])
	case len(q.parts) == 1:
		return p.Match(q.parts[0])
	}
	begin, end := p.parts[0], p.parts[len(p.parts)-1]
	begin2, end2 := q.parts[0], q.parts[len(q.parts)-1]
	return (strings.HasPrefix(begin, begin2) || strings.HasPrefix(begin2, begin)) &&
		(strings.HasSuffix(end, end2) || strings.HasSuffix(end2, end))
}
