package inject

import (
	"net/http"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// plainPath reports why servers could read an escaped path in different ways, or "". Such a path
// could match a binding here and be another one there.
func plainPath(path string, slashes bool) string {
	if !strings.HasPrefix(path, "/") {
		return "it does not begin with a slash"
	}
	if strings.Contains(path, "//") {
		return "it has an empty segment (//)"
	}
	if dotted(path) {
		return "it has a segment . or .."
	}
	for i := range len(path) {
		if path[i] == '\\' {
			return "it has a backslash"
		}
		if path[i] != '%' {
			continue
		}
		if i+2 >= len(path) {
			return "it has a % without two digits"
		}
		n, err := strconv.ParseUint(path[i+1:i+3], 16, 8)
		switch c := byte(n); {
		case err != nil:
			return "it has a % without two digits"
		case c < ' ' || c == 0x7f:
			return "it has an encoded control character"
		case c == '\\' || c == '/' && !slashes:
			return "it has an encoded slash or backslash"
		case unreserved(c):
			return "it has an encoded letter, digit, - . _ or ~, which need no encoding"
		case c == '%' && twice(path[i+3:]):
			return "it is encoded twice"
		}
	}
	return ""
}

// dotted reports whether a path has a segment "." or "..". Servlet containers cut parameters off
// before they look: "..;x".
func dotted(path string) bool {
	for segment := range strings.SplitSeq(path, "/") {
		if segment, _, _ = strings.Cut(segment, ";"); segment == "." || segment == ".." {
			return true
		}
	}
	return false
}

// twice reports whether what comes after %25 makes of it a character that plainPath refuses.
func twice(after string) bool {
	if len(after) < 2 {
		return false
	}
	n, err := strconv.ParseUint(after[:2], 16, 8)
	c := byte(n)
	return err == nil && (c < ' ' || c == 0x7f || strings.IndexByte(`/\.%`, c) >= 0)
}

// unreserved are the characters that are never encoded (RFC 3986, section 2.3).
func unreserved(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("-._~", c) >= 0
}

// target checks the target of a request to a bound host, and finds its binding.
func (a *apply) target() error {
	r := a.r
	if a.method == http.MethodOptions && r.URL.Path == "*" && r.URL.RawPath == "" {
		return nil // about the server, and no path
	}
	path := r.URL.EscapedPath()
	if path == "" {
		path = "/" // what net/http sends
	}
	why := plainPath(path, a.l.o.EncodedSlash)
	bind := func(path string) *vault.Binding {
		if a.port != vault.Port(a.scheme) {
			return nil
		}
		return a.l.match(a.scheme, a.host, a.method, path)
	}
	a.b = bind(path)
	if decoded := strings.ReplaceAll(strings.ReplaceAll(path, "%2F", "/"), "%2f", "/"); why == "" && decoded != path {
		if why = plainPath(decoded, true); why == "" && bind(decoded) != a.b {
			why = "another binding would match if its %2F were a slash"
		}
	}
	if why == "" && !a.setPath(path) {
		why = "its escapes are not those of its characters"
	}
	if why != "" {
		a.b = nil
		return a.deny(Event{Kind: Malformed, Place: "path"}, http.StatusBadRequest, "sandboxd refuses the path of this request, because "+
			why+": this host gets credentials by its path, and so the path must have one meaning.")
	}
	return nil
}

// setPath makes path, which is escaped, the one that net/http sends.
func (a *apply) setPath(path string) bool {
	u := *a.r.URL
	var ok bool
	if u.Path, ok = unescape(path); !ok {
		return false
	}
	u.RawPath = path
	if u.EscapedPath() != path {
		return false
	}
	a.r.URL.Path, a.r.URL.RawPath = u.Path, u.RawPath
	return true
}
