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

// Bounds of the shape of a body.
const (
	maxDepth = 100 // decoding recurses
	// maxValues is how many values a body may have. Each takes up to 200 bytes when it is decoded, also
	// an empty one of 3 bytes. The largest lists are the rules of policies (maxRules), a few values each.
	maxValues = 200_000
)

// Decode reads one JSON value into v. It ignores unknown fields and refuses wrong types by
// the name of the field.
func Decode(b []byte, v any) error {
	if err := new(Shape).Add(b); err != nil {
		return err
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

// A Shape is what is counted of a body as its bytes arrive, so that one that no request needs is
// refused before it takes memory. The zero value is that of a body of which nothing has come yet.
type Shape struct {
	depth, values     int
	inString, escaped bool
}

// Add counts the next part b of the body.
func (s *Shape) Add(b []byte) error {
	if weak.Off(weak.Bodies) {
		return nil
	}
	for _, c := range b {
		switch {
		case s.escaped:
			s.escaped = false
		case s.inString:
			s.escaped, s.inString = c == '\\', c != '"'
		case c == '"':
			s.inString = true
		case c == '{' || c == '[':
			s.depth++
			s.values++
		case c == '}' || c == ']':
			s.depth--
		case c == ',':
			s.values++
		}
		if s.depth > maxDepth {
			return httperr.Invalid("the JSON body is nested deeper than %d levels; no request needs that", maxDepth)
		}
		if s.values > maxValues {
			return httperr.Invalid("the lists and objects of the JSON body have more than %d values together; no request needs that; "+
				"send fewer", maxValues)
		}
	}
	return nil
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
