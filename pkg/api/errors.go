package api

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// table is the one place where a code becomes a status. The wire code is the
// one OpenSandbox uses most for it; errs.Wire gives a better one where the
// error is made.
var table = map[errs.Code]struct {
	status int
	wire   string
}{
	errs.Invalid:     {http.StatusBadRequest, "SANDBOX::INVALID_PARAMETER"},
	errs.Denied:      {http.StatusForbidden, "SANDBOX::FORBIDDEN"},
	errs.NotFound:    {http.StatusNotFound, "DOCKER::SANDBOX_NOT_FOUND"},
	errs.Exists:      {http.StatusConflict, "SANDBOX::ALREADY_EXISTS"},
	errs.WrongState:  {http.StatusConflict, "SANDBOX::INVALID_STATE"},
	errs.Exhausted:   {http.StatusServiceUnavailable, "SANDBOX::CAPACITY_EXCEEDED"},
	errs.Unsupported: {http.StatusBadRequest, "SANDBOX::API_NOT_SUPPORTED"},
	errs.Unavailable: {http.StatusServiceUnavailable, "DOCKER::INITIALIZATION_ERROR"},
	errs.Internal:    {http.StatusInternalServerError, "GENERAL::UNKNOWN_ERROR"},
}

// invalid is an error of the request, with OpenSandbox's usual code.
func invalid(format string, args ...any) error { return errs.New(errs.Invalid, format, args...) }

// httpError is an error whose status is not the one of its code: 401, 405,
// 413, 501, 502 exist in HTTP only.
type httpError struct {
	status int
	err    error
}

func (e *httpError) Error() string { return e.err.Error() }
func (e *httpError) Unwrap() error { return e.err }

func withStatus(status int, wireCode string, code errs.Code, format string, args ...any) error {
	return &httpError{status, errs.Wire(errs.New(code, format, args...), wireCode)}
}

// describe turns err into status and body. What is not an errs.Error is
// "internal": a client learns the request id, the log the text.
func describe(err error, requestID string) (int, wire.Error) {
	code := errs.CodeOf(err)
	row, ok := table[code]
	if !ok {
		row = table[errs.Internal]
	}
	body := wire.Error{Code: row.wire}
	e, known := errors.AsType[*errs.Error](err)
	if known {
		body.Message = e.Text
		if e.Wire != "" {
			body.Code = e.Wire
		}
	}
	if code == errs.Internal {
		body.Message = "sandboxd failed to do this and the reason is only in its log; search there for request " + requestID
		if known && e.Text != "" {
			body.Message = e.Text + " (more in the log of sandboxd, request " + requestID + ")"
		}
	}
	status := row.status
	if h, ok := errors.AsType[*httpError](err); ok {
		status = h.status
	}
	return status, body
}

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
	status, body := describe(err, in.requestID)
	if status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", retryAfter(err))
	}
	writeJSON(w, status, body)
}

// retryAfter is when to ask again, in whole seconds (RFC 9110 §10.2.3).
func retryAfter(err error) string {
	seconds := 1
	if e, ok := errors.AsType[*errs.Error](err); ok {
		seconds = max(seconds, int(math.Ceil(e.Retry.Seconds())))
	}
	return strconv.Itoa(seconds)
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
