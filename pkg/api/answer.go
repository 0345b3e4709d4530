package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
)

// fail writes err as the answer, unless the answer has begun or nobody waits for it.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	in := infoOf(r)
	in.err = err
	if errors.Is(err, context.Canceled) && r.Context().Err() != nil {
		in.hungUp = true
	}
	if in.wrote {
		return
	}
	status, body := httperr.Body(err, in.requestID)
	if status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", httperr.RetryAfter(err))
	}
	writeJSON(w, status, body)
}

// writeJSON answers with v and its length: clients of OpenSandbox take an
// error without a body for a success.
func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil { // only a bug can do this; no answer is worse than this one
		status, b = http.StatusInternalServerError, []byte(`{"code":"GENERAL::UNKNOWN_ERROR","message":"the answer could not be encoded"}`)
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(b)+1))
	w.WriteHeader(status)
	w.Write(append(b, '\n')) //nolint:errcheck // a client that left needs no answer
}

// writeEmpty answers without a body and says so.
func writeEmpty(w http.ResponseWriter, status int) {
	if status != http.StatusNoContent {
		w.Header().Set("Content-Length", "0")
	}
	w.WriteHeader(status)
}

// writeText answers with one line of text.
func writeText(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	w.Write([]byte(text + "\n")) //nolint:errcheck // a client that left needs no answer
}
