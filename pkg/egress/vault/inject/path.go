package inject

import (
	"net/http"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/egress/paths"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// needless reports whether a path has an escape for a character that needs none (RFC 3986,
// section 2.3). A placeholder could hide behind it.
func needless(path string) bool {
	for i := range len(path) {
		if path[i] == '%' && i+2 < len(path) {
			if n, err := strconv.ParseUint(path[i+1:i+3], 16, 8); err == nil && unreserved(byte(n)) {
				return true
			}
		}
	}
	return false
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
	readings, why := paths.Read(path)
	if why == "" && needless(path) {
		why = "it has an encoded letter, digit, - . _ or ~, which need no encoding"
	}
	for i, reading := range readings {
		var b *vault.Binding
		if a.port == vault.Port(a.scheme) {
			b = a.l.match(a.scheme, a.host, a.method, reading)
		}
		switch {
		case i == 0:
			a.b = b
		case why == "" && b != a.b:
			why = "another binding would match if its %2F were a slash, or without what follows a semicolon"
		}
	}
	if why == "" && !a.setPath(path) {
		why = "its escapes are not those of its characters"
	}
	if why != "" && !weak.Off(weak.Vault) {
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
