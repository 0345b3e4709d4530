package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func TestAuth(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	none := []string{wire.HeaderAPIKey, ""}
	for name, c := range map[string]struct {
		headers []string
		status  int
		code    string
	}{
		"none":      {none, 401, "MISSING_API_KEY"},
		"wrong":     {[]string{wire.HeaderAPIKey, "x"}, 401, "INVALID_API_KEY"},
		"prefix":    {[]string{wire.HeaderAPIKey, testKey[:5]}, 401, "INVALID_API_KEY"},
		"right":     {nil, 200, ""},
		"X-API-Key": {append(none, wire.HeaderAPIKeyOther, testKey), 200, ""},
		"bearer":    {append(none, "Authorization", "bearer "+testKey), 200, ""},
		"basic":     {append(none, "Authorization", "Basic "+testKey), 401, "MISSING_API_KEY"},
	} {
		a := w.do("GET", "/v1/sandboxes/"+sb.ID, "", c.headers...)
		if a.StatusCode != c.status || c.code != "" && a.error(t).Code != c.code {
			t.Errorf("%s: %d %s", name, a.StatusCode, a.body)
		}
	}
	// The exemption of the proxy route is no way around the key.
	for _, p := range []string{
		"/v1/sandboxes/x/../../v1/sandboxes", "/sandboxes/" + sb.ID + "/proxy/../..", "/health/../v1/sandboxes",
		"/v1/sandboxes/" + sb.ID + "/proxy", "/v1//sandboxes",
	} {
		req, err := http.NewRequest("GET", w.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.URL.Opaque = p
		resp, err := noRedirect.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode < 400 || bytes.Contains(b, []byte(sb.ID)) {
			t.Errorf("%s: %s %s", p, resp.Status, b)
		}
	}
	for _, p := range []string{"/health", "/openapi.json"} {
		if a := w.do("GET", p, "", none...); a.StatusCode != 200 {
			t.Errorf("%s: %s", p, a.Status)
		}
	}
	if a := w.do("GET", "/v1/sandboxes/nope", "", wire.HeaderRequestID, " abc "); a.Header.Get(wire.HeaderRequestID) != "abc" {
		t.Errorf("request id %q", a.Header.Get(wire.HeaderRequestID))
	}
	fresh := w.do("GET", "/v1/sandboxes", "", append(none, wire.HeaderRequestID, "a\tb")...).Header.Get(wire.HeaderRequestID)
	if !regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`).MatchString(fresh) {
		t.Errorf("for an id unfit for a log there is %q, which is no UUID", fresh)
	}
	if strings.Contains(w.log.String(), testKey) {
		t.Error("the key stands in the log")
	}
}

func TestNoKeyIsClosedUnlessInsecure(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.APIKeys = nil })
	if a := w.do("GET", "/v1/sandboxes", ""); a.StatusCode != 401 {
		t.Errorf("without keys: %s", a.Status)
	}
	w = newWorld(t, func(c *Config) { c.APIKeys, c.Insecure = nil, true })
	if a := w.do("GET", "/v1/sandboxes", "", wire.HeaderAPIKey, ""); a.StatusCode != 200 {
		t.Errorf("insecure: %s", a.Status)
	}
}

func TestUnixSocketNeedsNoKey(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(t.TempDir(), "s")
	w.serve("unix", path, auth.Listener{})
	c := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}}}
	defer c.CloseIdleConnections()
	resp, err := c.Get("http://x/v1/sandboxes")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 200 || !strings.Contains(w.log.String(), `"actor":"uid=`) {
		t.Errorf("%s; log %s", resp.Status, w.log)
	}
}

func TestCORS(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	for _, p := range []string{"/v1/sandboxes", "/v1/sandboxes/" + sb.ID + "/proxy/44772/command"} {
		a := w.do("OPTIONS", p, "", wire.HeaderAPIKey, "", "Origin", "http://page", "Access-Control-Request-Headers", "x-a, x-b")
		if a.StatusCode != 204 || a.Header.Get("Access-Control-Allow-Origin") != "http://page" ||
			a.Header.Get("Access-Control-Allow-Headers") != "x-a, x-b" {
			t.Errorf("%s: %s %v", p, a.Status, a.Header)
		}
	}
}

func TestProxyToAgent(t *testing.T) {
	w := newWorld(t)
	type seen struct {
		method, uri, body string
		header            http.Header
	}
	got := make(chan seen, 1)
	w.agent = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got <- seen{r.Method, r.URL.RequestURI(), string(b), r.Header}
		rw.Header().Set(wire.HeaderRequestID, "from-the-guest")
		rw.Header().Set("Content-Length", "0")
	})
	sb := w.create()
	at := "/v1/sandboxes/" + sb.ID + "/proxy/44772"
	none := []string{wire.HeaderAPIKey, ""}
	for name, h := range map[string][]string{
		"none": none, "wrong": append(none, wire.HeaderAgentToken, "x"), "wrong key": {wire.HeaderAPIKey, "x"},
	} {
		if a := w.do("GET", at+"/ping", "", h...); a.StatusCode != 401 {
			t.Errorf("%s: %s", name, a.Status)
		}
	}
	for name, h := range map[string][]string{
		"token": append(none, wire.HeaderAgentToken, "agent-token"), "key as token": append(none, wire.HeaderAgentToken, testKey),
		"key":    nil,
		"bearer": append(none, "Authorization", "Bearer "+testKey),
	} {
		a := w.do("DELETE", at+"/files%2Fa/b?path=%2Ftmp%2Fa&x=1;2", `["body"]`, append(h, "Cookie", "a=b")...)
		s := <-got
		if a.StatusCode != 200 || a.ContentLength != 0 || a.Header.Get(wire.HeaderRequestID) == "from-the-guest" ||
			len(a.Header.Values(wire.HeaderRequestID)) != 1 {
			t.Errorf("%s: %s %v", name, a.Status, a.Header)
		}
		if s.method != "DELETE" || s.uri != "/files%2Fa/b?path=%2Ftmp%2Fa&x=1;2" || s.body != `["body"]` {
			t.Errorf("%s: the agent saw %+v", name, s)
		}
		if s.header.Get(wire.HeaderAgentToken) != "agent-token" || s.header.Get("Cookie") != "a=b" ||
			s.header.Get("X-Forwarded-For") == "" {
			t.Errorf("%s: the agent saw %v", name, s.header)
		}
		if strings.Contains(fmt.Sprint(s.header), testKey) {
			t.Errorf("%s: the key reached the agent: %v", name, s.header)
		}
	}
	for path, want := range map[string]int{
		"/v1/sandboxes/nope/proxy/44772/ping":                            404,
		"/v1/sandboxes/" + sb.ID + "/proxy/0/x":                          400,
		"/v1/sandboxes/" + sb.ID + "/proxy/65536/x":                      400,
		"/v1/sandboxes/" + sb.ID + "/proxy/127.0.0.1:80/x":               400,
		"/v1/sandboxes/" + sb.ID + "/proxy/8000/x":                       502, // nothing listens
		"/v1/sandboxes/" + sb.ID + "/endpoints/70000":                    400,
		"/v1/sandboxes/" + sb.ID + "/endpoints/1?expires=12":             400,
		"/v1/sandboxes/nope/endpoints/44772":                             404,
		"/v1/sandboxes/" + sb.ID + "/endpoints/1?use_server_proxy=maybe": 400,
	} {
		a := w.do("GET", path, "", "X-Lenient", "1")
		if a.StatusCode != want {
			t.Errorf("%s: %s", path, a.Status)
		}
		if e := a.error(t); strings.Contains(e.Message, "10.163") {
			t.Errorf("%s leaks an address: %s", path, e.Message)
		}
	}
}

// TestProxyHolds: a request to the agent of a sandbox that is being made waits.
func TestProxyHolds(t *testing.T) {
	w := newWorld(t)
	w.hold, w.queued = make(chan struct{}), true
	sb := w.create()
	at := "/sandboxes/" + sb.ID + "/proxy/"
	if a := w.do("GET", at+"8000/", ""); a.StatusCode != 503 || a.Header.Get("Retry-After") == "" {
		t.Errorf("another port: %s", a.Status)
	}
	done := make(chan int, 1)
	go func() { done <- w.do("GET", at+"44772/ping", "").StatusCode }()
	select {
	case st := <-done:
		t.Fatalf("answered %d before the sandbox ran", st)
	case <-time.After(20 * time.Millisecond):
	}
	close(w.hold)
	if st := <-done; st != 200 {
		t.Errorf("after it ran: %d", st)
	}
}

func TestEndpointToken(t *testing.T) {
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(rw, "%s %s cookie=%q key=%q", r.Host, r.URL.RequestURI(), r.Header.Get("Cookie"), r.Header.Get("X-API-Key"))
	}))
	defer app.Close()
	w := newWorld(t)
	w.app = app.Listener
	sb, other := w.create(), w.create()
	var e wire.Endpoint
	if err := json.Unmarshal(w.do("GET", "/v1/sandboxes/"+sb.ID+"/endpoints/8000", "").body, &e); err != nil {
		t.Fatal(err)
	}
	token := e.Headers[wire.HeaderEndpointToken]
	at := func(id string, port int) string { return fmt.Sprintf("/v1/sandboxes/%s/proxy/%d/a/../b?q=1", id, port) }
	none := []string{wire.HeaderAPIKey, ""}
	with := append(none, wire.HeaderEndpointToken, token)
	for _, c := range []struct {
		what, path string
		headers    []string
		want       int
	}{
		{"no token", at(sb.ID, 8000), none, 401},
		{"its token", at(sb.ID, 8000), with, 200},
		{"of another port", at(sb.ID, 8001), with, 401},
		{"of another sandbox", at(other.ID, 8000), with, 401},
		{"in the query", at(sb.ID, 8000) + "&sandboxd_token=" + token, none, 200},
		{"cookie", at(sb.ID, 8000), append(none, "Cookie", "mine=1; sandboxd_token_8000="+token), 401},
		{"cookie of another", at(sb.ID, 8001), append(none, "Cookie", "sandboxd_token_8000="+token), 401},
		{"app's own key", at(sb.ID, 8000), append(with, "X-API-Key", "the-apps"), 200},
	} {
		req, err := http.NewRequest("GET", w.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.URL.Opaque, _, _ = strings.Cut(c.path, "?")
		_, req.URL.RawQuery, _ = strings.Cut(c.path, "?")
		for i := 0; i < len(c.headers); i += 2 {
			if c.headers[i+1] != "" {
				req.Header.Set(c.headers[i], c.headers[i+1])
			}
		}
		resp, err := noRedirect.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != c.want {
			t.Errorf("%s: %s %s", c.what, resp.Status, b)
		}
		if c.want == 200 && (!strings.HasPrefix(string(b), "localhost:8000 /a/../b?q=1 ") || strings.Contains(string(b), token)) {
			t.Errorf("%s: the app saw %s", c.what, b)
		}
		if c.what == "in the query" {
			if ck := resp.Cookies(); len(ck) != 0 || resp.Header.Get("Referrer-Policy") != "strict-origin" {
				t.Errorf("cookies %v, %v", ck, resp.Header)
			}
		}
		if c.what == "app's own key" && !strings.Contains(string(b), "the-apps") {
			t.Errorf("the app did not get its key: %s", b)
		}
	}
	w.url = w.serve("tcp", "127.0.0.1:0", auth.Listener{PublicPorts: true})
	if a := w.do("GET", "/sandboxes/"+sb.ID+"/proxy/8000", "", none...); a.StatusCode != 200 {
		t.Errorf("public: %s", a.Status)
	}
	if a := w.do("GET", "/sandboxes/"+sb.ID+"/proxy/44772/ping", "", none...); a.StatusCode != 401 {
		t.Errorf("the agent on a public listener: %s", a.Status)
	}
}

func TestEgressAPI(t *testing.T) {
	w := newWorld(t)
	sb := w.do("POST", "/v1/sandboxes",
		`{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},`+
			`"networkPolicy":{"egress":[{"action":"allow","target":"203.0.113.0/24"},{"action":"deny","target":"1.2.3.4"}]}}`).sandbox(t)
	at := "/v1/sandboxes/" + sb.ID + "/proxy/18080"
	var e wire.Endpoint
	if err := json.Unmarshal(w.do("GET", "/v1/sandboxes/"+sb.ID+"/endpoints/18080", "").body, &e); err != nil {
		t.Fatal(err)
	}
	none := []string{wire.HeaderAPIKey, ""}
	tok := append(none, wire.HeaderEgressToken, e.Headers[wire.HeaderEgressToken])
	a := w.do("GET", at+"/policy", "", tok...)
	want := `{"status":"ok","mode":"enforcing","enforcementMode":"dns+nft","policy":{"defaultAction":"deny",` +
		`"egress":[{"action":"allow","target":"203.0.113.0/24"},{"action":"deny","target":"1.2.3.4"}]}}`
	if strings.TrimSpace(string(a.body)) != want {
		t.Errorf("policy %s", a.body)
	}
	if got := w.recs[sb.ID].Spec.Network; got.Mode != record.NetworkRules || len(got.Rules) != 2 ||
		got.Rules[1].String() != "deny 1.2.3.4/32" {
		t.Errorf("network %+v", got)
	}
	for _, c := range []struct {
		method, path string
		headers      []string
		want         int
	}{
		{"GET", "/policy", none, 401},
		{"GET", "/policy", append(none, wire.HeaderEgressToken, "x"), 401},
		{"GET", "/policy", append(none, wire.HeaderEgressToken, testKey), 200},
		{"GET", "/healthz", tok, 200},
		{"PATCH", "/policy", tok, 400}, // without a body
		{"PATCH", "/policy", none, 401},
		{"DELETE", "/policy", append(none, wire.HeaderEgressToken, "x"), 401},
		{"OPTIONS", "/policy", tok, 204},
		{"TRACE", "/policy", tok, 405},
		{"POST", "/healthz", tok, 405},
		{"GET", "/credential-vault", tok, 404},
	} {
		a := w.do(c.method, at+c.path, "", c.headers...)
		if a.StatusCode != c.want || a.StatusCode >= 400 && !strings.HasPrefix(a.Header.Get("Content-Type"), "text/plain") {
			t.Errorf("%s %s: %s %s", c.method, c.path, a.Status, a.Header.Get("Content-Type"))
		}
	}
	// Ports and protocol are enforced, and shown as they came in.
	for _, c := range []struct{ create, rules, shown string }{
		{
			`"networkPolicy":{"egress":[{"action":"allow","target":"203.0.113.0/24","ports":[443,"8000-8100"],"protocol":"tcp"}]}`,
			"[allow 203.0.113.0/24:443/tcp allow 203.0.113.0/24:8000-8100/tcp]",
			`[{"action":"allow","target":"203.0.113.0/24","ports":[443,"8000-8100"],"protocol":"tcp"}]`,
		},
		{
			`"extensions":{"sandboxd.allow":"203.0.113.0/24:443/tcp,1.2.3.4:1-9"}`,
			"[allow 203.0.113.0/24:443/tcp allow 1.2.3.4/32:1-9]",
			`[{"action":"allow","target":"203.0.113.0/24","ports":[443],"protocol":"tcp"},` +
				`{"action":"allow","target":"1.2.3.4/32","ports":["1-9"]}]`,
		},
	} {
		sb := w.do("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},`+c.create+`}`, "X-Lenient",
			"1").sandbox(t)
		if got := fmt.Sprint(w.recs[sb.ID].Spec.Network.Rules); got != c.rules {
			t.Errorf("%s is enforced as %s, want %s", c.create, got, c.rules)
		}
		if a := w.do("GET", "/v1/sandboxes/"+sb.ID+"/proxy/18080/policy", ""); !strings.Contains(string(a.body), `"egress":`+c.shown+`}`) {
			t.Errorf("%s is shown as %s", c.create, a.body)
		}
	}
	open := w.create()
	w.set(open.ID, func(r *record.Record) { r.Spec.Network = record.Network{Mode: record.NetworkOpen} })
	if a := w.do("GET", "/v1/sandboxes/"+open.ID+"/proxy/18080/policy", ""); !strings.Contains(string(a.body), `"allow_all"`) ||
		!strings.Contains(string(a.body), `"egress":[]`) {
		t.Errorf("open: %s", a.body)
	}
}

func TestRenewOnAccess(t *testing.T) {
	w := newWorld(t)
	sb := w.do("POST", "/v1/sandboxes",
		`{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"timeout":60,`+
			`"extensions":{"access.renew.extend.seconds":"300"}}`).sandbox(t)
	if a := w.do("GET", "/sandboxes/"+sb.ID+"/proxy/44772/ping", ""); a.StatusCode != 200 {
		t.Fatal(a.Status)
	}
	deadline := time.After(5 * time.Second)
	for {
		if got := w.do("GET", "/v1/sandboxes/"+sb.ID, "").sandbox(t); got.ExpiresAt.After(sb.CreatedAt.Add(4 * time.Minute)) {
			return
		}
		select {
		case <-deadline:
			t.Fatal("access renewed nothing")
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func TestEventsAndImages(t *testing.T) {
	w := newWorld(t)
	w.events <- wire.Event{Cursor: "e-6"}
	w.events <- wire.Event{Time: time.Now(), Type: "running", ID: "tabcdefghijk", Cursor: "e-7"}
	close(w.events)
	a := w.do("GET", "/v1/events", "", "Last-Event-ID", "e-6")
	if !strings.HasPrefix(string(a.body), "id: e-6\n\nid: e-7\nevent: running\ndata: {") ||
		!strings.HasSuffix(string(a.body), "}\n\n") || w.since != "e-6" || strings.Contains(string(a.body), "ursor") {
		t.Errorf("events since %q: %q", w.since, a.body)
	}
	if w.do("GET", "/v1/events?since=2026-01-02T03:04:05.5%2B01:00", ""); !w.from.Equal(time.Date(2026, 1, 2, 2, 4, 5, 5e8, time.UTC)) {
		t.Errorf("events since %v", w.from)
	}
	if a := w.do("GET", "/v1/events?since=yesterday", ""); a.StatusCode != 400 || !strings.Contains(string(a.body), "RFC 3339") {
		t.Errorf("events since yesterday: %s", a.body)
	}
	if a := w.do("GET", "/v1/images", ""); a.StatusCode != 200 || !strings.Contains(string(a.body), `"name":"python"`) {
		t.Errorf("images: %s", a.body)
	}
	w.build = func(out io.Writer) (record.Image, error) {
		fmt.Fprintf(out, "one\ntwo\r%s", strings.Repeat("x", maxLine+5))
		return pythonImage(), nil
	}
	a = w.do("POST", "/v1/images/build", `{"name":"python"}`)
	lines := strings.Split(strings.TrimSpace(string(a.body)), "\n")
	if len(lines) != 5 || lines[0] != `{"line":"one"}` || lines[3] != `{"line":"xxxxx"}` || !strings.HasPrefix(lines[4], `{"image":{`) {
		t.Errorf("build %q", lines)
	}
	w.build = func(out io.Writer) (record.Image, error) {
		fmt.Fprintln(out, "one")
		return record.Image{}, errs.New(errs.Unavailable, "the mirror does not answer; try again later")
	}
	if a := w.do("POST", "/v1/images/build", `{"name":"python"}`); !strings.Contains(string(a.body),
		`{"error":{"code":"DOCKER::INITIALIZATION_ERROR","message":"the mirror`) {
		t.Errorf("a failing build: %s", a.body)
	}
	for body, want := range map[string]int{`{"name":"nope"}`: 404, `{"name":"../x"}`: 400, `{}`: 400, `{"name":7}`: 400} {
		if a := w.do("POST", "/v1/images/build", body); a.StatusCode != want {
			t.Errorf("build %s: %s", body, a.Status)
		}
	}
	for ref, want := range map[string]int{"python:latest": 200, "nope": 404} {
		if a := w.do("DELETE", "/v1/images/"+ref, ""); a.StatusCode != want {
			t.Errorf("rmi %s: %s", ref, a.Status)
		}
	}
}

func TestLogs(t *testing.T) {
	w := newWorld(t)
	out := "one\ntwo\n"
	probes := make(chan struct{}, 100)
	w.agent = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/command/entrypoint/logs" {
			http.NotFound(rw, r)
			return
		}
		n, first := 0, len(out)
		fmt.Sscan(r.URL.Query().Get("cursor"), &n) //nolint:errcheck // none is 0
		if r.URL.Query().Get("follow") == "true" {
			first = n
		}
		rw.Header().Set(agent.CursorHeader, fmt.Sprint(first))
		io.WriteString(rw, out[n:]) //nolint:errcheck // a recorder
		probes <- struct{}{}
	})
	sb := w.create()
	at := "/v1/sandboxes/" + sb.ID + "/logs"
	if a := w.do("GET", at, ""); string(a.body) != out {
		t.Errorf("logs %q", a.body)
	}
	<-probes
	for tail, want := range map[string]string{"0": "", "1": "two\n", "2": out, "100000": out} {
		if a := w.do("GET", at+"?tail="+tail, ""); string(a.body) != want {
			t.Errorf("tail %s: %q", tail, a.body)
		}
		<-probes
		<-probes
	}
	// What was written before the lines that are wanted does not come at the end.
	for _, c := range []struct {
		query  string
		probes int
		want   string
	}{
		{"", 1, out + "three\n"},
		{"&tail=0", 2, "three\n"},
		{"&tail=1", 2, "two\nthree\n"},
		// A client that comes back says which byte it wants. A byte that is not there is of an earlier run.
		{"&cursor=4", 2, "two\nthree\n"},
		{"&cursor=8", 2, "three\n"},
		{"&cursor=99", 2, out + "three\n"},
	} {
		w.set(sb.ID, func(r *record.Record) { r.State = record.Running })
		for len(probes) > 0 {
			<-probes
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			a := w.do("GET", at+"?follow=true"+c.query, "")
			if string(a.body) != c.want {
				t.Errorf("followed%s %q, want %q", c.query, a.body, c.want)
			}
			if first, want := a.Header.Get(agent.CursorHeader), fmt.Sprint(len(out+"three\n")-len(c.want)); first != want {
				t.Errorf("followed%s from byte %q, want %s", c.query, first, want)
			}
		}()
		for range c.probes {
			<-probes
		}
		w.set(sb.ID, func(r *record.Record) { r.State, r.LastOutput = record.Ended, "two\nthree\n" })
		<-ended
	}
	for tail, want := range map[string]string{"0": "", "1": "three\n", "9": "two\nthree\n"} {
		if a := w.do("GET", at+"?tail="+tail, ""); string(a.body) != want {
			t.Errorf("ended, tail %s: %q", tail, a.body)
		}
	}
	for _, tail := range []string{"-1", "x", "", "100001", "1.5"} {
		if a := w.do("GET", at+"?tail="+tail, "", "X-Lenient", "1"); a.StatusCode != 400 ||
			!strings.Contains(a.error(t).Message, "from 0 to 100000") {
			t.Errorf("tail=%s: %s %s", tail, a.Status, a.body)
		}
	}
	for _, bad := range []string{"follow=x", "cursor=x", "cursor=-1"} {
		if a := w.do("GET", at+"?"+bad, "", "X-Lenient", "1"); a.StatusCode != 400 {
			t.Errorf("%s: %s", bad, a.Status)
		}
	}
}

// TestPanic: a bug costs one request, not the daemon, and says nothing to the client.
func TestPanic(t *testing.T) {
	w := newWorld(t)
	w.agent = nil
	sb := w.create()
	a := w.do("GET", "/sandboxes/"+sb.ID+"/proxy/44772/ping", "")
	if a.StatusCode != 500 || strings.Contains(a.error(t).Message, "nil pointer") {
		t.Errorf("%s %s", a.Status, a.body)
	}
	if a := w.do("GET", "/health", ""); a.StatusCode != 200 {
		t.Error(a.Status)
	}
}

// TestLoopbackPort: what listens inside on 127.0.0.1 only is reached through the agent.
func TestLoopbackPort(t *testing.T) {
	w := newWorld(t)
	ln, err := net.Listen("tcp", hosttest.FreePort(t).String())
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	w.app = ln // refuses
	w.agent = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		fmt.Fprintf(rw, "%s %s %s %s", r.Method, r.Host, r.URL.RequestURI(), b)
	})
	sb := w.create()
	at := "/sandboxes/" + sb.ID + "/proxy/8000"
	if a := w.do("POST", at+"/a%2Fb?q=1", "body"); string(a.body) != "POST localhost:8000 /proxy/8000/a%2Fb?q=1 body" {
		t.Errorf("%s", a.body)
	}
	if a := w.do("GET", at, ""); string(a.body) != "GET localhost:8000 /proxy/8000/ " {
		t.Errorf("%s", a.body)
	}
}
