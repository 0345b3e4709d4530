package api

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
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
		{here, "http://" + here, 403}, // a guest's page: there are no others here
		{"localhost", "", 200},
		{"LOCALHOST.:8080", "", 200},
		{"x.localhost:1", "", 200},
		{"[::1]:8080", "", 200},
		{"203.0.113.9", "", 200},
		{"boxes.example", "", 200},
		{"boxes.example:8443", "https://boxes.example:8443", 403},
		{"10.0.0.1:80", "https://boxes.example:8443", 403}, // through a reverse proxy
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

// TestInsecureIsNotForGuestsPages: a page that a guest serves has the origin of
// the API. It gets on with its own port, and nothing else.
func TestInsecureIsNotForGuestsPages(t *testing.T) {
	for _, public := range []bool{true, false} {
		w := newWorld(t, func(c *Config) { c.APIKeys, c.Insecure = nil, true })
		w.url = w.serve("tcp", "127.0.0.1:0", auth.Listener{PublicPorts: public})
		app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Service-Worker-Allowed", "/")
			rw.Header().Set("Clear-Site-Data", `"*"`)
			rw.Header().Set("Strict-Transport-Security", "max-age=1")
			rw.Header().Set("X-Of-The-Guest", "1")
			rw.Header().Set("Content-Security-Policy", "script-src *")
		}))
		defer app.Close()
		w.app = app.Listener
		sb := w.do("POST", "/v1/sandboxes", createBody, wire.HeaderAPIKey, "").sandbox(t)
		at := "/sandboxes/" + sb.ID + "/proxy/"
		const browser = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
		page := w.url + at + "8000/"
		for name, c := range map[string]struct {
			headers []string
			api     bool // the API answers it
		}{
			"typed":           {[]string{"User-Agent", browser, "Sec-Fetch-Site", "none", "Sec-Fetch-Mode", "navigate"}, true},
			"fetched":         {[]string{"User-Agent", browser, "Sec-Fetch-Site", "same-origin"}, false},
			"of another site": {[]string{"User-Agent", browser, "Sec-Fetch-Site", "cross-site"}, false},
			"of another port": {[]string{"User-Agent", browser, "Sec-Fetch-Site", "same-site"}, false},
			"posted":          {[]string{"User-Agent", browser, "Origin", w.url}, false},
			"by plain HTTP":   {[]string{"User-Agent", browser}, false},
			"with a referrer": {[]string{"User-Agent", "x", "Referer", page}, false},
			"curl":            {[]string{"User-Agent", "curl/8"}, true},
		} {
			headers := append([]string{wire.HeaderAPIKey, ""}, c.headers...)
			want := map[bool]int{true: 200, false: 403}[c.api]
			for _, to := range []struct{ method, path string }{
				{"GET", "/v1/sandboxes"},
				{"GET", "/sandboxes/" + sb.ID + "/endpoints/44772"},
				{"GET", "/version"},
				{"GET", at + "44772/ping"},
				{"POST", "/v1" + at + "44772/command"},
			} {
				if a := w.do(to.method, to.path, "", headers...); a.StatusCode != want {
					t.Errorf("public=%v: %s %s, %s: %s, want %d", public, to.method, to.path, name, a.Status, want)
				}
			}
			token := append(headers, wire.HeaderAgentToken, "agent-token")
			if a := w.do("GET", at+"44772/ping", "", token...); a.StatusCode != want {
				t.Errorf("public=%v: the agent with its token, %s: %s, want %d", public, name, a.Status, want)
			}
			for _, method := range []string{"GET", "POST"} {
				a := w.do(method, at+"8000/x", "", headers...)
				if a.StatusCode != 200 || a.Header.Get("X-Of-The-Guest") == "" {
					t.Errorf("public=%v: the guest's own port, %s %s: %s", public, method, name, a.Status)
				}
				if v := a.Header.Values("Content-Security-Policy"); !slices.Equal(v, []string{"script-src *", "sandbox"}) {
					t.Errorf("public=%v: the guest's page has the policies %q", public, v)
				}
				for _, k := range []string{"Service-Worker-Allowed", "Clear-Site-Data", "Strict-Transport-Security"} {
					if v := a.Header.Get(k); v != "" {
						t.Errorf("a guest says %s: %s", k, v)
					}
				}
			}
		}
	}
}

// TestSandboxedPages: pages are kept from the API's origin where that asks for no key,
// the agent's too, and nowhere else.
func TestSandboxedPages(t *testing.T) {
	app := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer app.Close()
	w := newWorld(t, func(c *Config) { c.APIKeys, c.Insecure = nil, true })
	w.app = app.Listener
	id := w.do("POST", "/v1/sandboxes", createBody, wire.HeaderAPIKey, "").sandbox(t).ID
	policy := func(path, key string) string {
		t.Helper()
		a := w.do("GET", path, "", wire.HeaderAPIKey, key)
		if a.StatusCode != http.StatusOK {
			t.Errorf("%s: %s %s", path, a.Status, a.body)
		}
		return a.Header.Get("Content-Security-Policy")
	}
	for _, path := range []string{"/sandboxes/" + id + "/proxy/8000/", "/v1/sandboxes/" + id + "/proxy/44772/ping"} {
		if got := policy(path, ""); got != "sandbox" {
			t.Errorf("%s: policy %q", path, got)
		}
	}
	api := w.url
	w.url = w.serve("tcp", "127.0.0.1:0", auth.Listener{Gateway: true, PublicPorts: true})
	if got := policy("/"+id+"/8000/", ""); got != "" {
		t.Errorf("at the gateway: policy %q", got)
	}
	w.url = api
	if a := w.do("POST", "/v1/keys", `{"name":"first","role":"admin"}`, wire.HeaderAPIKey, ""); a.StatusCode != http.StatusCreated {
		t.Fatalf("%s %s", a.Status, a.body)
	} else {
		var k wire.NewKey
		if err := json.Unmarshal(a.body, &k); err != nil {
			t.Fatal(err)
		}
		if got := policy("/sandboxes/"+id+"/proxy/8000/", k.Secret); got != "" {
			t.Errorf("with a key: policy %q", got)
		}
	}
}

// TestInsecureSecureAccess: what was made so asks for its token where no key is asked
// for, too. The agent and the API do not: they are everybody's there.
func TestInsecureSecureAccess(t *testing.T) {
	app := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer app.Close()
	w := newWorld(t, func(c *Config) { c.APIKeys, c.Insecure = nil, true })
	w.app = app.Listener
	sb := w.do("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"secureAccess":true}`,
		wire.HeaderAPIKey, "").sandbox(t)
	at := "/sandboxes/" + sb.ID + "/proxy/"
	var e wire.Endpoint
	if err := json.Unmarshal(w.do("GET", "/v1/sandboxes/"+sb.ID+"/endpoints/8000", "", wire.HeaderAPIKey, "").body, &e); err != nil {
		t.Fatal(err)
	}
	token := e.Headers[wire.HeaderSecureAccess]
	for _, public := range []bool{false, true} {
		w.url = w.serve("tcp", "127.0.0.1:0", auth.Listener{PublicPorts: public})
		for name, c := range map[string]struct {
			path    string
			headers []string
			want    int
		}{
			"nothing":            {at + "8000/", nil, 401},
			"a wrong token":      {at + "8000/", []string{wire.HeaderSecureAccess, "x"}, 401},
			"the token":          {at + "8000/", []string{wire.HeaderSecureAccess, token}, 200},
			"the token, queried": {at + "8000/?sandboxd_token=" + token, nil, 200},
			"of another port":    {at + "8001/", []string{wire.HeaderSecureAccess, token}, 401},
			"the agent":          {at + "44772/ping", nil, 200},
			"the egress API":     {at + "18080/policy", nil, 200},
		} {
			if a := w.do("GET", c.path, "", append([]string{wire.HeaderAPIKey, ""}, c.headers...)...); a.StatusCode != c.want {
				t.Errorf("public=%v, %s: %s %s, want %d", public, name, a.Status, a.body, c.want)
			}
		}
	}
}
