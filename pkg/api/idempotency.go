package api

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Who gives a creation an Idempotency-Key may ask as often as it takes: the
// first request that gets through makes a sandbox, the others are answered with
// that one, also after a restart, for record.RequestsKept. A key is a client's
// own, as far as clients are told apart; one that has made nothing, since its
// request was refused, is free.
// (draft-ietf-httpapi-idempotency-key-header)

// maxRequestKey bounds a key, in bytes.
const maxRequestKey = 255

// request reads by which key the body is sent; without one it is empty.
func (s *Server) request(r *http.Request, body []byte) (once record.Request, err error) {
	given := r.Header.Values(wire.HeaderIdempotency)
	if len(given) == 0 {
		return once, nil
	}
	key := given[0]
	if len(given) > 1 || key == "" || len(key) > maxRequestKey || strings.IndexFunc(key, func(c rune) bool { return c < ' ' || c > '~' }) >= 0 {
		return once, errs.Wire(httperr.Invalid("%s: want one of 1 to %d printable ASCII characters, as a UUID, drawn anew for each sandbox", wire.HeaderIdempotency, maxRequestKey), "SANDBOX::INVALID_IDEMPOTENCY_KEY")
	}
	digest := func(parts ...string) string {
		h := sha256.New()
		for _, p := range parts {
			fmt.Fprintf(h, "%d\n%s\n", len(p), p)
		}
		return hex.EncodeToString(h.Sum(nil))
	}
	return record.Request{Key: digest(s.client(r), key), Body: digest(string(body))}, nil
}

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
