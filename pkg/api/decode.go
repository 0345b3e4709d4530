package api

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Limits of a request (hardening.md §3, row "API").
const (
	maxBody     = 16 << 20
	maxDepth    = 100
	maxEnv      = 1000
	maxEnvBytes = 1 << 20
	maxLabels   = 64
	maxAllow    = 1024        // rules of sandboxd.allow
	maxPolicy   = 1 << 20     // bytes of networkPolicy that are kept
	maxExts     = 64          // extensions
	maxExtBytes = 64 << 10    // of all of them, sandboxd.allow among them
	maxArgs     = 1000        // of an entrypoint
	maxArgBytes = 128 << 10   // of all of them; no program takes a longer one
	bodyTime    = time.Minute // to send a body of maxBody
)

// decode reads one JSON value of bounded size and depth. Unknown fields are
// ignored, as OpenSandbox does; wrong types are not.
func decode(w http.ResponseWriter, r *http.Request, v any) error {
	b, err := readBody(w, r)
	if err != nil {
		return err
	}
	return unmarshal(b, v)
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

func unmarshal(b []byte, v any) error {
	if !shallow(b) {
		return httperr.Invalid("the JSON body is nested deeper than %d levels; no request needs that", maxDepth)
	}
	err := json.Unmarshal(b, v)
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		field := e.Field
		if field == "" {
			field = "the body"
		}
		return httperr.Invalid("%s: got a JSON %s where a %s is wanted", httperr.Clip(field, 80), httperr.Clip(e.Value, 40), jsonName(e.Type.Kind().String()))
	}
	if e, ok := errors.AsType[*json.SyntaxError](err); ok {
		if len(b) == 0 {
			return httperr.Invalid("the body is empty; a JSON object is wanted")
		}
		return httperr.Invalid("the body is not JSON: %s, at byte %d", httperr.Clip(e.Error(), 80), e.Offset)
	}
	return httperr.Invalid("the body is not JSON of the wanted shape")
}

// jsonName says what JSON calls a kind of Go.
func jsonName(kind string) string {
	switch kind {
	case "int64", "int", "float64":
		return "whole number"
	case "map", "struct", "ptr":
		return "JSON object"
	case "slice":
		return "JSON array"
	case "bool":
		return "boolean"
	}
	return kind
}

// shallow reports whether b nests at most maxDepth deep.
func shallow(b []byte) bool {
	depth, inString, escaped := 0, false, false
	for _, c := range b {
		switch {
		case escaped:
			escaped = false
		case inString:
			escaped, inString = c == '\\', c != '"'
		case c == '"':
			inString = true
		case c == '{' || c == '[':
			if depth++; depth > maxDepth {
				return false
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return true
}
