package api

import (
	"net/http"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestInsecureIsNotForPages: where no key is asked for, a page that somebody
// looks at who can connect gets nothing done, nor by another name for us.
func TestInsecureIsNotForPages(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.APIKeys, c.Insecure, c.ExternalHost = nil, true, "Boxes.example:8443/lab" })
	here := strings.TrimPrefix(w.url, "http://")
	sb := w.do("POST", "/v1/sandboxes", createBody, wire.HeaderAPIKey, "").sandbox(t)
	agent := "/v1/sandboxes/" + sb.ID + "/proxy/44772/command"
	for _, c := range []struct {
		host, origin string
		want         int
	}{
		{here, "", 200},
		{here, "http://" + here, 200},
		{"localhost", "", 200},
		{"LOCALHOST.:8080", "", 200},
		{"x.localhost:1", "", 200},
		{"[::1]:8080", "", 200},
		{"203.0.113.9", "", 200},
		{"boxes.example", "", 200},
		{"boxes.example:8443", "https://boxes.example:8443", 200},
		{"10.0.0.1:80", "https://boxes.example:8443", 200}, // through a reverse proxy
		{"evil.example", "", 403},
		{"evil.example:8080", "http://evil.example:8080", 403},
		{"localhost.evil.example", "", 403},
		{"notlocalhost", "", 403},
		{here, "http://evil.example", 403},
		{here, "http://127.0.0.1:1", 403},
		{here, "null", 403},
		{here, "%", 403},
	} {
		for _, to := range []struct{ method, path string }{{"GET", "/v1/sandboxes"}, {"POST", agent}} {
			req, err := http.NewRequest(to.method, w.url+to.path, strings.NewReader(""))
			if err != nil {
				t.Fatal(err)
			}
			req.Host = c.host
			if c.origin != "" {
				req.Header.Set("Origin", c.origin)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != c.want {
				t.Errorf("%s as %q from %q: %s, want %d", to.path, c.host, c.origin, resp.Status, c.want)
			}
			if v := resp.Header.Get("Access-Control-Allow-Origin"); v != "" {
				t.Errorf("%s as %q from %q: allows %q", to.path, c.host, c.origin, v)
			}
		}
	}
	a := w.do("GET", "/v1/sandboxes", "", wire.HeaderAPIKey, "", "Origin", "http://evil.example")
	if e := a.error(t); !strings.Contains(e.Message, "web pages") {
		t.Errorf("the refusal says %q", e.Message)
	}
}
