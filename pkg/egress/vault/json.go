package vault

import (
	"bytes"
	"encoding/json"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A reader reads JSON strictly: no field that is not known, none twice, none in another case,
// nothing after the end, and only valid Unicode. null is the same as absent.
//
// Its errors say where, as "credentials[2].source.value". They quote nothing of the JSON but
// names of fields, and those not in a source: a client that has mixed up the two writes the
// value there.
type reader struct{ d *json.Decoder }

// invalid is an error about the place at of the JSON.
func invalid(at, format string, args ...any) error {
	if at = strings.TrimPrefix(at, "."); at != "" {
		at += ": "
	}
	return errs.New(errs.Invalid, "credential vault: "+at+format, args...)
}

// read reads the object data with the fields f.
func read(data []byte, f func(*reader) fields) error {
	if len(data) > MaxSize {
		return invalid("", "the request has %d bytes; at most %d are allowed", len(data), MaxSize)
	}
	if !utf8.Valid(data) {
		return invalid("", "the request is not UTF-8")
	}
	r := &reader{json.NewDecoder(bytes.NewReader(data))}
	r.d.UseNumber()
	present, err := r.object("", f(r))
	switch {
	case err != nil:
		return err
	case !present:
		return invalid("", "want an object, not null")
	}
	if _, err := r.d.Token(); err != io.EOF {
		return invalid("", "there is data after the object, at byte %d", r.d.InputOffset())
	}
	return nil
}

// token reads a token. The text of an error of encoding/json is not passed on.
func (r *reader) token(at string) (json.Token, error) {
	tok, err := r.d.Token()
	if err != nil {
		return nil, invalid(at, "the request is not valid JSON at byte %d", r.d.InputOffset())
	}
	return tok, nil
}

// fields are what reads the fields of an object, by name.
type fields map[string]func(at string) error

// object reads an object. It is not present if it is null.
func (r *reader) object(at string, f fields) (present bool, err error) {
	tok, err := r.token(at)
	if err != nil || tok == nil {
		return false, err
	}
	if tok != json.Delim('{') {
		return false, invalid(at, "want an object")
	}
	seen := map[string]bool{}
	for r.d.More() {
		tok, err := r.token(at)
		if err != nil {
			return false, err
		}
		name, _ := tok.(string) // the decoder takes nothing else
		field, ok := f[name]
		switch {
		case !ok && strings.HasSuffix(at, ".source"):
			return false, invalid(at, "it has an unknown field; want %s", f.names())
		case !ok:
			return false, invalid(at, "unknown field %q; want %s", short(name), f.names())
		case seen[name]:
			return false, invalid(at, "the field %q stands there twice", name)
		}
		seen[name] = true
		if err := field(at + "." + name); err != nil {
			return false, err
		}
	}
	_, err = r.token(at)
	return true, err
}

func (f fields) names() string { return strings.Join(sortedKeys(f), ", ") }

// array reads an array of at most limit elements.
func (r *reader) array(at string, limit int, each func(at string) error) error {
	tok, err := r.token(at)
	if err != nil || tok == nil {
		return err
	}
	if tok != json.Delim('[') {
		return invalid(at, "want an array")
	}
	for i := 0; r.d.More(); i++ {
		if i == limit {
			return invalid(at, "it has more than %d elements", limit)
		}
		if err := each(at + "[" + strconv.Itoa(i) + "]"); err != nil {
			return err
		}
	}
	_, err = r.token(at)
	return err
}

// text reads a string into p.
func (r *reader) text(p *string) func(at string) error {
	var set bool
	return r.said(p, &set)
}

// said reads a string into p. set tells whether there was one.
func (r *reader) said(p *string, set *bool) func(at string) error {
	return func(at string) error {
		tok, err := r.token(at)
		if err != nil || tok == nil {
			return err
		}
		s, ok := tok.(string)
		if !ok {
			return invalid(at, "want a string")
		}
		if strings.ContainsRune(s, utf8.RuneError) { // what encoding/json makes of a broken \u escape
			return invalid(at, "it has half of a \\u escape, or U+FFFD")
		}
		*p, *set = s, true
		return nil
	}
}

// texts reads an array of strings into p.
func (r *reader) texts(p *[]string, limit int) func(at string) error {
	return func(at string) error {
		return r.array(at, limit, func(at string) error {
			var s string
			if err := r.text(&s)(at); err != nil {
				return err
			}
			*p = append(*p, s)
			return nil
		})
	}
}

// number reads a whole number. set tells whether there was one.
func (r *reader) number(p *int64, set *bool) func(at string) error {
	return func(at string) error {
		tok, err := r.token(at)
		if err != nil || tok == nil {
			return err
		}
		n, ok := tok.(json.Number)
		if !ok {
			return invalid(at, "want a whole number")
		}
		if *p, err = strconv.ParseInt(n.String(), 10, 64); err != nil {
			return invalid(at, "want a whole number")
		}
		*set = true
		return nil
	}
}

// short is s, shortened for an error: a client may send any length.
func short(s string) string { return s[:min(len(s), 80)] }
