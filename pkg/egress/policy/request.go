package policy

import (
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Request is what a policy knows of a request of HTTP.
type Request struct {
	Method string // in capitals: methods are case-sensitive (RFC 9110, section 9.1)
	Path   string // in the form of RequestPath, without the query
}

// Bounds of the requests of a rule.
const (
	maxMethods = 32
	maxPaths   = 128
	maxPattern = 1024 // bytes
)

// condition is record.Requests compiled.
type condition struct {
	methods []string
	paths   []Pattern
}

func compileRequests(r *record.Requests) (*condition, error) {
	if r == nil {
		return nil, nil
	}
	if len(r.Methods) > maxMethods || len(r.Paths) > maxPaths {
		return nil, errs.New(errs.Invalid, "it has %d methods and %d paths: at most %d and %d are allowed", len(r.Methods), len(r.Paths),
			maxMethods, maxPaths)
	}
	c := &condition{methods: r.Methods}
	for _, m := range r.Methods {
		if !isMethod(m) {
			return nil, errs.New(errs.Invalid, "method %q: want capitals, such as GET", short(m))
		}
	}
	for _, s := range r.Paths {
		p, err := ParsePattern(s)
		if err != nil {
			return nil, err
		}
		c.paths = append(c.paths, p)
	}
	return c, nil
}

// isMethod reports whether s can be a method: all that are registered have capitals and
// hyphens only. CONNECT asks for a tunnel, and TRACE for an echo of secrets: the proxy
// refuses both whatever the rules say.
func isMethod(s string) bool {
	return s != "" && len(s) <= 32 && s != "CONNECT" && s != "TRACE" &&
		!strings.ContainsFunc(s, func(c rune) bool { return (c < 'A' || c > 'Z') && c != '-' })
}

// matches reports whether c is about q. A nil condition is about every request.
func (c *condition) matches(q Request) bool {
	if c == nil {
		return true
	}
	return (len(c.methods) == 0 || slices.Contains(c.methods, q.Method)) &&
		(len(c.paths) == 0 || slices.ContainsFunc(c.paths, func(p Pattern) bool { return p.Match(q.Path) }))
}

func (c *condition) equal(d *condition) bool {
	if c == nil || d == nil {
		return c == d
	}
	return slices.Equal(c.methods, d.methods) && slices.EqualFunc(c.paths, d.paths, func(a, b Pattern) bool { return a.text == b.text })
}

// Inspects reports whether what the client of f says to the server name, and not only that
// it speaks to it, decides: a rule about requests comes before the first other rule that
// matches, and says something else than that one. Then the requests must be read, each must
// pass DecideRequest, and what is no HTTP is denied.
func (p *Policy) Inspects(f Flow, name string) bool {
	if p.mode == record.NetworkNone || !p.says(f) {
		return false
	}
	opens, inside := opensByName(f), f.Dst.IsValid() && Private(f.Dst)
	var allows, denies bool
	for i := range p.rules {
		r := &p.rules[i]
		named := r.name != "" && r.covers(f) && nameMatches(r.name, name) && (!r.allow || opens)
		switch {
		case named && r.when != nil && r.allow:
			allows = true
		case named && r.when != nil:
			denies = true
		case named || r.matchesAddr(f, inside):
			return r.allow && denies || !r.allow && allows
		}
	}
	if p.mode == record.NetworkOpen && !inside {
		return denies
	}
	return allows
}

// DecideRequest answers for a request to the server name, which the caller has verified to
// be that of f.Dst.
func (p *Policy) DecideRequest(f Flow, name string, q Request) (allow bool, why Reason) {
	opens := opensByName(f)
	for _, path := range readings(q.Path) {
		q := Request{q.Method, path}
		allow, why = p.first(f, func(r *rule) bool { return (!r.allow || opens) && nameMatches(r.name, name) && r.when.matches(q) })
		if !allow {
			break
		}
	}
	return allow, why
}

// Permits lists up to most rules that allow requests to name, for the answer to one that is
// denied.
func (p *Policy) Permits(f Flow, name string, most int) (texts []string) {
	for i := range p.rules {
		r := &p.rules[i]
		if len(texts) < most && r.allow && r.name != "" && r.covers(f) && nameMatches(r.name, name) {
			texts = append(texts, r.text)
		}
	}
	return texts
}

// A Pattern of paths. "*" in it stands for any characters, "/" included, or none. All others
// stand for themselves.
type Pattern struct {
	text   string
	pieces []string // between the stars
}

// ParsePattern reads a pattern: it begins with "/" or is "*", and what is not a star has the
// form of RequestPath.
func ParsePattern(s string) (Pattern, error) {
	if len(s) > maxPattern {
		return Pattern{}, errs.New(errs.Invalid, "path %q has %d characters: at most %d are allowed", short(s), len(s), maxPattern)
	}
	if s != "*" && !strings.HasPrefix(s, "/") {
		return Pattern{}, errs.New(errs.Invalid, "path %q: want one that begins with /, such as /repos/*", short(s))
	}
	if strings.ContainsAny(s, "?#") {
		return Pattern{}, errs.New(errs.Invalid, "path %q has a query or a fragment: rules are about paths; write it without", short(s))
	}
	if p, err := RequestPath("/" + strings.TrimPrefix(s, "/")); err != nil || s != "*" && p != s {
		return Pattern{}, errs.New(errs.Invalid, "path %q: no request has such a path: write it without . and .. and //, "+
			"and as %%XX only what must be", short(s))
	}
	return Pattern{s, strings.Split(s, "*")}, nil
}

func (p Pattern) String() string { return p.text }

// Match reports whether the pattern matches the whole of path. It takes time in proportion to
// the path's length times the pattern's at worst.
func (p Pattern) Match(path string) bool {
	last := len(p.pieces) - 1
	rest, ok := strings.CutPrefix(path, p.pieces[0])
	if !ok || last == 0 {
		return ok && rest == ""
	}
	for _, piece := range p.pieces[1:last] { // the first place is as good as any later one
		i := strings.Index(rest, piece)
		if i < 0 {
			return false
		}
		rest = rest[i+len(piece):]
	}
	return strings.HasSuffix(rest, p.pieces[last])
}

// RequestPath is the path of a request, as it was escaped there, in its only form: %XX where
// it must be, with capitals (RFC 3986, section 6.2.2). An escaped slash stays: npm and GitLab
// have names with one. See readings.
//
// It refuses a path that servers read in different ways, so that a rule could be about another
// one than the server serves: with segments . and .., empty segments but the last,
// backslashes, control characters, escapes of escapes, and the "..;" that some servers take
// for "..".
func RequestPath(escaped string) (string, error) {
	if !strings.HasPrefix(escaped, "/") {
		return "", errPath
	}
	var b strings.Builder
	for i := 0; i < len(escaped); i++ {
		c := escaped[i]
		if c != '%' {
			if c <= ' ' || c >= 0x7f || c == '\\' || c == '?' || c == '#' {
				return "", errPath
			}
			b.WriteByte(c)
			continue
		}
		c, ok := escape(escaped[i:])
		if !ok || c < ' ' || c == 0x7f || c == '\\' {
			return "", errPath
		}
		if c == '%' {
			if _, again := escape("%" + escaped[i+3:]); again {
				return "", errPath
			}
		}
		if unreserved(c) {
			b.WriteByte(c)
		} else {
			b.WriteString(strings.ToUpper(escaped[i : i+3]))
		}
		i += 2
	}
	path := b.String()
	for _, r := range readings(path) {
		segments := strings.Split(r[1:], "/")
		for i, s := range segments {
			name, _, _ := strings.Cut(s, ";")
			if name == "." || name == ".." || s == "" && i < len(segments)-1 {
				return "", errPath
			}
		}
	}
	return path, nil
}

// readings are what a server may take path for: some take an escaped slash for a slash. A
// rule must hold in each.
func readings(path string) []string {
	if slashed := strings.ReplaceAll(path, "%2F", "/"); slashed != path {
		return []string{path, slashed}
	}
	return []string{path}
}

var errPath = errs.New(errs.Invalid, "servers read this path in different ways: write it without . and .. and //, backslashes, control "+
	"characters, and escapes of escapes")

// escape is the character for which the %XX stands with which s begins.
func escape(s string) (c byte, ok bool) {
	if len(s) < 3 {
		return 0, false
	}
	n, err := strconv.ParseUint(s[1:3], 16, 8)
	return byte(n), err == nil
}

// unreserved are the characters that may be written as %XX or not, and mean the same (RFC
// 3986, section 2.3).
func unreserved(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("-._~", c) >= 0
}
