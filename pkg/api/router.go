package api

import (
	"cmp"
	"net/http"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/gateway"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A router finds the row of the table that a request is for. It has the places by
// their first segment, which is never a parameter.
type router map[string][]*place

// A place is a pattern and the rows of its methods.
type place struct {
	name    string // of the log and the metrics
	path    []segment
	tail    bool   // anything may follow path
	rest    string // names what follows; may be empty
	methods map[string]route
}

// A segment is one between the slashes of a pattern: a text, or a parameter.
type segment struct {
	text  string
	param string
	oneOf []string // what the parameter may be; nil: anything
}

// found is what a request is for.
type found struct {
	name    string // of the log and the metrics
	need    record.Role
	handle  handler
	target  gateway.Target // of a route that needs tokens
	changes bool           // see route.changes
}

// newRouter makes a router of the rows of a table.
func newRouter(rows []route) router {
	all := router{}
	places := map[string]*place{}
	for _, row := range rows {
		p := places[row.pattern]
		if p == nil {
			p = newPlace(row.pattern)
			places[row.pattern] = p
			all[p.path[0].text] = append(all[p.path[0].text], p)
		}
		row.need = cmp.Or(row.need, record.Admin)
		p.methods[row.method] = row
	}
	return all
}

func newPlace(pattern string) *place {
	p := &place{methods: map[string]route{}}
	for part := range strings.SplitSeq(strings.TrimPrefix(pattern, "/"), "/") {
		inner, ok := strings.CutPrefix(part, "{")
		if !ok {
			p.path = append(p.path, segment{text: part})
			p.name += "/" + part
			continue
		}
		inner = strings.TrimSuffix(inner, "}")
		if rest, tail := strings.CutSuffix(inner, "..."); tail {
			if p.tail, p.rest = true, rest; rest != "" {
				p.name += "/{" + rest + "}"
			}
			break
		}
		param, values, limited := strings.Cut(inner, "=")
		s := segment{param: param}
		if limited {
			s.oneOf = strings.Split(values, "|")
		}
		p.path = append(p.path, s)
		p.name += "/{" + param + "}"
	}
	return p
}

// fits reports whether segments of a raw path are those of p.
func (p *place) fits(raw []string) bool {
	if len(raw) != len(p.path) {
		return false
	}
	for i, s := range p.path {
		if s.param == "" && s.text != raw[i] || s.oneOf != nil && !slices.Contains(s.oneOf, raw[i]) {
			return false
		}
	}
	return true
}

// open reports whether no method of p needs a key.
func (p *place) open() bool {
	for _, row := range p.methods {
		if row.need != anyone {
			return false
		}
	}
	return true
}

// split cuts a raw path into segments, without /v1, and finds their place; nil is none.
// It ignores one trailing slash, except where anything may follow.
func (all router) split(path string) (p *place, seg []string) {
	if rest, ok := strings.CutPrefix(path, "/v1/"); ok {
		path = "/" + rest
	}
	sent := strings.Split(strings.TrimPrefix(path, "/"), "/")
	seg = sent
	if len(seg) > 1 && seg[len(seg)-1] == "" {
		seg = seg[:len(seg)-1]
	}
	for _, p := range all[seg[0]] {
		if !p.tail && p.fits(seg) {
			return p, seg
		}
	}
	for _, p := range all[seg[0]] {
		if p.tail && len(sent) >= len(p.path) && p.fits(sent[:len(p.path)]) {
			return p, sent
		}
	}
	return nil, nil
}

// find finds what a request is for. Its parameters become path values of the request,
// undecoded; see segmentOf.
func (all router) find(r *http.Request) found {
	raw := r.URL.EscapedPath()
	p, seg := all.split(raw)
	if p == nil {
		return found{name: nameNone, need: record.Viewer, handle: func(http.ResponseWriter, *http.Request) error {
			return httperr.New(http.StatusNotFound, "GENERAL::NOT_FOUND", errs.NotFound,
				"there is no route %q; GET /docs and GET /openapi.json list all routes", httperr.Clip(raw, 120))
		}}
	}
	row, ok := p.methods[r.Method]
	if !ok && r.Method == http.MethodHead {
		row, ok = p.methods[http.MethodGet]
	}
	if !ok {
		row, ok = p.methods["*"]
	}
	if !ok {
		need := record.Viewer // 405 gives nothing away
		if p.open() {
			need = anyone
		}
		return found{name: p.name, need: need, handle: p.notAllowed}
	}
	for i, s := range p.path {
		if s.param != "" {
			r.SetPathValue(s.param, seg[i])
		}
	}
	rest := strings.Join(seg[len(p.path):], "/")
	if p.rest != "" {
		r.SetPathValue(p.rest, rest)
	}
	f := found{name: p.name, need: row.need, handle: row.handle, changes: row.changes()}
	if row.need == tokens {
		if len(seg) > len(p.path) {
			rest = "/" + rest
		}
		id, port := segmentOf(r, "id"), r.PathValue("port")
		f.target = gateway.Below(mount(r)+gateway.Base(id, port), id, port, rest)
	}
	return f
}

// notAllowed names the methods that p has.
func (p *place) notAllowed(w http.ResponseWriter, r *http.Request) error {
	var allow []string
	for _, m := range []string{"GET", "POST", "PUT", "PATCH", "DELETE"} {
		if _, ok := p.methods[m]; ok {
			allow = append(allow, m)
		}
	}
	w.Header().Set("Allow", strings.Join(allow, ", "))
	return httperr.New(http.StatusMethodNotAllowed, "GENERAL::METHOD_NOT_ALLOWED", errs.Invalid,
		"%s is not allowed on %s; allowed: %s", r.Method, infoOf(r).route, strings.Join(allow, ", "))
}

// mount is the path below which a request asks for the API: "" or "/v1".
func mount(r *http.Request) string {
	if strings.HasPrefix(r.URL.EscapedPath(), "/v1/") {
		return "/v1"
	}
	return ""
}

// segmentOf is a parameter of the request's path, decoded. A text that does not
// decode names nothing: "".
func segmentOf(r *http.Request, param string) string { return unescape(r.PathValue(param)) }
