package auth

import (
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// FuzzGuard: where no key is asked for, only a name that no web page can have is served;
// and a header that opens the API is one that no guest is shown.
func FuzzGuard(f *testing.F) {
	const key, external = "0123456789abcdef", "api.example.com:8080"
	f.Add("127.0.0.1:8080", "http://127.0.0.1:8080", "Bearer "+key)
	f.Add("API.example.com.", "http://api.example.com:8080", key)
	f.Add("[::1]", "null", "bearer   "+key+" ")
	f.Add("evil.localhost.example.com", "", "Basic "+key)
	open, err := New(Config{Insecure: true, ExternalHost: external + "/path"})
	if err != nil {
		f.Fatal(err)
	}
	closed, err := New(Config{Keys: []string{key}})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, host, origin, header string) {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Host = host
		if origin != "" {
			r.Header.Set("Origin", origin)
		}
		if err := open.foreign(r); err == nil {
			u, err := url.Parse("http://" + host)
			if err != nil {
				return // net/http refuses it
			}
			name := strings.ToLower(strings.TrimSuffix(u.Hostname(), "."))
			_, perr := netip.ParseAddr(name)
			if perr != nil && name != "localhost" && !strings.HasSuffix(name, ".localhost") && name != "api.example.com" && u.Host == host {
				t.Fatalf("a page at %q may call", host)
			}
			o, err := url.Parse(origin)
			if origin != "" && (err != nil || !strings.EqualFold(o.Host, host) && !strings.EqualFold(o.Host, external)) {
				t.Fatalf("a page of %q may call %q", origin, host)
			}
		} else if len(err.Error()) > 1000 {
			t.Fatalf("a refusal of %d bytes", len(err.Error()))
		}
		for _, name := range []string{wire.HeaderAPIKey, wire.HeaderAPIKeyOther, "Authorization"} {
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			r.Header.Set(name, header)
			if _, role, _ := closed.WhoIs(r); role != "" && !closed.Holds(header) || role != "" && !strings.Contains(header, key) {
				t.Fatalf("%s: %q has the role %s", name, header, role)
			}
		}
	})
}
