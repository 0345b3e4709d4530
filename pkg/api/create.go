package api

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/admission"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// create answers when the intent is durable, and with ?wait=true or "Prefer:
// wait" when the sandbox runs or has failed.
func (s *Server) create(w http.ResponseWriter, r *http.Request) error {
	wait, err := wantsWait(r)
	if err != nil {
		return err
	}
	body, err := readBody(w, r)
	if err != nil {
		return err
	}
	once, err := spec.Request(r.Header.Values(wire.HeaderIdempotency), s.guard.Client(r), body)
	if err != nil {
		return err
	}
	rec, again, err := s.madeBy(r, once)
	if err == nil && !again {
		rec, err = s.createOf(r, body, once)
		if isRace(err) {
			rec, again, err = s.madeBy(r, once)
		}
	}
	if err != nil {
		return err
	}
	infoOf(r).sandbox = rec.ID
	if again {
		w.Header().Set(wire.HeaderReplayed, "true")
	}
	if wait {
		if rec, err = s.await(w, r, rec.ID); err != nil {
			return err
		}
	}
	out := s.show(rec)
	out.Image, out.SnapshotID = nil, "" // the create answer of OpenSandbox has none
	writeJSON(w, http.StatusAccepted, out)
	return nil
}

// createOf makes a sandbox of a body.
func (s *Server) createOf(r *http.Request, body []byte, once record.Request) (record.Record, error) {
	var req wire.CreateRequest
	if err := spec.Decode(body, &req); err != nil {
		return record.Record{}, err
	}
	asked, err := s.cfg.Spec(&req)
	if err != nil {
		return record.Record{}, err
	}
	if err := s.origin(r.Context(), &asked, &req); err != nil {
		return record.Record{}, err
	}
	asked.Image.Config.Labels = nil // the image's; not for each record of a sandbox to repeat
	asked.Request = once
	rec, err := s.sandboxes.Create(withAuth(admission.By(r.Context(), s.guard.Client(r)), req.Image), asked)
	if err != nil {
		return rec, fmt.Errorf("create a sandbox of %s: %w", asked.Image.Ref(), err)
	}
	return rec, nil
}

// waitLimit is how long an answer waits for a sandbox: less than clients do for
// the beginning of one. Behind a long queue it is then as it is: Pending.
const waitLimit = 90 * time.Second

// await waits until a sandbox is no longer being brought up, and if it has a
// probe until it is ready, unhealthy or ended; it says in the answer how long
// each step took.
func (s *Server) await(w http.ResponseWriter, r *http.Request, id string) (record.Record, error) {
	ctx, cancel := context.WithTimeout(r.Context(), s.waitLimit)
	defer cancel()
	rec, err := s.sandboxes.Await(ctx, id)
	if err != nil && ctx.Err() != nil && r.Context().Err() == nil {
		return s.sandboxes.Get(r.Context(), id)
	}
	if err != nil {
		return rec, fmt.Errorf("wait for sandbox %s: %w", id, err)
	}
	if rec, err = s.awaitReady(ctx, r.Context(), rec); err != nil {
		return rec, fmt.Errorf("wait until sandbox %s is ready: %w", id, err)
	}
	if t := serverTiming(s.sandboxes.Steps(id)); t != "" {
		w.Header().Set("Server-Timing", t)
	}
	w.Header().Set("Preference-Applied", "wait")
	return rec, nil
}

// origin finds the files that a sandbox begins with.
func (s *Server) origin(ctx context.Context, to *record.Spec, req *wire.CreateRequest) (err error) {
	if req.SnapshotID != "" {
		return s.fromSnapshot(ctx, to, req.SnapshotID)
	}
	to.Image, err = s.images.Resolve(ctx, req.Image.URI)
	if errs.Is(err, errs.NotFound) && s.images.CanPull(req.Image.URI) {
		to.Image, err = image.Kept(req.Image.URI), nil // it is pulled when the sandbox is brought up
	}
	if errs.Is(err, errs.NotFound) {
		return errs.Wire(err, "IMAGE::NOT_FOUND")
	}
	if err != nil {
		return fmt.Errorf("resolve image %q: %w", httperr.Clip(req.Image.URI, 200), err)
	}
	to.ImageURI = req.Image.URI
	return nil
}

func wantsWait(r *http.Request) (bool, error) {
	for _, p := range r.Header.Values("Prefer") {
		for part := range strings.SplitSeq(p, ",") {
			if name, _, _ := strings.Cut(strings.TrimSpace(part), "="); strings.EqualFold(name, "wait") {
				return true, nil
			}
		}
	}
	v := r.URL.Query().Get("wait")
	if v == "" {
		return false, nil
	}
	b, err := spec.ParseBool(v)
	if err != nil {
		return false, httperr.Invalid("wait %q: want true or false", httperr.Clip(v, 20))
	}
	return b, nil
}

// serverTiming writes steps as in https://www.w3.org/TR/server-timing, in milliseconds.
func serverTiming(steps []Step) string {
	var b strings.Builder
	for _, st := range steps {
		if b.Len() > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s;dur=%.3f", st.Name, float64(st.Took)/float64(time.Millisecond))
	}
	return b.String()
}

// detached is ctx for what goes on when the request has ended.
func detached(r *http.Request, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(r.Context()), d)
}

// awaitReady waits, as long as limit lasts, for one that runs and has a probe,
// and returns it as it is then.
func (s *Server) awaitReady(limit, asker context.Context, rec record.Record) (record.Record, error) {
	if rec.State != record.Running || !rec.Spec.Ready.Given() || s.cfg.AwaitReady == nil {
		return rec, nil
	}
	if err := s.cfg.AwaitReady(limit, rec); err != nil && asker.Err() != nil {
		return rec, err
	}
	return s.sandboxes.Get(asker, rec.ID)
}
