package api

import (
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Limits of a body.
const (
	maxBody  = 16 << 20
	bodyTime = time.Minute // to send a body of maxBody
)

// decode reads one JSON value of bounded size and depth. Unknown fields are
// ignored, as OpenSandbox does; wrong types are not.
func decode(w http.ResponseWriter, r *http.Request, v any) error {
	b, err := readBody(w, r)
	if err != nil {
		return err
	}
	return spec.Decode(b, v)
}

// readBody reads a body of at most maxBody bytes.
func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	tooLarge := func() error {
		return httperr.New(http.StatusRequestEntityTooLarge, "SANDBOX::INVALID_PARAMETER", errs.Invalid,
			"the body is larger than %d MiB; put data into the sandbox through its files API instead", maxBody>>20)
	}
	if r.ContentLength > maxBody {
		w.Header().Set("Connection", "close") // else net/http would read on to keep the connection
		return nil, tooLarge()
	}
	rc := http.NewResponseController(w)
	rc.SetReadDeadline(time.Now().Add(bodyTime)) //nolint:errcheck // a recorder in a test has none
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	rc.SetReadDeadline(time.Time{}) //nolint:errcheck // a recorder in a test has none
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return nil, tooLarge()
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.Invalid, "the body could not be read to its end; send it again")
	}
	return b, nil
}
