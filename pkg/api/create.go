package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/fields"
	"github.com/sandboxd/sandboxd/pkg/admission"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// create answers when the sandbox runs or has failed; see hold. With ?wait=true or
// "Prefer: wait" it waits for longer, and with "Prefer: respond-async" or ?wait=false it
// answers when the intent is durable. (RFC 7240)
func (s *sandboxHandlers) create(w http.ResponseWriter, r *http.Request) error {
	wait, err := wantsWait(r)
	if err != nil {
		return err
	}
	body, done, err := readBody(w, r)
	if err != nil {
		return err
	}
	defer done()
	holder := s.guard.Holder(r)
	once, err := spec.Request(r.Header.Values(wire.HeaderIdempotency), cmp.Or(holder, s.guard.Client(r)), body)
	if err != nil {
		return err
	}
	once.Holder = holder
	rec, again, err := s.madeBy(r, once)
	if err == nil && !again {
		rec, err = s.createOf(w, r, body, once)
		if isRace(err) {
			rec, again, err = s.madeBy(r, once)
		}
	}
	if err != nil {
		return err
	}
	done() // before it waits
	infoOf(r).sandbox = rec.ID
	w.Header().Set(wire.HeaderSandbox, rec.ID)
	if again {
		w.Header().Set(wire.HeaderReplayed, "true")
	}
	switch {
	case wait:
		rec, err = s.await(w, r, rec.ID)
	case prefers(r, "respond-async"):
		w.Header().Set("Preference-Applied", "respond-async")
	case !r.URL.Query().Has("wait"):
		rec, err = s.hold(r, rec)
		infoOf(r).visit.Guest = rec.State == record.Ended && !rec.NeverRan() // a 500 is no fault of the daemon's then
	}
	if err != nil {
		return err
	}
	out := s.show(rec)
	out.Image, out.SnapshotID = nil, "" // the create answer of OpenSandbox has none
	writeJSON(w, http.StatusAccepted, out)
	return nil
}

// createOf makes a sandbox of a body.
func (s *sandboxHandlers) createOf(
	w http.ResponseWriter, r *http.Request, body []byte, once record.Request,
) (record.Record, error) {
	var req wire.CreateRequest
	if err := decodeBody(w, r, body, &req); err != nil {
		return record.Record{}, err
	}
	ignored, err := s.offer.LimitsOfOthers(req.ResourceLimits)
	if err != nil {
		return record.Record{}, err
	}
	fields.Tell(w.Header(), ignored)
	sent := req.Extensions
	if err := s.ofPool(r.Context(), &req); err != nil {
		return record.Record{}, err
	}
	asked, err := s.offer.Spec(&req)
	if err != nil {
		return record.Record{}, err
	}
	asked.Extensions = sent
	if err := s.origin(r.Context(), &asked, &req); err != nil {
		return record.Record{}, err
	}
	if asked.Image.Digest != "" && !asked.TakeImage(asked.Image) { // without a digest it is yet to be pulled
		return record.Record{}, errs.Wire(errs.New(errs.Invalid, "image %s "+record.NoCommand, asked.Image.Ref()),
			"DOCKER::INVALID_ENTRYPOINT")
	}
	asked.Request = once
	rec, err := s.sandboxes.Create(withAuth(admission.By(r.Context(), s.guard.Client(r)), req.Image), asked)
	if err != nil {
		return rec, fmt.Errorf("create a sandbox from %s: %w", asked.Image.Ref(), err)
	}
	return rec, nil
}

// ofPool adds to a creation that names a pool what the template of that has.
func (s *sandboxHandlers) ofPool(ctx context.Context, req *wire.CreateRequest) error {
	name := req.Extensions[wire.ExtPool]
	if name == "" || s.pools == nil {
		return nil
	}
	p, err := s.pools.Get(ctx, name)
	if err != nil {
		return err
	}
	return spec.FromPool(req, &p.Pool)
}

// holdLimit is how long the answer to a creation waits for its sandbox. Most run within
// a tenth of a second.
const holdLimit = 2 * time.Second

// hold waits until a sandbox runs or has failed, at most for holdLimit, and not at all
// while it waits for its turn or its image. If it has failed, that is the error. So
// clients that never look at the state learn of it at once, and those that look do not
// have to ask again.
func (s *sandboxHandlers) hold(r *http.Request, rec record.Record) (record.Record, error) {
	if rec.State.Beginning() && !s.sandboxes.Queued(&rec) {
		ctx, cancel := context.WithTimeout(r.Context(), s.holdLimit)
		defer cancel()
		now, err := s.sandboxes.Await(ctx, rec.ID)
		switch {
		case err == nil:
			rec = now
		case ctx.Err() == nil || r.Context().Err() != nil:
			return rec, fmt.Errorf("wait for sandbox %s: %w", rec.ID, err)
		}
	}
	return rec, failed(&rec)
}

// failed is the error of a creation whose sandbox never came up; nil: it came up, is
// being brought up, or has ended well. It depends on nothing but the record, so it is
// the same each time.
func failed(rec *record.Record) error {
	if !rec.Failed() || !rec.Started.IsZero() {
		return nil
	}
	status, code := http.StatusInternalServerError, "DOCKER::SANDBOX_START_FAILED"
	switch {
	case rec.Reason == record.CreateFailed && rec.ExitCode != nil && (*rec.ExitCode == 126 || *rec.ExitCode == 127):
		status, code = http.StatusBadRequest, "DOCKER::INVALID_ENTRYPOINT" // no program, or none that can be executed
	case rec.Spec.Away():
		code = "DOCKER::SANDBOX_IMAGE_PULL_FAILED"
	}
	return httperr.New(status, code, errs.WrongState, "sandbox %s failed (%s) and is kept until it is deleted or its time is up: %s",
		rec.ID, rec.Reason, rec.Message)
}

// waitLimit is how long an answer waits for a sandbox: less than clients wait for the
// beginning of an answer. A sandbox in a long queue is then shown as it is: Pending.
const waitLimit = 90 * time.Second

// await waits until a sandbox is no longer being brought up, and if it has a probe
// until it is ready, unhealthy or ended. The answer says how long each step took.
func (s *sandboxHandlers) await(w http.ResponseWriter, r *http.Request, id string) (record.Record, error) {
	ctx, cancel := context.WithTimeout(r.Context(), s.waitLimit)
	defer cancel()
	rec, err := s.sandboxes.Await(ctx, id)
	if err != nil && ctx.Err() != nil && r.Context().Err() == nil {
		return s.sandboxes.Get(r.Context(), id)
	}
	if err != nil {
		return rec, fmt.Errorf("wait for sandbox %s: %w", id, err)
	}
	if rec, err = s.readied(ctx, r.Context(), rec); err != nil {
		return rec, fmt.Errorf("wait until sandbox %s is ready: %w", id, err)
	}
	if t := serverTiming(s.sandboxes.Steps(id), rec.Pool); t != "" {
		w.Header().Set("Server-Timing", t)
	}
	w.Header().Set("Preference-Applied", "wait")
	return rec, nil
}

// origin finds the files that a sandbox begins with: a snapshot or an image. An image
// that is not on this host may be pulled.
func (s *sandboxHandlers) origin(ctx context.Context, to *record.Spec, req *wire.CreateRequest) (err error) {
	if req.SnapshotID != "" {
		return s.fromSnapshot(ctx, to, req)
	}
	ref, err := image.ParseReference(req.Image.URI)
	if err == nil {
		if to.Image, err = s.images.Resolve(ctx, ref); err == nil {
			to.ImageNote = s.images.Note(ref, to.Image)
		}
	}
	if errs.Is(err, errs.NotFound) && s.images.CanPull(ref) {
		to.Image, err = ref.Kept(), nil // it is pulled when the sandbox is brought up
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

// prefers reports whether a request has a preference.
func prefers(r *http.Request, preference string) bool {
	for _, p := range r.Header.Values("Prefer") {
		for part := range strings.SplitSeq(p, ",") {
			if name, _, _ := strings.Cut(strings.TrimSpace(part), "="); strings.EqualFold(name, preference) {
				return true
			}
		}
	}
	return false
}

func wantsWait(r *http.Request) (bool, error) {
	if prefers(r, "wait") {
		return true, nil
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
func serverTiming(steps []Step, pool record.PoolUse) string {
	var b strings.Builder
	switch {
	case pool.Miss != "":
		fmt.Fprintf(&b, "pool-miss;desc=%q", pool.Miss)
	case pool.Name != "":
		fmt.Fprintf(&b, "pool-hit;desc=%q", pool.Name)
	}
	for _, st := range steps {
		if b.Len() > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s;dur=%.3f", st.Name, float64(st.Took)/float64(time.Millisecond))
	}
	return b.String()
}

// readied waits for a running sandbox with a probe, until limit ends at the latest, and
// returns its record as of then.
func (s *sandboxHandlers) readied(limit, asker context.Context, rec record.Record) (record.Record, error) {
	if rec.State != record.Running || !rec.Spec.Ready.Given() || s.awaitReady == nil {
		return rec, nil
	}
	if err := s.awaitReady(limit, rec); err != nil && asker.Err() != nil {
		return rec, err
	}
	return s.sandboxes.Get(asker, rec.ID)
}

// fromSnapshot makes a new sandbox begin with the files of a snapshot, over its image.
func (s *sandboxHandlers) fromSnapshot(ctx context.Context, to *record.Spec, req *wire.CreateRequest) error {
	snap, err := s.snapshots.Get(ctx, req.SnapshotID)
	if err != nil {
		return fmt.Errorf("look up snapshot %q: %w", httperr.Clip(req.SnapshotID, 80), err)
	}
	spec.Began(to, req, &snap)
	return nil
}

// A client may repeat a creation that has an Idempotency-Key. The first request that
// gets through makes a sandbox. The answer to the others is that sandbox, also after a
// restart, for record.RequestsKept. The same key of two clients counts as two keys, as
// far as the daemon can tell clients apart. A key whose request was refused has made
// nothing and is free again. (draft-ietf-httpapi-idempotency-key-header)

// madeBy finds the sandbox that was made by a request of the same key.
func (s *sandboxHandlers) madeBy(r *http.Request, once record.Request) (rec record.Record, found bool, err error) {
	if once.Key == "" {
		return rec, false, nil
	}
	m, found, err := s.sandboxes.Made(r.Context(), once.Key)
	switch {
	case err != nil:
		return rec, false, err
	case !found:
		return rec, false, nil
	case m.Body != once.Body:
		return rec, false, errs.Wire(errs.New(errs.WrongState, "this %s created sandbox %s with another request body; use a new key for "+
			"each sandbox, and repeat a key only with the same body", wire.HeaderIdempotency, m.ID), "SANDBOX::IDEMPOTENCY_KEY_REUSED")
	}
	rec, err = s.sandboxes.Get(r.Context(), m.ID)
	if errs.Is(err, errs.NotFound) || err == nil && rec.State == record.Deleting {
		return rec, false, errs.Wire(errs.New(errs.WrongState, "this %s created sandbox %s, which has since been deleted or has expired; "+
			"use a new key to create another sandbox", wire.HeaderIdempotency, m.ID), "SANDBOX::IDEMPOTENCY_KEY_SPENT")
	}
	return rec, err == nil, err
}

// isRace reports whether another request with the same key was faster.
func isRace(err error) bool {
	e, ok := errors.AsType[*errs.Error](err)
	return ok && e.Wire == record.CodeRequestRace
}

// withAuth adds the credentials that came for an image to ctx.
func withAuth(ctx context.Context, i *wire.Image) context.Context {
	if i == nil || i.Auth == nil {
		return ctx
	}
	return image.WithAuth(ctx, &image.Auth{Username: i.Auth.Username, Password: i.Auth.Password})
}
