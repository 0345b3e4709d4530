package inject

import (
	"mime"
	"net/http"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// mask stands in place of a value.
const mask = "***"

// A Use is what was put into a request, for its answer.
type Use struct {
	l       *Live
	host    string
	binding string
	needles searcher
	told    map[Event]bool // by the reader of the answer only
}

// use makes the Use of a request to a bound host. All credentials that are bound to the host are
// searched for: a server may show in one answer what another request has brought. The value of a
// file or a command that no request has used yet has not been sent either.
func (l *Live) use(host string, b *vault.Binding) *Use {
	u := &Use{l: l, host: host, told: map[Event]bool{}}
	if b != nil {
		u.binding = b.Name
	}
	seen := map[string]bool{}
	for _, b := range l.bindings {
		if !b.MatchesHost(host) {
			continue
		}
		for _, name := range b.Uses() {
			if !seen[name] {
				seen[name] = true
				u.needles.needles = append(u.needles.needles, l.secrets[name].echoes()...)
			}
		}
	}
	return u
}

// Binding is the name of the binding that matched, or "".
func (u *Use) Binding() string {
	if u == nil {
		return ""
	}
	return u.binding
}

// Mask looks for values in an answer: in its status, its headers and its trailers, and in its body
// while it is read, if that is text and not compressed. Each that is found is reported as an
// Echo, once for each credential and place. With Options.Mask it is replaced by "***", and the
// body has no Content-Length then.
//
// Values shorter than 8 bytes are not searched for. Nor is anything behind a switch of protocols
// (101), in an interim answer (1xx), or in a body of other types than text. A Use is for one answer.
func (u *Use) Mask(r *http.Response) error {
	if u == nil || len(u.needles.needles) == 0 {
		return nil
	}
	r.Status = u.text("status", r.Status)
	u.header(r.Header, "header")
	u.header(r.Trailer, "trailer")
	if r.Body == nil || r.Body == http.NoBody || r.StatusCode == http.StatusSwitchingProtocols ||
		r.Request != nil && r.Request.Method == http.MethodHead {
		return nil
	}
	s := &u.needles
	if !identity(r.Header) || !isText(r.Header) {
		s = &searcher{} // for the trailers
	} else if u.l.o.Mask {
		r.ContentLength = -1
		delete(r.Header, "Content-Length")
	}
	r.Body = newStream(r.Body, s, func(text []byte, n *needle) ([]byte, error) { return []byte(u.found("body", string(text), n)), nil },
		func() error { u.header(r.Trailer, "trailer"); return nil })
	return nil
}

// found reports a value, and returns what stands in its place.
func (u *Use) found(place, text string, n *needle) string {
	e := Event{Kind: Echo, Host: u.host, Binding: u.binding, Credential: n.credential, Place: place}
	if !u.told[e] {
		u.told[e] = true
		u.l.report(e)
	}
	if u.l.o.Mask {
		return mask
	}
	return text
}

// text looks at a text that is not long.
func (u *Use) text(place, s string) string {
	out, _ := u.needles.replace(s, 1<<30, func(b []byte, n *needle) ([]byte, error) { //nolint:errcheck // it only gets shorter
		return []byte(u.found(place, string(b), n)), nil
	})
	return out
}

// header looks at headers. A header whose name is a value is taken away.
func (u *Use) header(h http.Header, place string) {
	for name, values := range h {
		for _, n := range u.needles.needles {
			if strings.Contains(strings.ToLower(name), strings.ToLower(string(n.text))) && u.found(place, name, &n) == mask {
				delete(h, name)
			}
		}
		for i, v := range values {
			values[i] = u.text(place, v)
		}
	}
}

// isText reports whether a body is text by its type. One without a type may be.
func isText(h http.Header) bool {
	kind, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	if err != nil {
		return kind == "" // none, or one that cannot be read
	}
	if strings.HasPrefix(kind, "text/") || strings.HasSuffix(kind, "+json") || strings.HasSuffix(kind, "+xml") {
		return true
	}
	switch kind {
	case "application/json", "application/xml", "application/javascript", "application/x-www-form-urlencoded", "application/x-ndjson",
		"application/jsonl", "application/yaml", "application/x-yaml", "application/toml",
		"application/graphql", "application/sql", "application/xhtml+xml", "multipart/form-data", "multipart/mixed":
		return true
	}
	return false
}
