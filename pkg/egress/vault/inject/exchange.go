package inject

import (
	"net/http"
	"slices"

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

// replace replaces in a text of at most limit bytes more.
func (x *exchange) replace(text string, limit int) (string, error) {
	return x.searcher.replace(text, limit+len(text), x.swap)
}

// swap is what a placeholder is replaced by.
func (x *exchange) swap(text []byte, n *needle) ([]byte, error) {
	if n != nil {
		return []byte(x.enc(x.a.values[n.credential])), nil
	}
	s := x.a.l.placeholders[string(text)]
	switch {
	case s != nil && x.allowed(s):
		if x.replaces {
			return []byte(x.enc(x.a.values[s.Name])), nil
		}
	case s != nil:
		return nil, x.refuse(s)
	case x.a.l.o.Foreign != nil && x.a.l.o.Foreign(string(text)):
		return nil, x.a.deny(Event{Kind: Foreign, Place: x.place}, http.StatusForbidden,
			"sandboxd does not send this request: it has a placeholder of a credential that is not one of this sandbox ("+x.place+").")
	}
	return text, nil
}

// refuse refuses a placeholder of a credential of this sandbox.
func (x *exchange) refuse(s *secret) error {
	kind, text := WrongHost, "is bound to other hosts than this one"
	for _, b := range x.a.l.bindings {
		if slices.Contains(b.Uses(), s.Name) && b.MatchesHost(x.a.host) {
			kind, text = WrongPlace, "is not bound to this place of this request ("+x.place+")"
		}
	}
	return x.a.deny(Event{Kind: kind, Credential: s.Name, Place: x.place}, http.StatusForbidden,
		"sandboxd does not send this request: it has the placeholder of the credential "+s.Name+", which "+text+".")
}
