package spec

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
)

// maxDepth is how deep a body may nest. Decoding recurses.
const maxDepth = 100

// Decode reads one JSON value into v. It ignores unknown fields and refuses wrong types by
// the name of the field.
func Decode(b []byte, v any) error {
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
		return httperr.Invalid("%s: got a JSON %s, want a %s", httperr.Clip(field, 80), httperr.Clip(e.Value, 40),
			jsonName(e.Type.Kind().String()))
	}
	if e, ok := errors.AsType[*json.SyntaxError](err); ok {
		if len(b) == 0 {
			return httperr.Invalid("the body is empty; send a JSON object")
		}
		return httperr.Invalid("the body is not JSON: %s, at byte %d", httperr.Clip(e.Error(), 80), e.Offset)
	}
	return httperr.Invalid("the body does not have the JSON structure of this request")
}

// jsonName is the JSON name of a kind of Go.
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
	if weak.Off(weak.Bodies) {
		return true
	}
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

// ParseTime reads RFC 3339; a time without a zone is UTC.
func ParseTime(v string) (time.Time, error) {
	t, err := time.Parse(time.RFC3339Nano, v)
	if err != nil {
		t, err = time.Parse("2006-01-02T15:04:05.999999999", v)
	}
	return t, err
}

// ParseBool reads a boolean of a query. It also takes Python's True and False.
func ParseBool(v string) (bool, error) { return strconv.ParseBool(strings.ToLower(v)) }
