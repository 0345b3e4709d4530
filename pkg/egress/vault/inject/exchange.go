package inject

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// An exchange replaces placeholders in one place of one request.
type exchange struct {
	searcher
	a     *apply
	place string
	enc   encoding
	// allowed reports whether the placeholder of a credential may stand here.
	allowed func(*secret) bool
	// replaces: what is allowed is also replaced. Else it stays, and the caller takes it away.
	replaces bool
}

// inspect is an exchange for a place where no placeholder may stand.
func (a *apply) inspect(place string) *exchange {
	return &exchange{searcher{drawn: true}, a, place, asItIs, func(*secret) bool { return false }, false}
}

// exchange is what the binding replaces in a place.
func (a *apply) exchange(place vault.Place, enc encoding) *exchange {
	x := a.inspect(string(place))
	if a.b == nil {
		return x
	}
	x.enc, x.replaces = enc, true
	var names []string
	for _, s := range a.b.Auth.Substitutions {
		if slices.Contains(s.In, place) {
			x.needles = append(x.needles, needlesOf(s.Credential, s.Placeholder, enc)...)
			names = append(names, s.Credential)
		}
	}
	x.allowed = func(s *secret) bool { return slices.Contains(names, s.Name) }
	return x
}

// replace replaces in a text of at most limit bytes more. It goes through what the guest has sent,
// once: a placeholder in a value is sent as a part of the value.
func (x *exchange) replace(text string, limit int) (string, error) {
	return x.searcher.replace(text, limit+len(text), x.swap)
}

// swap is what a placeholder is replaced by.
func (x *exchange) swap(text []byte, n *needle) ([]byte, error) {
	if n != nil {
		return x.value(n.credential)
	}
	s := x.a.l.placeholders[string(text)]
	switch {
	case s != nil && weak.Off(weak.Vault):
		return []byte(x.enc(s.Source.Value.Reveal())), nil
	case s != nil && x.allowed(s):
		if x.replaces {
			return x.value(s.Name)
		}
	case s != nil:
		return nil, x.refuse(s)
	default:
		return nil, x.a.deny(Event{Kind: Foreign, Place: x.place}, http.StatusForbidden,
			"sandboxd does not send this request: it has a placeholder of no credential of this sandbox ("+x.place+").")
	}
	return text, nil
}

// value is that of a credential, as it is written here. A guest may send a body for as long as it
// likes, and so after the vault was replaced. That is no event: it does nothing wrong.
func (x *exchange) value(credential string) ([]byte, error) {
	if o := x.a.l.o; o.Replaced != nil && o.Replaced() {
		return nil, &Denied{
			Status: http.StatusServiceUnavailable, Code: "SANDBOX::UNAVAILABLE", Kind: Unavailable,
			Text: "The credentials of this sandbox have changed while the request was sent: send it again.",
		}
	}
	return []byte(x.enc(x.a.values[credential].text)), nil
}

// refuse refuses a placeholder of a credential of this sandbox, and says where it may stand.
func (x *exchange) refuse(s *secret) error {
	kind, where := WrongHost, []string(nil)
	for _, b := range x.a.l.bindings {
		if !slices.Contains(b.Uses(), s.Name) {
			continue
		}
		if b.MatchesHost(x.a.host) {
			kind = WrongPlace
		}
		where = append(where, target(b, s.Name))
	}
	may := "No binding uses that credential."
	if len(where) > 0 {
		may = "It may stand only in " + strings.Join(first(where, 3), "; and in ") + "."
	}
	return x.a.deny(Event{Kind: kind, Credential: s.Name, Place: x.place}, http.StatusForbidden, fmt.Sprintf(
		"sandboxd does not send this request: it has the placeholder of the credential %q in its %s. %s", s.Name, x.place, may))
}

// target is where a binding puts a credential, in words.
func target(b *vault.Binding, credential string) string {
	var in []string
	for _, h := range b.Auth.Headers {
		if h.Credential == credential {
			in = append(in, "the header "+h.Name)
		}
	}
	for _, s := range b.Auth.Substitutions {
		for _, place := range s.In {
			if s.Credential == credential {
				in = append(in, "the "+string(place))
			}
		}
	}
	list := func(all []string) string { return strings.Join(first(all, 5), ", ") }
	return fmt.Sprintf("%s of %s by %s to %s with a path %s", list(in), list(b.Match.Methods), list(b.Match.Schemes), list(b.Match.Hosts),
		list(b.Match.Paths))
}

// first is the beginning of a list, for people.
func first(all []string, n int) []string {
	if len(all) <= n {
		return all
	}
	return append(slices.Clone(all[:n]), "others")
}
