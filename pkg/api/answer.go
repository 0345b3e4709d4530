package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/fields"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// fail writes err as the answer, unless the answer has begun or nobody waits for it.
func fail(w http.ResponseWriter, r *http.Request, err error) {
	in := infoOf(r)
	if why := httperr.Revoked(r.Context()); why != nil {
		err = why
	}
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

// Limits of a body.
const (
	maxBody  = 16 << 20
	bodyTime = time.Minute // to send a body of maxBody, or one that nobody reads
)

// decode reads one JSON value of bounded size and depth.
func decode(w http.ResponseWriter, r *http.Request, v any) error {
	b, err := readBody(w, r)
	if err != nil {
		return err
	}
	return decodeBody(w, r, b, v)
}

// decodeBody decodes the body b of a request. Wrong types are refused. Unknown fields are
// not, as OpenSandbox does: they are named in a header of the answer. Only a misspelled
// one is refused, and not from OpenSandbox's own SDKs, which may know more fields than
// this release.
func decodeBody(w http.ResponseWriter, r *http.Request, b []byte, v any) error {
	if err := spec.Decode(b, v); err != nil {
		return err
	}
	unknown, typo, meant := fields.Unknown(b, v)
	if _, sdk := agent.SDK(r.UserAgent()); typo != "" && !sdk {
		return httperr.Invalid("the request has no field %q; did you mean %s?", httperr.Clip(typo, 40), meant)
	}
	fields.Tell(w.Header(), unknown)
	return nil
}

// maybeJSON reports whether a body of this Content-Type is read as JSON. curl(1) calls any data
// a form, and some programs call it nothing.
func maybeJSON(kind string) bool {
	kind, _, _ = strings.Cut(strings.ToLower(kind), ";")
	kind = strings.TrimSpace(kind)
	return kind == "" || kind == "application/json" || strings.HasSuffix(kind, "+json") || kind == "application/x-www-form-urlencoded"
}

// readBody reads a body of at most maxBody bytes.
func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if weak.Off(weak.Bodies) {
		return io.ReadAll(r.Body)
	}
	if kind := r.Header.Get("Content-Type"); !maybeJSON(kind) {
		return nil, httperr.New(http.StatusUnsupportedMediaType, "SANDBOX::INVALID_PARAMETER", errs.Invalid,
			"the body is said to be %q; send JSON, with Content-Type: application/json", httperr.Clip(kind, 80))
	}
	tooLarge := func() error {
		return httperr.New(http.StatusRequestEntityTooLarge, "SANDBOX::INVALID_PARAMETER", errs.Invalid,
			"the body is larger than %d MiB; put data into the sandbox through its files API instead", maxBody>>20)
	}
	if r.ContentLength > maxBody {
		w.Header().Set("Connection", "close") // else net/http would read on to keep the connection
		return nil, tooLarge()
	}
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody)) // until the deadline of ServeHTTP
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return nil, tooLarge()
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.Invalid, "the request body could not be read completely; send it again")
	}
	http.NewResponseController(w).SetReadDeadline(time.Time{}) //nolint:errcheck // a recorder in a test has none
	return b, nil
}
