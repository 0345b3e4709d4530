package api

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// statsHandlers measure sandboxes.
type statsHandlers struct {
	sandboxes Sandboxes
	stats     Stats
	log       *slog.Logger
}

func (s *statsHandlers) one(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	switch rec.State {
	case record.Hibernated:
		return errs.New(errs.WrongState, "sandbox %s hibernates: its memory is on disk, and it uses no other resources; only running and "+
			"paused sandboxes do", rec.ID)
	case record.Ended, record.Creating, record.Starting, record.Waking:
		return errs.New(errs.WrongState, "sandbox %s is %s; only running and paused sandboxes use resources", rec.ID, spec.StateOf(&rec))
	}
	u, err := s.measure(r.Context(), &rec)
	if err != nil {
		return fmt.Errorf("measure sandbox %s: %w", rec.ID, err)
	}
	writeJSON(w, http.StatusOK, u)
	return nil
}

// measuredAtOnce bounds how many sandboxes are measured at the same time.
const measuredAtOnce = 16

// all answers GET /stats. A sandbox that ends meanwhile is left out.
func (s *statsHandlers) all(w http.ResponseWriter, r *http.Request) error {
	all, err := s.sandboxes.List(r.Context())
	if err != nil {
		return fmt.Errorf("list sandboxes: %w", err)
	}
	all = slices.DeleteFunc(all, func(rec *record.Record) bool {
		switch rec.State {
		case record.Running, record.Pausing, record.Paused, record.Resuming, record.Hibernating:
			return false
		}
		return true
	})
	// A few at once: on gVisor the sandbox is asked, and may take its time.
	items := make([]*wire.SandboxStats, len(all))
	var g errgroup.Group
	g.SetLimit(measuredAtOnce)
	for i, rec := range all {
		g.Go(func() error {
			if err := r.Context().Err(); err != nil {
				return err
			}
			u, err := s.measure(r.Context(), rec)
			if err != nil {
				s.log.Debug("cannot measure a sandbox; it is missing in GET /stats", "sandbox", rec.ID, "err", err)
				return nil
			}
			items[i] = &wire.SandboxStats{
				ID: rec.ID, Name: rec.Spec.Name, Runtime: rec.Spec.Runtime, State: spec.StateOf(rec), CreatedAt: spec.Micros(rec.Created),
				Usage: u,
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	out := wire.StatsList{Items: []wire.SandboxStats{}}
	for _, item := range items {
		if item != nil {
			out.Items = append(out.Items, *item)
		}
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// measure reads what a sandbox uses. No figure comes from inside the sandbox, except
// the number of tasks on gVisor, which is shown and not relied upon.
func (s *statsHandlers) measure(ctx context.Context, rec *record.Record) (wire.Usage, error) {
	u, err := s.stats.Usage(ctx, rec)
	if err != nil {
		return u, err
	}
	if u.Time.IsZero() {
		u.Time = time.Now().UTC()
	}
	u.MemoryLimitBytes, u.CPULimitMillis, u.PidsLimit = rec.Spec.MemoryBytes, rec.Spec.CPUMillis, rec.Spec.Pids
	if u.DiskLimitBytes == 0 {
		u.DiskLimitBytes = rec.Spec.DiskBytes
	}
	return u, nil
}

// Flows knows what sandboxes sent, received and connected to, also of those that have
// ended. (egress)
type Flows interface {
	Flows(id string) wire.NetworkFlows
	Traffic(id string) wire.NetworkStats
}

// flowHandlers show flow logs.
type flowHandlers struct {
	flows Flows
}

func (h *flowHandlers) list(w http.ResponseWriter, _ *http.Request, rec record.Record) error {
	writeJSON(w, http.StatusOK, h.flows.Flows(rec.ID))
	return nil
}

func (h *flowHandlers) stats(w http.ResponseWriter, _ *http.Request, rec record.Record) error {
	writeJSON(w, http.StatusOK, h.flows.Traffic(rec.ID))
	return nil
}

// heartbeat is how often a quiet stream of events sends a comment, so that proxies in
// between do not cut it and a dead client is noticed.
const heartbeat = 15 * time.Second

// eventHandlers stream what happens to sandboxes.
type eventHandlers struct {
	sandboxes Sandboxes
}

func (e *eventHandlers) stream(w http.ResponseWriter, r *http.Request) error {
	since, err := sinceOf(r.URL.Query())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	ch := e.sandboxes.EventsSince(ctx, r.Header.Get("Last-Event-ID"), since)
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
	rc := http.NewResponseController(w)
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	for {
		if err := rc.Flush(); err != nil {
			return nil //nolint:nilerr // the client has left, which ends an event stream well
		}
		select {
		case <-ctx.Done():
			if why := httperr.Revoked(ctx); why != nil { // a comment, for people: programs come again, and are refused
				fmt.Fprintf(w, ": %s\n\n", why)
				rc.Flush() //nolint:errcheck // the connection is cut
			}
			return nil
		case <-tick.C:
			io.WriteString(w, ": alive\n\n") //nolint:errcheck // Flush tells
		case ev, ok := <-ch:
			if !ok {
				return nil
			}
			if ev.Cursor != "" {
				fmt.Fprintf(w, "id: %s\n", ev.Cursor)
			}
			if ev.Type == "" { // the cursor alone: browsers and other readers remember it and see no event
				io.WriteString(w, "\n") //nolint:errcheck // Flush tells
				continue
			}
			b, err := json.Marshal(ev)
			if err != nil {
				return fmt.Errorf("encode an event: %w", err)
			}
			fmt.Fprintf(w, "event: %s\ndata: %s\n\n", ev.Type, b)
		}
	}
}
