package spec

import (
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Filter is what a list of sandboxes or snapshots selects by, and the page of it
// that is asked for.
type Filter struct {
	states   []string // lower case; any of them
	labels   map[string]string
	source   *string // of snapshots: the sandbox; nil: any
	name     *string // of snapshots; nil: any
	page     int
	pageSize int
}

// ParseFilter reads the query of a list: state, metadata, page, pageSize, and for
// snapshots sandboxId and name.
func ParseFilter(rawQuery string) (Filter, error) {
	f := Filter{page: 1, pageSize: 20}
	q, err := url.ParseQuery(rawQuery)
	if err != nil {
		return f, httperr.Invalid("the query string cannot be parsed; percent-encode its values")
	}
	for _, st := range q["state"] {
		if len(f.states) == 32 {
			return f, httperr.Invalid("more than 32 states; there are only eight")
		}
		f.states = append(f.states, strings.ToLower(st))
	}
	for _, m := range q["metadata"] {
		if f.labels, err = parseLabelFilter(m, f.labels); err != nil {
			return f, err
		}
	}
	if q.Has("sandboxId") {
		f.source = new(q.Get("sandboxId"))
	}
	if q.Has("name") {
		f.name = new(q.Get("name"))
	}
	for _, p := range []struct {
		key string
		max int
		to  *int
	}{{"page", 1 << 30, &f.page}, {"pageSize", 200, &f.pageSize}} {
		v := q.Get(p.key)
		if v == "" {
			continue
		}
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 || n > p.max {
			return f, httperr.Invalid("%s %q: want a whole number from 1 to %d", p.key, httperr.Clip(v, 40), p.max)
		}
		*p.to = n
	}
	return f, nil
}

// parseLabelFilter reads k=v&k2=v2 whose keys and values are form-encoded once
// more (some SDKs encode once, some twice; decoding again suits both).
func parseLabelFilter(m string, into map[string]string) (map[string]string, error) {
	if m == "" {
		return into, nil
	}
	if into == nil {
		into = map[string]string{}
	}
	for pair := range strings.SplitSeq(m, "&") {
		k, v, ok := strings.Cut(pair, "=")
		key, err := url.QueryUnescape(k)
		val, err2 := url.QueryUnescape(v)
		if !ok || err != nil || err2 != nil || key == "" {
			return nil, errs.Wire(httperr.Invalid("metadata filter %q: want key=value pairs joined by &, each percent-encoded",
				httperr.Clip(pair, 80)), "INVALID_METADATA_FORMAT")
		}
		if len(into) == maxLabels {
			return nil, errs.Wire(httperr.Invalid("metadata filter: more than %d pairs; no sandbox has that many", maxLabels),
				"INVALID_METADATA_FORMAT")
		}
		into[key] = val
	}
	return into, nil
}

// Match reports whether a sandbox is selected. One that is being deleted never is.
func (f Filter) Match(rec *record.Record) bool {
	if rec.State == record.Deleting {
		return false
	}
	if len(f.states) > 0 && !slices.Contains(f.states, strings.ToLower(StateOf(rec))) {
		return false
	}
	for k, v := range f.labels {
		if have, ok := rec.Spec.Labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

// Paginate says which of total items are on the page that is asked for.
func (f Filter) Paginate(total int) (from, to int, p wire.Pagination) {
	p = wire.Pagination{Page: f.page, PageSize: f.pageSize, TotalItems: total, TotalPages: (total + f.pageSize - 1) / f.pageSize}
	p.HasNextPage = f.page < p.TotalPages
	if f.page > p.TotalPages {
		return 0, 0, p
	}
	from = (f.page - 1) * f.pageSize
	return from, min(from+f.pageSize, total), p
}

// MatchSnapshot reports whether a snapshot is selected.
func (f Filter) MatchSnapshot(snap *record.Snapshot) bool {
	return (f.source == nil || *f.source == snap.Source) &&
		(f.name == nil || *f.name == snap.Name) &&
		(len(f.states) == 0 || slices.Contains(f.states, string(snap.State)))
}
