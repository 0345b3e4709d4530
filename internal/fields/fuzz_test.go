package fields

import (
	"bytes"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// FuzzUnknown: a body has unknown fields where encoding/json says so, and they are told in
// a header of a bounded size.
func FuzzUnknown(f *testing.F) {
	f.Add([]byte(`{"Timeout":1,"image":{"Y":1},"id":"x","envs":{}}`))
	f.Add([]byte(`{"\u0131d":1,"\u017f":2,"deep":"x","Hidden":1,"unseen":1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var v request
		names, typo, meant := Unknown(b, &v)
		var sent map[string]json.RawMessage
		if json.Unmarshal(b, &sent) != nil {
			if names != nil {
				t.Fatalf("%q has %q", b, names)
			}
			return
		}
		for name := range sent {
			d := json.NewDecoder(strings.NewReader(`{` + string(quoted(t, name)) + `:null}`))
			d.DisallowUnknownFields()
			if err := d.Decode(&v); (err != nil) != slices.Contains(names, name) {
				t.Fatalf("%q of %q: %v, and the unknown are %q", name, b, err, names)
			}
		}
		if typo != "" && (!slices.Contains(names, typo) || !slices.Contains(knownBy(&v), meant)) {
			t.Fatalf("%q is said to mean %q", typo, meant)
		}
		h := http.Header{}
		Tell(h, names)
		odd := func(r rune) bool { return r < ' ' || r > '~' }
		if got := h.Get(Header); len(got) > (maxNames+1)*(3*maxName+2) || strings.ContainsFunc(got, odd) {
			t.Fatalf("%q", got)
		}
	})
}

func quoted(t *testing.T, s string) []byte {
	t.Helper()
	b, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.TrimSpace(b)
}
