// Package reply writes the agent's answers: JSON, errors with the codes of execd, and
// the streams of commands and code.
//
//	Handler ─ error ─▶ WriteError         {"code": …, "message": …}
//	        ─ value ─▶ OK, JSON
//	        ─ Stream ─ Begin, Output …, Finish
//
// The surprise: a Stream outlives its client. Writers to it go on as before when nobody
// reads any more.
package reply

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/sandboxd/sandboxd/internal/fields"
	"github.com/sandboxd/sandboxd/pkg/agent"
)

// A Handler answers a request, or returns an error before it wrote anything.
type Handler func(w http.ResponseWriter, r *http.Request) error

// Methods are the handlers of a path, by the method of HTTP. GET answers HEAD as well.
type Methods map[string]Handler

// An Error is an error with its status and code in the protocol.
type Error struct {
	Status int    // of HTTP
	Code   string // one of those below
	Err    error
}

func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns what Err wraps.
func (e *Error) Unwrap() error { return errors.Unwrap(e.Err) }

// The error codes of execd that are used here.
const (
	BadBody     = "INVALID_REQUEST_BODY"
	BadFile     = "INVALID_FILE"
	BadContent  = "INVALID_FILE_CONTENT"
	BadMetadata = "INVALID_FILE_METADATA"
	NoQuery     = "MISSING_QUERY"
	NoFile      = "FILE_NOT_FOUND"
	Denied      = "PERMISSION_DENIED" // ours: of files accessed as somebody
	NoContext   = "CONTEXT_NOT_FOUND"
	Failed      = "RUNTIME_ERROR"
	Unsupported = "NOT_SUPPORTED"
	Unavailable = "SERVICE_UNAVAILABLE"
)

// ErrStopping refuses requests that would start something after the entrypoint has
// ended.
var ErrStopping = Fail(http.StatusServiceUnavailable, Failed, "the sandbox is ending: its entrypoint has exited")

// Fail makes an error; %w works in format.
func Fail(status int, code, format string, args ...any) error {
	return &Error{status, code, fmt.Errorf(format, args...)}
}

// BadRequest is Fail for a body that makes no sense.
func BadRequest(format string, args ...any) error {
	return Fail(http.StatusBadRequest, BadBody, format, args...)
}

// OK answers with success and an empty body. Its length of 0 keeps JavaScript SDKs from
// parsing it.
func OK(w http.ResponseWriter) error {
	w.Header().Set("Content-Length", "0")
	w.WriteHeader(http.StatusOK)
	return nil
}

// WriteError answers with err. An error that is no *Error is the agent's fault: 500.
func WriteError(w http.ResponseWriter, err error) {
	e, isAPI := errors.AsType[*Error](err)
	if !isAPI {
		e = &Error{http.StatusInternalServerError, Failed, err}
	}
	w.Header().Del("Content-Disposition")
	w.Header().Del("Content-Length")
	JSON(w, e.Status, agent.Error{Code: e.Code, Message: e.Error()}) //nolint:errcheck // the client is gone
}

// JSON answers with v.
func JSON(w http.ResponseWriter, status int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(status)
	w.Write(b) //nolint:errcheck // the client is gone
	return nil
}

// ReadJSON decodes the body of r, of at most 16 MiB, into v. Fields that v does not have
// are named in a header of the answer. A misspelled one is refused, except from
// OpenSandbox's own SDKs, which may know more fields than this release.
func ReadJSON(w http.ResponseWriter, r *http.Request, v any) error {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, agent.MaxJSON))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return Fail(http.StatusRequestEntityTooLarge, BadBody,
				"the request body exceeds %d MiB; send files with POST /files/upload", agent.MaxJSON>>20)
		}
		return BadRequest("read the request body: %v", err)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return BadRequest("the request body is not the JSON that this call expects: %v", err)
	}
	unknown, typo, meant := fields.Unknown(b, v)
	if _, sdk := agent.SDK(r.UserAgent()); typo != "" && !sdk {
		return BadRequest("the request has no field %q; did you mean %s?", typo, meant)
	}
	fields.Tell(w.Header(), unknown)
	return nil
}

// ReadOptionalJSON is ReadJSON for a body that may be absent.
func ReadOptionalJSON(w http.ResponseWriter, r *http.Request, v any) error {
	if r.ContentLength == 0 {
		return nil
	}
	body := bufio.NewReader(r.Body)
	if _, err := body.Peek(1); err == io.EOF {
		return nil // sent in chunks, of which there was none
	}
	r.Body = Buffered{body, r.Body}
	return ReadJSON(w, r, v)
}

// Buffered is a body that is read through a buffer.
type Buffered struct {
	*bufio.Reader
	io.Closer
}
