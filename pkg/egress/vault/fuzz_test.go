package vault

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// others is v with other values: what is shown of it must be the same.
func others(v *Vault) *Vault {
	out := &Vault{v.revision, map[string]*Credential{}, v.bindings}
	for name, c := range v.credentials {
		other := *c
		other.Source.Value, other.Source.Path, other.Source.Argv, other.Placeholder = NewSecret("?"), "?", nil, "?"
		out.credentials[name] = &other
	}
	return out
}

// checkVault holds for every vault.
func checkVault(t *testing.T, v *Vault) {
	t.Helper()
	again, err := Decode(v.Encode())
	if err != nil || !reflect.DeepEqual(again, v) {
		t.Fatalf("%s comes back as\n%v, %v", v.Encode(), again, err)
	}
	shown, err := json.Marshal(v.State())
	hidden, _ := json.Marshal(others(v).State())
	if s := v.State(); err != nil || string(shown) != string(hidden) || s.Credentials == nil || s.Bindings == nil {
		t.Fatalf("state %s, with other values %s, %v", shown, hidden, err)
	}
	for _, b := range v.State().Bindings {
		if m := b.Match; len(m.Schemes) == 0 || len(m.Hosts) == 0 || len(m.Methods) == 0 || len(m.Paths) == 0 {
			t.Fatalf("an empty list: %s", shown)
		}
	}
	if v.size() > MaxSize || len(v.credentials) > MaxCredentials || len(v.bindings) > MaxBindings {
		t.Fatalf("%d bytes, %d credentials, %d bindings", v.size(), len(v.credentials), len(v.bindings))
	}
	for _, b := range v.Bindings() {
		for _, h := range b.Auth.Headers {
			value := v.credentials[h.Credential].Source.Value.Reveal()
			if strings.ContainsAny(value, "\r\n\x00") || strings.ContainsAny(h.Name, ": \r\n\x00") || h.Name == "" || h.Name == "Host" {
				t.Fatalf("a header %q: %q", h.Name, value)
			}
		}
	}
}

// checkError holds for every error about data, which has secretMark in values only.
func checkError(t *testing.T, data []byte, err error) {
	t.Helper()
	switch code := errs.CodeOf(err); {
	case code != errs.Invalid && code != errs.WrongState && code != errs.Denied:
		t.Fatalf("%q: %v of code %s", data, err, code)
	case strings.Contains(err.Error(), secretMark) && strings.Count(string(data), secretMark) == strings.Count(string(data), `"value":"`+secretMark):
		t.Fatalf("%q: %v", data, err)
	case len(err.Error()) > 2000:
		t.Fatalf("an error of %d bytes", len(err.Error()))
	}
}

// FuzzParse: what a client may create is JSON for encoding/json too, with the same names, is
// stored and read back the same, and shows no value. An error is the client's, and quotes none.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{}`), false)
	f.Add([]byte(vaultOf(bearer("b", `{"hosts":["*.example.com"],"paths":["/v1/*","/ü%2F*x"],"methods":["GET"]}`))), false)
	f.Add([]byte(vaultOf(withAuth(`{"type":"customHeaders","headers":[{"name":"X-A","credential":"token"}],"substitutions":[
		{"credential":"basic","placeholder":"{{TOKEN}}","in":["path","body"]}]}`))), false)
	f.Add([]byte(`{"credentials":[{"name":"c","source":{"type":"inline","value":"sEcr3T-\u0000"}}]}`), false)
	f.Add([]byte(`{"credentials":[{"name":"f","source":{"type":"command","argv":["/x","y"],"cacheSeconds":5}}]}`), true)
	f.Fuzz(func(t *testing.T, data []byte, trusted bool) {
		v, err := create(data, trusted)
		if err != nil {
			checkError(t, data, err)
			return
		}
		checkVault(t, v)
		var other struct{ Credentials, Bindings []struct{ Name string } }
		if err := json.Unmarshal(data, &other); err != nil {
			t.Fatalf("%q is a vault, and not JSON: %v", data, err)
		}
		if len(other.Credentials) != len(v.credentials) || len(other.Bindings) != len(v.bindings) || v.revision != 1 {
			t.Fatalf("%q: %+v", data, v.State())
		}
		for _, c := range other.Credentials {
			if got := v.Credential(c.Name); got == nil || !trusted && got.Source.Type != Inline {
				t.Fatalf("%q: %q is %v", data, c.Name, got)
			}
		}
	})
}

// FuzzPatch: a patch does what its lists say, one name after the other, or nothing.
func FuzzPatch(f *testing.F) {
	base := vaultOf(bearer("a", `{"hosts":["a.example.com"]}`), bearer("b", `{"hosts":["b.example.com"],"paths":["/v1/*"]}`))
	f.Add([]byte(`{"expectedRevision":1,"credentials":{"add":[` + credential("new", secretMark) + `],"delete":["basic"]}}`))
	f.Add([]byte(`{"bindings":{"delete":["a"],"replace":[` + bearer("b", `{"hosts":["a.example.com"]}`) + `]}}`))
	f.Add([]byte(`{"credentials":{"replace":[` + credential("token", secretMark+"x") + `],"delete":["token"]}}`))
	f.Add([]byte(`{"bindings":{"add":[` + bearer("c", `{"hosts":["b.example.com"],"paths":["/*/x"]}`) + `]}}`))
	v, err := Create([]byte(base))
	if err != nil {
		f.Fatal(err)
	}
	before := string(v.Encode())
	f.Fuzz(func(t *testing.T, data []byte) {
		next, err := v.Patch(data)
		if string(v.Encode()) != before {
			t.Fatalf("%q has changed the vault that it was for", data)
		}
		if err != nil {
			checkError(t, data, err)
			return
		}
		checkVault(t, next)
		type list struct {
			Add, Replace []struct{ Name string }
			Delete       []string
		}
		var other struct{ Credentials, Bindings list }
		if err := json.Unmarshal(data, &other); err != nil || next.revision != v.revision+1 {
			t.Fatalf("%q: revision %d, %v", data, next.revision, err)
		}
		want := func(old []string, l list) []string {
			names := map[string]bool{}
			for _, n := range old {
				names[n] = true
			}
			for _, n := range l.Delete {
				delete(names, n)
			}
			for _, n := range append(l.Add, l.Replace...) {
				names[n.Name] = true
			}
			return slices.Sorted(maps.Keys(names))
		}
		if got := sortedKeys(next.credentials); !slices.Equal(got, want(sortedKeys(v.credentials), other.Credentials)) {
			t.Fatalf("%q: credentials %q", data, got)
		}
		if got := sortedKeys(next.bindings); !slices.Equal(got, want(sortedKeys(v.bindings), other.Bindings)) {
			t.Fatalf("%q: bindings %q", data, got)
		}
		for _, c := range next.Credentials() {
			written := slices.ContainsFunc(append(other.Credentials.Add, other.Credentials.Replace...), func(n struct{ Name string }) bool {
				return n.Name == c.Name
			})
			if (c.Revision == next.revision) != written || !written && v.Credential(c.Name) != c {
				t.Fatalf("%q: %q has revision %d of %d", data, c.Name, c.Revision, next.revision)
			}
		}
	})
}
