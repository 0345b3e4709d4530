package api

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/pkg/admission"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// start lets a sandbox that has ended live again. It answers as create does.
func (s *Server) start(w http.ResponseWriter, r *http.Request, rec record.Record) error {
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

// Seconds that an entrypoint has to end by itself: docker's default, and what
// a request that waits for the answer may ask for.
const (
	stopGrace    = 10
	maxStopGrace = 60
)

// stop ends a sandbox and keeps it; it answers when it has ended.
func (s *Server) stop(w http.ResponseWriter, r *http.Request, rec record.Record) error {
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
