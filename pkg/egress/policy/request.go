package policy

import (
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/egress/paths"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Request is what a policy knows of a request of HTTP.
type Request struct {
	Method string // in capitals: methods are case-sensitive (RFC 9110, section 9.1)
	Path   string // as it is escaped there, without the query
}

// Bounds of the requests of a rule.
const (
	maxMethods = 32
	maxPaths   = 128
)

// maxRequests bounds the methods and paths of all rules together, in bytes: a rule with a list of
// ports becomes one for each, and each request is compared with all of them.
const maxRequests = 256 << 10

// sizeOfRequests counts what maxRequests bounds. A method or a path has at least 8 bytes, so that
// there are at most 32,768 of them.
func sizeOfRequests(rules []record.Rule) (size int) {
	for _, r := range rules {
		if r.Requests == nil {
			continue
		}
		for _, s := range slices.Concat(r.Requests.Methods, r.Requests.Paths) {
			size += max(len(s), 8)
		}
	}
	return size
}

// condition is record.Requests compiled.
type condition struct {
	methods []string
	paths   []paths.Pattern
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
		p, err := paths.ParsePattern(s)
		if err != nil {
			return nil, errs.New(errs.Invalid, "path %q: %s", short(s), err)
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

// matches reports whether c is about a request, in one reading of its path. A nil condition is
// about every request.
func (c *condition) matches(method, reading string) bool {
	if c == nil {
		return true
	}
	return (len(c.methods) == 0 || slices.Contains(c.methods, method)) &&
		(len(c.paths) == 0 || slices.ContainsFunc(c.paths, func(p paths.Pattern) bool { return p.Match(reading) }))
}

func (c *condition) equal(d *condition) bool {
	if c == nil || d == nil {
		return c == d
	}
	return slices.Equal(c.methods, d.methods) && slices.EqualFunc(c.paths, d.paths, paths.Pattern.Equal)
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
// be that of f.Dst. A request that servers could read in different ways must be allowed in each.
func (p *Policy) DecideRequest(f Flow, name string, q Request) (allow bool, why Reason) {
	if name == "" {
		return p.DecideName(f, name)
	}
	readings, bad := paths.Read(q.Path)
	switch {
	case bad != "":
		return false, Reason{ByName, "servers read the path of this request in different ways: " + bad}
	case !isMethod(q.Method):
		return false, Reason{ByName, "no rule can be about the method of this request"}
	}
	opens := opensByName(f)
	for _, reading := range readings {
		allow, why = p.first(f, func(r *rule) bool {
			return (!r.allow || opens) && nameMatches(r.name, name) && r.when.matches(q.Method, reading)
		})
		if !allow {
			break
		}
	}
	return allow, why
}

// Covers reports whether the rules leave some request of f to host: one that allows all or some
// comes before the first that denies all. host is a name, or a wildcard such as *.example.com.
// Of a wildcard those rules count that match all its names. Rules by address do not count, as
// nobody knows the address yet: f has none.
func (p *Policy) Covers(f Flow, host string) bool {
	allow, _ := p.first(f, func(r *rule) bool { return nameMatches(r.name, host) && (r.allow || r.when == nil) })
	return allow
}

// DecideSome answers for a connection to the server name, of which each request is judged by
// DecideRequest: it may be opened if a rule allows some request, or all. The caller makes sure
// that the name is one of f.Dst, which an empty one is not.
func (p *Policy) DecideSome(f Flow, name string) (allow bool, why Reason) {
	if name == "" {
		return p.DecideName(f, name)
	}
	opens := opensByName(f)
	return p.first(f, func(r *rule) bool {
		return nameMatches(r.name, name) && (r.allow && opens || !r.allow && r.when == nil)
	})
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

// same reports whether two rules are equal.
func (r *rule) same(o *rule) bool {
	a, b := *r, *o
	a.when, b.when = nil, nil
	return a == b && r.when.equal(o.when)
}

// unseen reports whether a rule by name decides where nobody sees the requests: one that is
// about requests may deny them then, and does not allow them.
func (r *rule) unseen() bool { return r.when == nil || !r.allow }
