package api

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// on returns a handler that looks up the sandbox which the path names, and hands its
// record on.
func (s *Server) on(f func(http.ResponseWriter, *http.Request, record.Record) error) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		rec, err := s.lookup(r, segmentOf(r, "id"))
		if err != nil {
			return err
		}
		return f(w, r, rec)
	}
}

// lookup finds a sandbox by id or name. What is being deleted is gone already,
// and what can be neither id nor name never reaches anything below this.
func (s *Server) lookup(r *http.Request, idOrName string) (record.Record, error) {
	if !record.IsID(idOrName) && !spec.IsName(idOrName) {
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
func (s *Server) delete(w http.ResponseWriter, r *http.Request) error {
	idOrName := segmentOf(r, "id")
	if !record.IsID(idOrName) && !spec.IsName(idOrName) {
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

// renew moves the end of a sandbox. See renewOnAccess for what no client asks for.
func (s *Server) renew(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	var body struct {
		ExpiresAt string `json:"expiresAt"`
	}
	if err := decode(w, r, &body); err != nil {
		return err
	}
	t, err := spec.Renewal(body.ExpiresAt, &rec, time.Now())
	if err != nil {
		return err
	}
	rec, err = s.sandboxes.Renew(context.WithoutCancel(r.Context()), rec.ID, t)
	if err != nil {
		return fmt.Errorf("renew sandbox %s: %w", rec.ID, err)
	}
	writeJSON(w, http.StatusOK, wire.Renewal{ExpiresAt: spec.Micros(rec.Expires)})
	return nil
}

func (s *Server) patchMetadata(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	var patch map[string]*string
	if err := decode(w, r, &patch); err != nil {
		return err
	}
	if err := spec.CheckLabelPatch(rec.Spec.Labels, patch); err != nil {
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

func (s *Server) list(w http.ResponseWriter, r *http.Request) error {
	f, err := spec.ParseFilter(r.URL.RawQuery)
	if err != nil {
		return err
	}
	all, err := s.sandboxes.List(r.Context())
	if err != nil {
		return fmt.Errorf("list sandboxes: %w", err)
	}
	var hit []*record.Record
	for _, rec := range all {
		if f.Match(rec) {
			hit = append(hit, rec)
		}
	}
	from, to, page := f.Paginate(len(hit))
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
