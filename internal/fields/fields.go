// Package fields finds the fields of a JSON object that the struct it was decoded into
// does not have. encoding/json ignores them, and so must a server whose clients may be
// newer than it is. But a client that has misspelled a name wants to know.
package fields

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
)

// Header names the unknown fields of a request in its answer.
const Header = "Sandboxd-Unknown-Fields"

// Bounds of what Header repeats of a request.
const (
	maxNames = 16
	maxName  = 64 // bytes
)

// Unknown returns the names at the top of the object b that the struct to which v points
// does not have, sorted. typo is the first of them that is one edit away from a field
// which b lacks, and meant is that field; both are "" if there is none. There are no
// unknown names if b is no object, or if v is no such pointer or decodes itself.
//
// Like encoding/json, Unknown takes upper case for lower case.
func Unknown(b []byte, v any) (names []string, typo, meant string) {
	known := knownBy(v)
	var sent map[string]json.RawMessage
	if known == nil || json.Unmarshal(b, &sent) != nil {
		return nil, "", ""
	}
	absent := map[string]string{}
	for _, k := range known {
		absent[strings.ToLower(k)] = k
	}
	for _, name := range slices.Sorted(maps.Keys(sent)) {
		lower := strings.ToLower(name)
		if slices.ContainsFunc(known, func(k string) bool { return strings.EqualFold(k, name) }) {
			delete(absent, lower)
		} else {
			names = append(names, name)
		}
	}
	left := slices.Sorted(maps.Keys(absent))
	for _, name := range names { // there may be a million
		lower := strings.ToLower(name)
		for _, k := range left {
			if Near(lower, k) {
				return names, name, absent[k]
			}
		}
	}
	return names, "", ""
}

// knownBy returns the names that encoding/json decodes into v.
func knownBy(v any) (names []string) {
	if _, itself := v.(json.Unmarshaler); itself {
		return nil
	}
	t := reflect.TypeOf(v)
	if t == nil || t.Kind() != reflect.Pointer || t.Elem().Kind() != reflect.Struct {
		return nil
	}
	for _, f := range reflect.VisibleFields(t.Elem()) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-", !f.IsExported(), f.Anonymous && name == "":
		case name != "":
			names = append(names, name)
		default:
			names = append(names, f.Name)
		}
	}
	return names
}

// Near reports whether a becomes b when one letter is added, left out or replaced, or
// when two neighbours change places.
func Near(a, b string) bool {
	if len(a) > len(b) {
		a, b = b, a
	}
	same := 0
	for same < len(a) && a[same] == b[same] {
		same++
	}
	a, b = a[same:], b[same:]
	switch len(b) - len(a) {
	case 0:
		return len(a) > 0 && (a[1:] == b[1:] || len(a) > 1 && a[0] == b[1] && a[1] == b[0] && a[2:] == b[2:])
	case 1:
		return a == b[1:]
	}
	return false
}

// Tell names fields in the header of an answer, escaped as in a query, behind those that it has.
func Tell(h http.Header, names []string) {
	if len(names) == 0 {
		return
	}
	var all []string
	if before := h.Get(Header); before != "" {
		all = append(all, before)
	}
	for _, n := range names[:min(len(names), maxNames)] {
		all = append(all, url.QueryEscape(n[:min(len(n), maxName)]))
	}
	if len(names) > maxNames {
		all = append(all, "...")
	}
	h.Set(Header, strings.Join(all, ", "))
}
