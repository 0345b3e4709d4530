package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

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

// decode reads one JSON value of bounded size and depth.
func decode(w http.ResponseWriter, r *http.Request, v any) error {
	b, done, err := readBody(w, r)
	if err != nil {
		return err
	}
	defer done()
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

// Limits of bodies, each and together.
const (
	maxBody  = 16 << 20
	bodyTime = time.Minute // to send a body of maxBody, or one that nobody reads

	// freeBody is how much of each body needs no share of bodyBudget, so that large bodies of one
	// client keep no ordinary request of another out.
	freeBody   = 64 << 10
	bodyBudget = 32 << 20         // bytes beyond that, of all bodies that are being read or decoded
	bodyWait   = 2 * time.Second  // for a share; then the client asks again
	largeTime  = 15 * time.Second // to send the rest of a body that has a share, which others may wait for
)

// readBody reads a body of at most maxBody bytes that has the shape of JSON (spec.Shape), whether or
// not it is JSON. It takes from the server's budget as bytes arrive. The caller must call done when b
// is decoded, and may call it twice.
func readBody(w http.ResponseWriter, r *http.Request) (b []byte, done func(), err error) {
	if weak.Off(weak.Bodies) {
		b, err = io.ReadAll(r.Body)
		return b, func() {}, err
	}
	if kind := r.Header.Get("Content-Type"); !maybeJSON(kind) {
		return nil, nil, httperr.New(http.StatusUnsupportedMediaType, "SANDBOX::INVALID_PARAMETER", errs.Invalid,
			"the body is said to be %q; send JSON, with Content-Type: application/json", httperr.Clip(kind, 80))
	}
	if r.ContentLength > maxBody {
		w.Header().Set("Connection", "close") // else net/http would read on to keep the connection
		return nil, nil, bodyTooLarge()
	}
	s := share{of: infoOf(r).bodies}
	from := http.MaxBytesReader(w, r.Body, maxBody) // until the deadline of ServeHTTP, or that of grow
	b, err = s.read(w, r, from)
	if err != nil {
		s.leave()
		if errs.CodeOf(err) != errs.Internal { // it is ours: a client that still sends must live to read it
			io.Copy(io.Discard, from) //nolint:errcheck // the answer is what it is
			return nil, nil, err
		}
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return nil, nil, bodyTooLarge()
		}
		return nil, nil, errs.Wrap(err, errs.Invalid, "the request body could not be read completely; send it again")
	}
	http.NewResponseController(w).SetReadDeadline(time.Time{}) //nolint:errcheck // a recorder in a test has none
	return b, sync.OnceFunc(s.leave), nil
}

func bodyTooLarge() error {
	return httperr.New(http.StatusRequestEntityTooLarge, "SANDBOX::INVALID_PARAMETER", errs.Invalid,
		"the body is larger than %d MiB; put data into the sandbox through its files API instead", maxBody>>20)
}

// A share is what one body has of the budget of all bodies.
type share struct {
	of   *semaphore.Weighted
	held int64
}

// read reads from to its end. What is refused is refused before the rest of it takes memory.
func (s *share) read(w http.ResponseWriter, r *http.Request, from io.Reader) ([]byte, error) {
	var shape spec.Shape
	b := make([]byte, 0, 512)
	for {
		if len(b) == cap(b) {
			size := min(2*cap(b), maxBody+1) // one more, to read the end of the largest into
			if err := s.grow(w, r, size); err != nil {
				return nil, err
			}
			b = append(make([]byte, 0, size), b...)
		}
		n, err := from.Read(b[len(b):cap(b)])
		if err := shape.Add(b[len(b) : len(b)+n]); err != nil {
			return nil, err
		}
		switch b = b[:len(b)+n]; {
		case err == io.EOF:
			return b, nil
		case err != nil:
			return nil, err
		}
	}
}

// grow takes what a body of size bytes needs of the budget beyond what it has. Bodies that wait for
// one another all have bodyWait at most, so none of them waits for ever.
func (s *share) grow(w http.ResponseWriter, r *http.Request, size int) error {
	more := int64(size) - freeBody - s.held
	if more <= 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), bodyWait)
	defer cancel()
	if err := s.of.Acquire(ctx, more); err != nil {
		if err := r.Context().Err(); err != nil {
			return err
		}
		return errs.Retry(errs.New(errs.Unavailable, "the daemon reads other large bodies just now, and has no room for one of more than "+
			"%d KiB; send it again in a moment, and large ones one after another", freeBody>>10), bodyWait)
	}
	if s.held == 0 {
		http.NewResponseController(w).SetReadDeadline(time.Now().Add(largeTime)) //nolint:errcheck // a recorder in a test has none
	}
	s.held += more
	return nil
}

// leave gives the share back.
func (s *share) leave() {
	s.of.Release(s.held)
	s.held = 0
}
