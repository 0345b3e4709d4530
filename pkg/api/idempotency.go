package api

import (
	"errors"
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Who gives a creation an Idempotency-Key may ask as often as it takes: the
// first request that gets through makes a sandbox, the others are answered with
// that one, also after a restart, for record.RequestsKept. A key is a client's
// own, as far as clients are told apart; one that has made nothing, since its
// request was refused, is free.
// (draft-ietf-httpapi-idempotency-key-header)

// madeBy finds the sandbox that was made by a request of the same key.
func (s *Server) madeBy(r *http.Request, once record.Request) (rec record.Record, found bool, err error) {
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
		return rec, false, errs.Wire(errs.New(errs.WrongState, "this %s made sandbox %s of another body; draw a key for each sandbox, and send the same body again only with the same key", wire.HeaderIdempotency, m.ID), "SANDBOX::IDEMPOTENCY_KEY_REUSED")
	}
	rec, err = s.sandboxes.Get(r.Context(), m.ID)
	if errs.Is(err, errs.NotFound) || err == nil && rec.State == record.Deleting {
		return rec, false, errs.Wire(errs.New(errs.WrongState, "this %s made sandbox %s, which was deleted or has expired since; draw another key for another sandbox", wire.HeaderIdempotency, m.ID), "SANDBOX::IDEMPOTENCY_KEY_SPENT")
	}
	return rec, err == nil, err
}

// isRace reports whether another request with the same key was faster.
func isRace(err error) bool {
	e, ok := errors.AsType[*errs.Error](err)
	return ok && e.Wire == record.CodeRequestRace
}
