package api

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// sandboxRoutes finds what stands under /sandboxes; seg[0] is "sandboxes".
func (s *Server) sandboxRoutes(seg []string, v1 bool) (route, map[string]handler) {
	if len(seg) == 1 {
		return route{name: "/sandboxes"}, map[string]handler{http.MethodPost: s.create, http.MethodGet: s.list}
	}
	id := unescape(seg[1])
	// with hands the record on, after the one look-up every route needs.
	with := func(f func(http.ResponseWriter, *http.Request, record.Record) error) handler {
		return func(w http.ResponseWriter, r *http.Request) error {
			rec, err := s.lookup(r, id)
			if err != nil {
				return err
			}
			return f(w, r, rec)
		}
	}
	rt := route{name: "/sandboxes/{id}"}
	if len(seg) == 2 {
		return rt, map[string]handler{
			http.MethodGet:    with(s.get),
			http.MethodDelete: func(w http.ResponseWriter, r *http.Request) error { return s.delete(w, r, id) },
		}
	}
	rt.name += "/" + seg[2]
	if len(seg) == 3 {
		switch seg[2] {
		case "limits":
			return rt, only(http.MethodPatch, with(s.updateLimits))
		case "metadata":
			return rt, only(http.MethodPatch, with(s.patchMetadata))
		case "start":
			return rt, only(http.MethodPost, with(s.start))
		case "stop":
			return rt, only(http.MethodPost, with(s.stop))
		case "pause":
			return rt, only(http.MethodPost, with(s.pause))
		case "resume":
			return rt, only(http.MethodPost, with(s.resume))
		case "renew-expiration":
			return rt, only(http.MethodPost, with(s.renew))
		case "stats":
			return rt, only(http.MethodGet, with(s.usage))
		case "inspect":
			return rt, only(http.MethodGet, with(s.inspect))
		case "logs":
			return rt, only(http.MethodGet, with(s.logs))
		case "snapshots":
			return rt, only(http.MethodPost, with(s.createSnapshot))
		case "networkpolicy":
			h := with(s.networkPolicy)
			return rt, map[string]handler{http.MethodGet: h, http.MethodPut: h, http.MethodPatch: h, http.MethodDelete: h}
		}
	}
	if len(seg) == 4 {
		switch seg[2] {
		case "endpoints":
			rt.name += "/{port}"
			return rt, only(http.MethodGet, with(func(w http.ResponseWriter, r *http.Request, rec record.Record) error {
				return s.endpoint(w, r, rec, seg[3], v1)
			}))
		case "diagnostics":
			switch seg[3] {
			case "logs", "events", "inspect", "summary":
				rt.name += "/{kind}"
				return rt, only(http.MethodGet, with(func(w http.ResponseWriter, r *http.Request, rec record.Record) error {
					return s.diagnostics(w, r, rec, seg[3])
				}))
			}
		}
	}
	return route{}, nil
}

// lookup finds a sandbox by id or name. What is being deleted is gone already,
// and what can be neither id nor name never reaches anything below this.
func (s *Server) lookup(r *http.Request, idOrName string) (record.Record, error) {
	if !record.IsID(idOrName) && !isName(idOrName) {
		return record.Record{}, httperr.NoSandbox(idOrName)
	}
	rec, err := s.sandboxes.Get(r.Context(), idOrName)
	switch {
	case errs.Is(err, errs.NotFound):
		return rec, httperr.NoSandbox(idOrName)
	case err != nil:
		return rec, fmt.Errorf("look up sandbox %s: %w", idOrName, err)
	case rec.State == record.Deleting:
		infoOf(r).sandbox = rec.ID
		return rec, httperr.NoSandbox(idOrName)
	}
	infoOf(r).sandbox = rec.ID
	return rec, nil
}

func (s *Server) get(w http.ResponseWriter, _ *http.Request, rec record.Record) error {
	writeJSON(w, http.StatusOK, s.show(rec))
	return nil
}

// delete looks up by itself. Of two deletes at once both may succeed, and what
// no other route shows any more can be deleted by its ID: a sandbox whose
// deletion could not kill it, and one whose record can not be read.
func (s *Server) delete(w http.ResponseWriter, r *http.Request, idOrName string) error {
	if !record.IsID(idOrName) && !isName(idOrName) {
		return httperr.NoSandbox(idOrName)
	}
	id, found := idOrName, false
	rec, err := s.sandboxes.Get(r.Context(), idOrName)
	switch {
	case err == nil:
		id, found = rec.ID, true
	case !errs.Is(err, errs.NotFound):
		return fmt.Errorf("look up sandbox %s: %w", idOrName, err)
	case !record.IsID(id):
		return httperr.NoSandbox(idOrName)
	}
	infoOf(r).sandbox = id
	// Who hangs up during a delete has still asked for it.
	err = s.sandboxes.Delete(context.WithoutCancel(r.Context()), id)
	if errs.Is(err, errs.NotFound) {
		if !found {
			return httperr.NoSandbox(idOrName)
		}
		err = nil // another delete was faster
	}
	if err != nil {
		return fmt.Errorf("delete sandbox %s: %w", id, err)
	}
	writeEmpty(w, http.StatusNoContent)
	return nil
}

func (s *Server) pause(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	if err := s.sandboxes.Pause(context.WithoutCancel(r.Context()), rec.ID); err != nil {
		return fmt.Errorf("pause sandbox %s: %w", rec.ID, httperr.Recode(err, errs.WrongState, "DOCKER::SANDBOX_NOT_RUNNING"))
	}
	writeEmpty(w, http.StatusAccepted)
	return nil
}

func (s *Server) resume(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	if err := s.sandboxes.Resume(context.WithoutCancel(r.Context()), rec.ID); err != nil {
		return fmt.Errorf("resume sandbox %s: %w", rec.ID, httperr.Recode(err, errs.WrongState, "DOCKER::SANDBOX_NOT_PAUSED"))
	}
	writeEmpty(w, http.StatusAccepted)
	return nil
}

// renew moves the end of a sandbox. MaxTimeout bounds what a creation asks for,
// so that what somebody forgets goes; who renews has not forgotten. (OpenSandbox:
// "the creation-time limit does not apply".) See renewOnAccess for what nobody asks for.
func (s *Server) renew(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	var body struct {
		ExpiresAt string `json:"expiresAt"`
	}
	if err := decode(w, r, &body); err != nil {
		return err
	}
	t, err := parseTime(body.ExpiresAt)
	if err != nil {
		return errs.Wire(httperr.Invalid("expiresAt %q is not a time; send RFC 3339, as 2030-01-02T15:04:05Z", httperr.Clip(body.ExpiresAt, 60)), "DOCKER::INVALID_EXPIRATION")
	}
	now := time.Now()
	switch {
	case !t.After(now):
		return errs.Wire(httperr.Invalid("expiresAt %s is not in the future (the daemon's clock says %s); send a later time, or delete the sandbox",
			t.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339)), "DOCKER::INVALID_EXPIRATION")
	case t.After(now.AddDate(100, 0, 0)):
		return errs.Wire(httperr.Invalid("expiresAt %s is more than a hundred years ahead; create the sandbox without a timeout to keep it until it is deleted",
			t.UTC().Format(time.RFC3339)), "DOCKER::INVALID_EXPIRATION")
	case rec.Expires.IsZero():
		return errs.Wire(errs.New(errs.WrongState, "sandbox %s has no timeout and lives until it is deleted; there is nothing to renew", rec.ID), "DOCKER::INVALID_EXPIRATION")
	}
	rec, err = s.sandboxes.Renew(context.WithoutCancel(r.Context()), rec.ID, t)
	if err != nil {
		return fmt.Errorf("renew sandbox %s: %w", rec.ID, err)
	}
	writeJSON(w, http.StatusOK, wire.Renewal{ExpiresAt: micros(rec.Expires)})
	return nil
}

// parseTime reads RFC 3339; a time without a zone is UTC.
func parseTime(v string) (time.Time, error) {
	t, err := time.Parse(time.RFC3339Nano, v)
	if err != nil {
		t, err = time.Parse("2006-01-02T15:04:05.999999999", v)
	}
	return t, err
}

func (s *Server) patchMetadata(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	var patch map[string]*string
	if err := decode(w, r, &patch); err != nil {
		return err
	}
	if err := checkPatch(rec.Spec.Labels, patch); err != nil {
		return err
	}
	if len(patch) > 0 {
		var err error
		if rec, err = s.sandboxes.PatchLabels(context.WithoutCancel(r.Context()), rec.ID, patch); err != nil {
			return fmt.Errorf("patch metadata of sandbox %s: %w", rec.ID, err)
		}
	}
	writeJSON(w, http.StatusOK, s.show(rec))
	return nil
}

// filter is what GET /sandboxes selects by.
type filter struct {
	states   []string // lower case; any of them
	labels   map[string]string
	page     int
	pageSize int
}

func parseFilter(rawQuery string) (filter, error) {
	f := filter{page: 1, pageSize: 20}
	q, err := url.ParseQuery(rawQuery)
	if err != nil {
		return f, httperr.Invalid("the query string does not parse; percent-encode its values")
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
			return nil, errs.Wire(httperr.Invalid("metadata filter %q: want key=value pairs joined by &, each percent-encoded", httperr.Clip(pair, 80)), "INVALID_METADATA_FORMAT")
		}
		if len(into) == maxLabels {
			return nil, errs.Wire(httperr.Invalid("metadata filter: more than %d pairs; no sandbox has that many", maxLabels), "INVALID_METADATA_FORMAT")
		}
		into[key] = val
	}
	return into, nil
}

func (f filter) match(rec *record.Record) bool {
	if rec.State == record.Deleting {
		return false
	}
	if len(f.states) > 0 && !slices.Contains(f.states, strings.ToLower(stateOf(rec))) {
		return false
	}
	for k, v := range f.labels {
		if have, ok := rec.Spec.Labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

// paginate says which of total items are on the page that is asked for.
func (f filter) paginate(total int) (from, to int, p wire.Pagination) {
	p = wire.Pagination{Page: f.page, PageSize: f.pageSize, TotalItems: total, TotalPages: (total + f.pageSize - 1) / f.pageSize}
	p.HasNextPage = f.page < p.TotalPages
	if f.page > p.TotalPages {
		return 0, 0, p
	}
	from = (f.page - 1) * f.pageSize
	return from, min(from+f.pageSize, total), p
}

func (s *Server) list(w http.ResponseWriter, r *http.Request) error {
	f, err := parseFilter(r.URL.RawQuery)
	if err != nil {
		return err
	}
	all, err := s.sandboxes.List(r.Context())
	if err != nil {
		return fmt.Errorf("list sandboxes: %w", err)
	}
	var hit []*record.Record
	for _, rec := range all {
		if f.match(rec) {
			hit = append(hit, rec)
		}
	}
	from, to, page := f.paginate(len(hit))
	out := wire.List{Items: []wire.Sandbox{}, Pagination: page}
	for _, rec := range hit[from:to] {
		sb := s.show(*rec)
		if sb.Sandboxd.Health != nil {
			sb.Sandboxd.Health.LastOutput = "" // of one, not of two hundred
		}
		out.Items = append(out.Items, sb)
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}
