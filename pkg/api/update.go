package api

import (
	"context"
	"fmt"
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// updateLimits changes some limits of a sandbox that runs or is paused.
func (s *Server) updateLimits(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	var req wire.LimitsPatch
	if err := decode(w, r, &req); err != nil {
		return err
	}
	change, err := s.cfg.PatchLimits(req.ResourceLimits)
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
