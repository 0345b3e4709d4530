package inject

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// A Use is what was put into a request, for its answer.
type Use struct {
	l       *Live
	host    string
	binding string
	needles []needle
	told    map[Event]bool // by the reader of the answer only
}

// use makes the Use of a request to a bound host that carries the values own. All credentials that
// are bound to the host are searched for: a server may show in one answer what another request has
// brought. The value of a file or a command that no request has used yet has not been sent either,
// also not by the Lives before this one.
func (l *Live) use(host string, b *vault.Binding, own map[string]value) *Use {
	u := &Use{l: l, host: host, told: map[Event]bool{}}
	if b != nil {
		u.binding = b.Name
	}
	done := map[string]bool{}
	for _, b := range l.bindings {
		if !b.MatchesHost(host) {
			continue
		}
		for _, name := range b.Uses() {
			if done[name] {
				continue
			}
			done[name] = true
			mine := own[name]
			u.needles = append(u.needles, mine.echoes...)
			for _, v := range l.secrets[name].known() {
				if v.text != mine.text {
					u.needles = append(u.needles, v.echoes...)
				}
			}
		}
	}
	return u
}

// Format shows nothing of the values.
func (u Use) Format(f fmt.State, _ rune) { io.WriteString(f, "a use of binding "+u.binding) } //nolint:errcheck // fmt keeps no errors

// Binding is the name of the binding that matched, or "".
func (u *Use) Binding() string {
	if u == nil {
		return ""
	}
	return u.binding
}

// Mask looks for values in an answer: in its status, its headers and its trailers, and in its body
// while it is read, whatever the type of it says: the guest may choose the type. Each that is found
// is reported as an Echo, once for each credential and place. With Options.Mask as many "*" as it has
// bytes stand in its place, so no length changes.
//
// Values shorter than 8 bytes are not searched for. Nor is anything behind a switch of protocols
// (101), or in an interim answer (1xx); and in a compressed body nothing is found. A Use is for one
// answer.
func (u *Use) Mask(r *http.Response) error {
	if u == nil || len(u.needles) == 0 || weak.Off(weak.Echoes) {
		return nil
	}
	r.Status = u.text("status", r.Status)
	u.header(r.Header, "header")
	u.header(r.Trailer, "trailer")
	if r.Body == nil || r.Body == http.NoBody || r.StatusCode == http.StatusSwitchingProtocols ||
		r.Request != nil && r.Request.Method == http.MethodHead {
		return nil
	}
	r.Body = newWatch(r.Body, u.needles, u.l.o.Mask, func(n *needle) { u.found("body", n) }, func() { u.header(r.Trailer, "trailer") })
	return nil
}

// found reports a value.
func (u *Use) found(place string, n *needle) {
	e := Event{Kind: Echo, Host: u.host, Binding: u.binding, Credential: n.credential, Place: place}
	if !u.told[e] {
		u.told[e] = true
		u.l.report(e)
	}
}

// text looks at a text that is not long.
func (u *Use) text(place, s string) string {
	b, out := []byte(s), []byte(s)
	for i := range u.needles {
		n := &u.needles[i]
		for from := 0; ; {
			at := bytes.Index(b[from:], n.text)
			if at < 0 {
				break
			}
			u.found(place, n)
			stars(out[from+at : from+at+len(n.text)])
			from += at + len(n.text)
		}
	}
	if u.l.o.Mask {
		return string(out)
	}
	return s
}

// header looks at headers. With Options.Mask one whose name has a value in it is taken away.
func (u *Use) header(h http.Header, place string) {
	for name, values := range h {
		for i := range u.needles {
			n := &u.needles[i]
			// First the lengths: a needle may have 400 KB.
			if len(n.text) <= len(name) && strings.Contains(strings.ToLower(name), strings.ToLower(string(n.text))) {
				if u.found(place, n); u.l.o.Mask {
					delete(h, name)
				}
			}
		}
		for i, v := range values {
			values[i] = u.text(place, v)
		}
	}
}
