package api

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/pkg/admission"
	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// sandboxHandlers serve the routes of sandboxes; those that create one are in
// create.go.
type sandboxHandlers struct {
	sandboxes Sandboxes
	images    Images
	snapshots Snapshots
	guard     *auth.Guard
	offer     *spec.Offer
	pools     Pools // may be nil

	host        func(record.Record) map[string]string // see Config; these five may be nil
	notes       func(record.Record) []string
	differences func(runtime string, level record.Security) []string
	health      func(record.Record) *wire.Health
	awaitReady  func(context.Context, record.Record) error

	waitLimit, holdLimit time.Duration // the constants, but in tests
}

// on returns a handler that looks up the sandbox which the path names, and hands its
// record on.
func on(all Sandboxes, f func(http.ResponseWriter, *http.Request, record.Record) error) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		rec, err := lookup(r, all, segmentOf(r, "id"))
		if err != nil {
			return err
		}
		return f(w, r, rec)
	}
}

// lookup finds a sandbox by id or name, and notes it for the log. A sandbox that is
// being deleted is not found. A text that cannot be an id or a name is not passed on.
func lookup(r *http.Request, all Sandboxes, idOrName string) (record.Record, error) {
	if !record.IsID(idOrName) && !spec.IsName(idOrName) {
		return record.Record{}, httperr.NoSandbox(idOrName)
	}
	rec, err := all.Get(r.Context(), idOrName)
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

func (s *sandboxHandlers) get(w http.ResponseWriter, _ *http.Request, rec record.Record) error {
	writeJSON(w, http.StatusOK, s.show(rec))
	return nil
}

// delete does its own look-up. Two deletes at the same time may both succeed. A sandbox
// that no other route shows can still be deleted by its ID: its deletion could not kill
// it, or its record cannot be read. With ?force=false only one that has ended is deleted.
func (s *sandboxHandlers) delete(w http.ResponseWriter, r *http.Request) error {
	idOrName := segmentOf(r, "id")
	force, err := spec.ParseBool(cmp.Or(r.URL.Query().Get("force"), "true"))
	if err != nil {
		return httperr.Invalid("force: want true or false")
	}
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
	del := s.sandboxes.Delete
	if !force {
		del = s.sandboxes.Remove
	}
	// A client that hangs up during a delete has still asked for it.
	err = del(context.WithoutCancel(r.Context()), id)
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

func (s *sandboxHandlers) pause(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	if err := s.sandboxes.Pause(context.WithoutCancel(r.Context()), rec.ID); err != nil {
		return fmt.Errorf("pause sandbox %s: %w", rec.ID, httperr.Recode(err, errs.WrongState, "DOCKER::SANDBOX_NOT_RUNNING"))
	}
	writeEmpty(w, http.StatusAccepted)
	return nil
}

func (s *sandboxHandlers) hibernate(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	if err := s.sandboxes.Hibernate(context.WithoutCancel(r.Context()), rec.ID); err != nil {
		return fmt.Errorf("hibernate sandbox %s: %w", rec.ID, httperr.Recode(err, errs.WrongState, "DOCKER::SANDBOX_NOT_RUNNING"))
	}
	writeEmpty(w, http.StatusAccepted)
	return nil
}

func (s *sandboxHandlers) resume(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	if err := s.sandboxes.Resume(context.WithoutCancel(r.Context()), rec.ID); err != nil {
		return fmt.Errorf("resume sandbox %s: %w", rec.ID, httperr.Recode(err, errs.WrongState, "DOCKER::SANDBOX_NOT_PAUSED"))
	}
	writeEmpty(w, http.StatusAccepted)
	return nil
}

// renew moves the expiry of a sandbox. See renewals for those that no client asks for.
func (s *sandboxHandlers) renew(w http.ResponseWriter, r *http.Request, rec record.Record) error {
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

func (s *sandboxHandlers) patchMetadata(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	var patch map[string]*string
	if err := decode(w, r, &patch); err != nil {
		return err
	}
	if err := spec.CheckLabelPatch(rec.Spec.Labels, patch); err != nil {
		return err
	}
	if len(patch) > 0 {
		var err error
		if rec, err = s.sandboxes.Relabel(context.WithoutCancel(r.Context()), rec.ID, "", patch); err != nil {
			return fmt.Errorf("patch metadata of sandbox %s: %w", rec.ID, err)
		}
	}
	writeJSON(w, http.StatusOK, s.show(rec))
	return nil
}

// rename gives a sandbox another name. It keeps its host name until it is started again.
func (s *sandboxHandlers) rename(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	var req wire.RenameRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := spec.CheckName(req.Name); err != nil {
		return err
	}
	if req.Name != rec.Spec.Name {
		var err error
		if rec, err = s.sandboxes.Relabel(context.WithoutCancel(r.Context()), rec.ID, req.Name, nil); err != nil {
			return fmt.Errorf("rename sandbox %s: %w", rec.ID, err)
		}
	}
	writeJSON(w, http.StatusOK, s.show(rec))
	return nil
}

func (s *sandboxHandlers) promote(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	rec, err := s.sandboxes.Promote(context.WithoutCancel(r.Context()), rec.ID)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, s.show(rec))
	return nil
}

func (s *sandboxHandlers) list(w http.ResponseWriter, r *http.Request) error {
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
			sb.Sandboxd.Health.LastOutput = "" // inspect has it; a list has two hundred
		}
		out.Items = append(out.Items, sb)
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// updateLimits changes some limits of a sandbox that runs or is paused.
func (s *sandboxHandlers) updateLimits(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	var req wire.LimitsPatch
	if err := decode(w, r, &req); err != nil {
		return err
	}
	change, err := s.offer.PatchLimits(req.ResourceLimits)
	if err != nil { // what can never work is refused first
		return err
	}
	rec, err = s.sandboxes.Update(context.WithoutCancel(r.Context()), rec.ID, change)
	if err != nil {
		return fmt.Errorf("update sandbox %s: %w", rec.ID, err)
	}
	writeJSON(w, http.StatusOK, s.inspection(rec))
	return nil
}

// start starts a sandbox that has ended. It answers when the intent is durable or, with
// ?wait=true or "Prefer: wait", when the sandbox runs or has failed.
func (s *sandboxHandlers) start(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	wait, err := wantsWait(r)
	if err != nil {
		return err
	}
	id := rec.ID
	if rec, err = s.sandboxes.Start(admission.By(r.Context(), s.guard.Client(r)), id); err != nil {
		return fmt.Errorf("start sandbox %s: %w", id, err)
	}
	if wait {
		if rec, err = s.await(w, r, id); err != nil {
			return err
		}
	}
	writeJSON(w, http.StatusAccepted, s.show(rec))
	return nil
}

// Seconds that an entrypoint has to end by itself: docker's default, and the most that
// a request may ask for, since it waits for the answer.
const (
	stopGrace    = 10
	maxStopGrace = 60
)

// stop ends a sandbox and keeps it; it answers when it has ended.
func (s *sandboxHandlers) stop(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	grace := stopGrace
	if v := r.URL.Query().Get("grace"); v != "" {
		var err error
		if grace, err = strconv.Atoi(v); err != nil || grace < 0 || grace > maxStopGrace {
			return httperr.Invalid("grace %q: want whole seconds from 0 to %d", httperr.Clip(v, 20), maxStopGrace)
		}
	}
	ctx, cancel := detached(r, 2*time.Minute)
	defer cancel()
	if err := s.sandboxes.Stop(ctx, rec.ID, time.Duration(grace)*time.Second); err != nil {
		return fmt.Errorf("stop sandbox %s: %w", rec.ID, err)
	}
	writeEmpty(w, http.StatusAccepted)
	return nil
}

func (s *sandboxHandlers) inspect(w http.ResponseWriter, _ *http.Request, rec record.Record) error {
	writeJSON(w, http.StatusOK, s.inspection(rec))
	return nil
}

// inspection is describe, and notes where a limit holds less than its name says.
func (s *sandboxHandlers) inspection(rec record.Record) wire.Inspection {
	out := s.describe(rec)
	if s.notes != nil {
		out.Notes = s.notes(rec)
	}
	return out
}

// describe is spec.Inspect with what is not in the record.
func (s *sandboxHandlers) describe(r record.Record) wire.Inspection {
	out := spec.Inspect(r)
	out.Sandboxd.Notes = s.offer.Notes(&r)
	if s.health != nil {
		out.Sandboxd.Health = s.health(r)
	}
	if s.host != nil {
		out.Host = s.host(r)
	}
	if s.differences != nil {
		out.SecurityDifferences = s.differences(r.Spec.Runtime, r.Spec.Level())
	}
	return out
}

// show is spec.Sandbox with what is not in the record.
func (s *sandboxHandlers) show(r record.Record) wire.Sandbox {
	out := spec.Sandbox(r)
	out.Sandboxd.Notes = s.offer.Notes(&r)
	if s.health != nil {
		out.Sandboxd.Health = s.health(r)
	}
	return out
}

// detached is a context for work that goes on when the request has ended.
func detached(r *http.Request, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(r.Context()), d)
}
