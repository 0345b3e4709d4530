package api

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// updateLimits changes some limits of a sandbox that runs or is paused.
func (s *Server) updateLimits(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	var req wire.LimitsPatch
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if len(req.ResourceLimits) == 0 {
		return httperr.Invalid("resourceLimits is missing or empty; send what is to change, as {\"resourceLimits\":{\"memory\":\"1Gi\"}}")
	}
	change := func(t *record.Terms) error {
		for _, key := range slices.Sorted(maps.Keys(req.ResourceLimits)) {
			if key == keyShm || key == keyLog {
				return errs.New(errs.Unsupported, "resourceLimits.%s can not change while a sandbox runs; create another with it", key)
			}
			if err := s.setLimit(&t.Limits, key, req.ResourceLimits[key]); err != nil {
				return err
			}
		}
		return nil
	}
	if err := change(&record.Terms{}); err != nil { // what can never work is said first
		return err
	}
	rec, err := s.sandboxes.Update(context.WithoutCancel(r.Context()), rec.ID, change)
	if err != nil {
		return fmt.Errorf("update sandbox %s: %w", rec.ID, err)
	}
	writeJSON(w, http.StatusOK, s.inspection(rec))
	return nil
}
