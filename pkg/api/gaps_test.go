package api

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestAliasIsEchoed: a client sees the name it sent, and an operator what it meant.
func TestAliasIsEchoed(t *testing.T) {
	w := newWorld(t)
	sb := w.do("POST", "/v1/sandboxes", `{"image":{"uri":"python:3.11-slim"},"entrypoint":["x"],"resourceLimits":{}}`).sandbox(t)
	if got := w.do("GET", "/v1/sandboxes/"+sb.ID, "").sandbox(t); got.Image.URI != "python:3.11-slim" {
		t.Errorf("image %+v", got.Image)
	}
	var in wire.Inspection
	if a := w.do("GET", "/v1/sandboxes/"+sb.ID+"/inspect", ""); json.Unmarshal(a.body, &in) != nil ||
		in.Sandbox.Sandboxd.ImageName != "python:latest" || in.Image.URI != "python:3.11-slim" {
		t.Errorf("inspect %s", a.body)
	}
	w.set(sb.ID, func(r *record.Record) { r.Spec.ImageURI = "" }) // of a release before
	if got := w.do("GET", "/v1/sandboxes/"+sb.ID, "").sandbox(t); got.Image.URI != "python:latest" {
		t.Errorf("of a release before: %+v", got.Image)
	}
	if a := w.do("GET", "/v1/images", ""); !strings.Contains(string(a.body), `"aliases":["python:3*"]`) {
		t.Errorf("images %s", a.body)
	}
}

// TestRefusedByName: what would not do what it says is refused, and says so.
func TestRefusedByName(t *testing.T) {
	w := newWorld(t)
	const rest = `"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{}}`
	for body, want := range map[string][2]string{
		`{"templateId":"tpl_1","timeout":600}`:                                    {"FSB::API_NOT_SUPPORTED", "templateId"},
		`{"lifecycle":{"preStart":{"command":["true"]}},` + rest:                  {"SANDBOX::INVALID_PARAMETER", "preStart"},
		`{"lifecycle":{"periodic":[{"name":"a"}]},` + rest:                        {"SANDBOX::INVALID_PARAMETER", "periodic"},
		`{"env":{"OPENSANDBOX_LIFECYCLE":"{}"},` + rest:                           {"SANDBOX::INVALID_PARAMETER", "OPENSANDBOX_LIFECYCLE"},
		`{"env":{"OPENSANDBOX_EGRESS_TOKEN":"t"},` + rest:                         {"SANDBOX::INVALID_PARAMETER", "OPENSANDBOX_EGRESS_TOKEN"},
		`{"env":{"OPENSANDBOX_EGRESS_RULES":"{}"},` + rest:                        {"SANDBOX::INVALID_PARAMETER", "networkPolicy"},
		`{"env":{"OPENSANDBOX_EGRESS_MITMPROXY_SCRIPT":"x"},` + rest:              {"SANDBOX::INVALID_PARAMETER", "reserved"},
		`{"image":{"uri":"nginx:latest"},"entrypoint":["x"],"resourceLimits":{}}`: {"IMAGE::NOT_FOUND", "nginx:latest"},
	} {
		a := w.do("POST", "/v1/sandboxes", body)
		if e := a.error(t); a.StatusCode/100 != 4 || e.Code != want[0] || !strings.Contains(e.Message, want[1]) {
			t.Errorf("%s: %d %+v", body, a.StatusCode, e)
		}
	}
	if len(w.recs) > 0 {
		t.Errorf("%d sandboxes were made", len(w.recs))
	}
	if a := w.do("POST", "/v1/sandboxes", `{"lifecycle":null,"templateId":"",`+rest, "X-Lenient", "1"); a.StatusCode != 202 {
		t.Errorf("neither: %d %s", a.StatusCode, a.body)
	}
	for _, c := range [][2]string{{"POST", "/templates"}, {"GET", "/v1/templates"}, {"DELETE", "/v1/templates/tpl_1"}} {
		if a := w.do(c[0], c[1], ""); a.StatusCode != 400 || a.error(t).Code != "FSB::API_NOT_SUPPORTED" {
			t.Errorf("%s %s: %d %s", c[0], c[1], a.StatusCode, a.body)
		}
	}
}

// TestSettingsOfASidecar: OpenSandbox's server takes some settings of its egress sidecar
// from a creation. Here they are taken too, and do not become the guest's.
func TestSettingsOfASidecar(t *testing.T) {
	w := newWorld(t)
	sb := w.do("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"env":{"A":"b",`+
		`"OPENSANDBOX_EGRESS_LOG_LEVEL":"debug","OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT":"true"}}`).sandbox(t)
	if env := w.recs[sb.ID].Spec.Env; len(env) != 1 || env["A"] != "b" {
		t.Errorf("the guest gets %v", env)
	}
}

// TestVersionWithoutKey tells the release and nothing more.
func TestVersionWithoutKey(t *testing.T) {
	w := newWorld(t)
	if a := w.do("GET", "/version", "", wire.HeaderAPIKey, ""); a.StatusCode != 200 ||
		strings.TrimSpace(string(a.body)) != `{"version":"1"}` {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if a := w.do("GET", "/v1/version", ""); !strings.Contains(string(a.body), `"instance":"t"`) {
		t.Errorf("with the key: %s", a.body)
	}
}

// TestStart: the root of the API says where one is, to everybody.
func TestStart(t *testing.T) {
	w := newWorld(t)
	for _, p := range []string{"/", "/v1/"} {
		a := w.do("GET", p, "", wire.HeaderAPIKey, "")
		kind := a.Header.Get("Content-Type")
		if a.StatusCode != 200 || !strings.Contains(string(a.body), "/docs") || !strings.HasPrefix(kind, "text/plain") {
			t.Errorf("%s: %d %v %.100s", p, a.StatusCode, a.Header, a.body)
		}
	}
	if a := w.do("POST", "/", "{}"); a.StatusCode != 405 {
		t.Errorf("POST: %s", a.Status)
	}
}

// TestDocs: the page is open to everybody, and may do nothing.
func TestDocs(t *testing.T) {
	w := newWorld(t)
	for _, p := range []string{"/docs", "/v1/docs", "/docs/"} {
		a := w.do("GET", p, "", wire.HeaderAPIKey, "")
		if a.StatusCode != 200 || !strings.Contains(string(a.body), "renew-expiration") || !strings.HasPrefix(a.Header.Get("Content-Type"),
			"text/html") {
			t.Errorf("%s: %d %v %.100s", p, a.StatusCode, a.Header, a.body)
		}
		policy := a.Header.Get("Content-Security-Policy")
		if !strings.HasPrefix(policy, "default-src 'none'; style-src 'sha256-") || strings.Contains(policy, "unsafe") {
			t.Errorf("%s has the policy %s", p, policy)
		}
	}
	// printf body{} | openssl dgst -sha256 -binary | base64
	if got := styleOf([]byte("<style>body{}</style><style>p{}</style>")); got != "'sha256-fJgEClQWV1hGkK4qHMO0KotTsVnMYMXTq7/suurGyUo='" {
		t.Errorf("the sheet of a page is %s", got)
	}
}

// TestForwarded: an app hears from whom a request comes, and nobody but a
// trusted proxy says it in its place.
func TestForwarded(t *testing.T) {
	seen := make(chan http.Header, 1)
	app := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { seen <- r.Header }))
	defer app.Close()
	lies := []string{
		"X-Forwarded-For", "6.6.6.6", "X-Forwarded-Host", "evil", "X-Forwarded-Proto", "https", "X-Forwarded-Port", "1",
		"X-Forwarded-Prefix", "/x",
		"Forwarded", "for=6.6.6.6", "X-Real-Ip", "6.6.6.6", wire.HeaderAccessRenew, "skip",
	}
	for name, c := range map[string]struct {
		proxies []netip.Prefix
		want    string
	}{
		"a client":        {nil, "127.0.0.1|HOST|http||||"},
		"another's proxy": {[]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, "127.0.0.1|HOST|http||||"},
		"a proxy":         {[]netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, "6.6.6.6, 127.0.0.1|evil|https|1|/x|for=6.6.6.6|6.6.6.6"},
	} {
		w := newWorld(t, func(c2 *Config) { c2.TrustedProxies = c.proxies })
		w.app = app.Listener
		w.do("GET", "/sandboxes/"+w.create().ID+"/proxy/8000/", "", lies...)
		h := <-seen
		var got []string
		for _, k := range []string{
			"X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Port", "X-Forwarded-Prefix",
			"Forwarded", "X-Real-Ip",
		} {
			got = append(got, strings.Join(h[k], ","))
		}
		want := strings.Replace(c.want, "HOST", strings.TrimPrefix(w.url, "http://"), 1)
		if strings.Join(got, "|") != want || h.Get(wire.HeaderAccessRenew) != "" {
			t.Errorf("%s: the app hears %q, want %q", name, got, want)
		}
	}
}

// TestLocation: an app's redirects to itself stay within its prefix.
func TestLocation(t *testing.T) {
	var to string
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Location"] = []string{to}
		w.WriteHeader(http.StatusFound)
	}))
	defer app.Close()
	w := newWorld(t)
	w.app = app.Listener
	id := w.create().ID
	for _, mount := range []string{"", "/v1"} {
		p := mount + "/sandboxes/" + id + "/proxy/8000"
		for from, want := range map[string]string{
			"/login?a=b#c": p + "/login?a=b#c", "/": p + "/", "http://localhost:8000/x": p + "/x", "http://localhost:8000": p + "/",
			"http://localhost:8000?q": p + "/?q",
			"next":                    "next", "?q": "?q", "//cdn.example/x": "//cdn.example/x",
			"https://example.com/":    "https://example.com/",
			"http://localhost:80001/": "http://localhost:80001/",
			p + "/again":              p + "/again", p: p, p + "0/x": p + p + "0/x",
		} {
			to = from
			if got := w.do("GET", p+"/", "").Header.Get("Location"); got != want {
				t.Errorf("%s leads to %s, want %s", from, got, want)
			}
		}
	}
}

// TestRenewSkipped: an access that says so does not renew.
func TestRenewSkipped(t *testing.T) {
	w := newWorld(t)
	sb := w.do("POST", "/v1/sandboxes",
		`{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"timeout":60,`+
			`"extensions":{"access.renew.extend.seconds":"3600"}}`).sandbox(t)
	at := "/v1/sandboxes/" + sb.ID
	w.do("GET", at+"/proxy/44772/ping", "", wire.HeaderAccessRenew, "Skip")
	w.s.renewals.mu.Lock()
	_, asked := w.s.renewals.at[sb.ID]
	w.s.renewals.mu.Unlock()
	if asked {
		t.Error("it renewed although it was told not to")
	}
	w.do("GET", at+"/proxy/44772/ping", "", wire.HeaderAccessRenew, "no")
	for range 2000 {
		if got := w.do("GET", at, "").sandbox(t).ExpiresAt; got.After(*sb.ExpiresAt) {
			return
		}
		time.Sleep(time.Millisecond) // nothing tells of a renewal in the background
	}
	t.Error("another access did not renew")
}
