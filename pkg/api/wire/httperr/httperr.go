// Package httperr says how an error becomes the answer of an HTTP request.
//
//	error ─▶ errs.Code ─▶ status and OpenSandbox's code ─▶ wire.Error
//	            └ the table below; New and With know better for one error
//
// The rooms of pkg/api stand on it and on wire. The surprise: the text of an error that
// was not made for clients (errs.Internal) never reaches one. The client gets the id of
// its request instead, and the text is in the log.
package httperr

import (
	"cmp"
	"errors"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// table is the one place where a code becomes a status. The wire code is the
// one that OpenSandbox uses most for it; errs.Wire gives a better one where the
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

// byWire are the wire codes that have a status of their own, wherever their errors are made.
var byWire = map[string]int{
	record.CodeNotInspected: http.StatusPreconditionFailed, record.CodePoolFull: http.StatusTooManyRequests,
}

// Codes lists the codes that the table knows, in no order.
func Codes() []errs.Code { return slices.Collect(maps.Keys(table)) }

// Invalid makes an error of the request, with OpenSandbox's usual code for it.
func Invalid(format string, args ...any) error { return errs.New(errs.Invalid, format, args...) }

// NoSandbox makes the error of every look-up of a sandbox that is not there.
func NoSandbox(idOrName string) error {
	return errs.New(errs.NotFound, "Sandbox %s not found: no sandbox here has this id or name; "+
		"it may have been deleted or have expired (`sandboxctl ps -a` lists the sandboxes of this host)", Clip(idOrName, 80))
}

// statusError is an error whose status is not the one of its code: 401, 405,
// 413, 501, 502 exist in HTTP only.
type statusError struct {
	status int
	err    error
}

func (e *statusError) Error() string { return e.err.Error() }
func (e *statusError) Unwrap() error { return e.err }

// New makes an error with a status of its own.
func New(status int, wireCode string, code errs.Code, format string, args ...any) error {
	return With(status, errs.Wire(errs.New(code, format, args...), wireCode))
}

// With gives err a status of its own.
func With(status int, err error) error { return &statusError{status, err} }

// Recode gives err the wire code if it has the code.
func Recode(err error, code errs.Code, wireCode string) error {
	if errs.Is(err, code) {
		return errs.Wire(err, wireCode)
	}
	return err
}

// Body turns err into status and body of an answer.
func Body(err error, requestID string) (int, wire.Error) {
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
		body.Message = "sandboxd failed to do this; the reason is in its log, under request " + requestID
		text := errs.Lack(err)
		if known {
			text = cmp.Or(e.Text, text)
		}
		if text != "" {
			body.Message = text + " (more in the log of sandboxd, request " + requestID + ")"
		}
	}
	status := cmp.Or(byWire[body.Code], row.status)
	if h, ok := errors.AsType[*statusError](err); ok {
		status = h.status
	}
	return status, body
}

// RetryAfter is when to ask again, in whole seconds (RFC 9110 §10.2.3).
func RetryAfter(err error) string {
	seconds := 1
	if e, ok := errors.AsType[*errs.Error](err); ok {
		seconds = max(seconds, int(math.Ceil(e.Retry.Seconds())))
	}
	return strconv.Itoa(seconds)
}

// Clip shortens to n bytes what a client sent and a message repeats.
func Clip(s string, n int) string {
	if len(s) > n {
		return s[:n] + "…"
	}
	return s
}
