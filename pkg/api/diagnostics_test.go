package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers/gorillamux"

	"github.com/sandboxd/sandboxd/internal/history"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// says makes the agent answer a log, of which all but the last line are an hour old.
func says(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text := text
		if since, err := time.Parse(time.RFC3339Nano, r.URL.Query().Get("since")); err == nil {
			if time.Since(since) < time.Hour {
				text = lastLines(text, 1)
			}
			w.Header().Set(agent.SinceHeader, "0")
		}
		w.Header().Set(agent.CursorHeader, fmt.Sprint(len(text)))
		io.WriteString(w, text) //nolint:errcheck // a recorder
	})
}

// diagnose asks for a descriptor and holds it against OpenSandbox's document.
func (w *world) diagnose(path string) wire.Diagnostic {
	w.t.Helper()
	a := w.do("GET", path, "")
	var d wire.Diagnostic
	if err := json.Unmarshal(a.body, &d); err != nil || a.StatusCode != http.StatusOK {
		w.t.Fatalf("%s: %d %s", path, a.StatusCode, a.body)
	}
	if d.ContentLength != len(d.Content) || d.Delivery != "inline" {
		w.t.Errorf("%s: %+v", path, d)
	}
	doc, err := openapi3.NewLoader().LoadFromFile(filepath.Join(specs, "diagnostic.yaml"))
	if err != nil {
		w.t.Fatal(err)
	}
	doc.Servers = openapi3.Servers{{URL: "http://t/v1"}}
	router, err := gorillamux.NewRouter(doc)
	if err != nil {
		w.t.Fatal(err)
	}
	req, err := http.NewRequest(http.MethodGet, "http://t"+path, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	rt, params, err := router.FindRoute(req)
	if err != nil {
		w.t.Fatal(err)
	}
	in := &openapi3filter.RequestValidationInput{
		Request: req, PathParams: params, Route: rt,
		Options: &openapi3filter.Options{AuthenticationFunc: openapi3filter.NoopAuthenticationFunc},
	}
	err = openapi3filter.ValidateRequest(w.t.Context(), in)
	if err == nil {
		err = openapi3filter.ValidateResponse(w.t.Context(), &openapi3filter.ResponseValidationInput{
			RequestValidationInput: in, Status: a.StatusCode, Header: a.Header, Body: io.NopCloser(bytes.NewReader(a.body)),
		})
	}
	if err != nil {
		w.t.Errorf("%s against diagnostic.yaml: %v", path, err)
	}
	return d
}

// newDiagnosed is a world with a sandbox that something happened to.
func newDiagnosed(t *testing.T) (w *world, id string, book *history.Book) {
	book = history.New()
	w = newWorld(t, func(c *Config) { c.History = book })
	w.agent = says("one\ntwo\nthree\n")
	id = w.create().ID
	book.Open(id)
	at := time.Now()
	book.Note(id, history.State, at, "creating")
	book.Note(id, history.Operation, at.Add(1), "create: ok in 20ms")
	book.Note(id, history.State, at.Add(2), "running")
	book.Note(id, history.Network, at.Add(3), "denied tcp 192.0.2.1:80: default")
	return w, id, book
}

func TestDiagnosticScopes(t *testing.T) {
	w, id, _ := newDiagnosed(t)
	at := "/v1/sandboxes/" + id + "/diagnostics/"
	for path, want := range map[string][]string{
		"logs?scope=container":   {"one\ntwo\nthree\n"},
		"logs?scope=lifecycle":   {"runtime create: ok in 20ms\n"},
		"logs?scope=all":         {"create: ok", "three\n"},
		"events?scope=lifecycle": {"lifecycle creating\n", "lifecycle running\n"},
		"events?scope=runtime":   {"runtime create: ok"},
		"events?scope=network":   {"network denied tcp 192.0.2.1:80"},
		"events?scope=all":       {"creating", "create: ok", "running", "denied"},
	} {
		d := w.diagnose(at + path)
		for _, s := range want {
			if !strings.Contains(d.Content, s) {
				t.Errorf("%s: no %q in %q", path, s, d.Content)
			}
		}
		if d.Truncated || len(d.Warnings) > 0 {
			t.Errorf("%s: %+v", path, d)
		}
	}
	if got := w.diagnose(at + "events?scope=lifecycle").Content; strings.Contains(got, "denied") {
		t.Errorf("lifecycle holds flows: %q", got)
	}
}

// TestDiagnosticTexts are the older forms, without a scope.
func TestDiagnosticTexts(t *testing.T) {
	w, id, _ := newDiagnosed(t)
	for _, mount := range []string{"", "/v1"} {
		at := mount + "/sandboxes/" + id + "/diagnostics/"
		for path, want := range map[string]string{
			"logs?tail=2":                    "two\nthree\n",
			"logs":                           "one\ntwo\nthree\n",
			"logs?since=10m&tail=5":          "three\n",
			"logs?since=2h&tail=5":           "one\ntwo\nthree\n",
			"logs?since=2000-01-01T00:00:00": "one\ntwo\nthree\n",
			"events?limit=1":                 "denied tcp 192.0.2.1:80: default\n",
			"inspect":                        `"link": "sb-` + id + `"`,
			"summary?tail=1&event_limit=500": "== logs\nthree\n",
		} {
			a := w.do("GET", at+path, "")
			if a.StatusCode != 200 || a.Header.Get("Deprecation") != "true" ||
				a.Header.Get("Content-Type") != "text/plain; charset=utf-8" ||
				!strings.HasSuffix(string(a.body), want) && !strings.Contains(path, "inspect") || !strings.Contains(string(a.body), want) {
				t.Errorf("%s: %d %v\n%s", path, a.StatusCode, a.Header, a.body)
			}
		}
		if text := string(w.do("GET", at+"summary", "").body); strings.Contains(text, "agent-token") ||
			!strings.Contains(text, "== inspect") || !strings.Contains(text, "== events") {
			t.Errorf("summary: %s", text)
		}
	}
}

func TestBadDiagnostics(t *testing.T) {
	w, id, _ := newDiagnosed(t)
	at := "/v1/sandboxes/" + id + "/diagnostics/"
	for path, status := range map[string]int{
		"logs?scope=":             400,
		"logs?scope=network":      400,
		"events?scope=container":  400,
		"inspect?scope=all":       400,
		"logs?tail=0":             400,
		"logs?tail=10001":         400,
		"logs?tail=x":             400,
		"logs?since=yesterday":    400,
		"logs?since=-10m":         400,
		"events?limit=501":        400,
		"summary?event_limit=501": 400,
		"summary?tail=-1":         400,
		"heap":                    404,
	} {
		if a := w.do("GET", at+path, ""); a.StatusCode != status || a.error(t).Message == "" {
			t.Errorf("%s: %d %s", path, a.StatusCode, a.body)
		}
	}
	if e := w.do("GET", at+"events?scope=network,all", "").error(t); e.Code != "DIAGNOSTICS_SCOPE_UNSUPPORTED" {
		t.Errorf("an unknown scope: %+v", e)
	}
	if a := w.do("GET", at+"events?scope=%20Runtime%20", "", "X-Lenient", "1"); a.StatusCode != 200 ||
		!strings.Contains(string(a.body), `"scope":"runtime"`) {
		t.Errorf("a scope in another spelling: %d %s", a.StatusCode, a.body)
	}
	if a := w.do("GET", at+"logs", "", wire.HeaderAPIKey, ""); a.StatusCode != 401 {
		t.Errorf("without a key: %d", a.StatusCode)
	}
	if a := w.do("POST", at+"logs", ""); a.StatusCode != 405 {
		t.Errorf("POST: %d", a.StatusCode)
	}
}

// TestDiagnosticsOfSick holds that there is an answer in every state, also of
// an agent that says nothing, or too much.
func TestDiagnosticsOfSick(t *testing.T) {
	w, id, _ := newDiagnosed(t)
	at := "/v1/sandboxes/" + id + "/diagnostics/"
	w.agent = says(strings.Repeat("0123456789abcde\n", 1<<18) + "\xff end\n") // 4 MiB
	if d := w.diagnose(at + "logs?scope=container"); !d.Truncated || len(d.Content) > maxDiagnostic+8 ||
		!strings.HasSuffix(d.Content, "\ufffd end\n") {
		t.Errorf("a flood: truncated %v, %d bytes", d.Truncated, len(d.Content))
	}
	w.agent = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) })
	if d := w.diagnose(at + "logs?scope=all"); len(d.Warnings) != 1 || !strings.Contains(d.Content, "create: ok") {
		t.Errorf("a sick agent: %+v", d)
	}
	for state, warning := range map[record.State]string{
		record.Paused: "the sandbox is Paused", record.Creating: "the sandbox is Pending", record.Ended: "8 KiB",
	} {
		w.set(id, func(r *record.Record) { r.State, r.LastOutput = state, "last words\n" })
		d := w.diagnose(at + "logs?scope=container")
		if len(d.Warnings) != 1 || !strings.Contains(d.Warnings[0], warning) || (state == record.Ended) != (d.Content == "last words\n") {
			t.Errorf("%s: %+v", state, d)
		}
	}
	w.set(id, func(r *record.Record) { r.State, r.Spec.Entrypoint = record.Running, nil })
	if d := w.diagnose(at + "logs?scope=container"); len(d.Warnings) != 1 || d.Content != "" {
		t.Errorf("without entrypoint: %+v", d)
	}
}

// TestDiagnosticsAfterRestart holds what a new daemon still knows, and that it
// says what it does not.
func TestDiagnosticsAfterRestart(t *testing.T) {
	w, id, _ := newDiagnosed(t)
	w.set(id, func(r *record.Record) {
		r.State, r.Reason, r.Message = record.Ended, record.OOM, "went over\nits limit"
		r.Created, r.Changed = r.Created.Add(-time.Hour), r.Changed.Add(-time.Minute)
	})
	w.s.diagnostics.history = history.New()
	d := w.diagnose("/v1/sandboxes/" + id + "/diagnostics/events?scope=all")
	if len(d.Warnings) != 1 || strings.Count(d.Content, "\n") != 2 ||
		!strings.HasSuffix(d.Content, " lifecycle ended (oom): went over its limit\n") {
		t.Errorf("%+v", d)
	}
}

// TestStatsOfAll leaves out what uses nothing.
func TestStatsOfAll(t *testing.T) {
	w := newWorld(t)
	ran, ended := w.create().ID, w.create().ID
	w.set(ended, func(r *record.Record) { r.State = record.Ended })
	var l wire.StatsList
	a := w.do("GET", "/v1/stats", "")
	if err := json.Unmarshal(a.body, &l); err != nil || len(l.Items) != 1 || l.Items[0].ID != ran || l.Items[0].Runtime != "runsc" ||
		l.Items[0].Usage.MemoryLimitBytes != 2<<30 || l.Items[0].Usage.Pids == nil || *l.Items[0].Usage.Pids != 3 {
		t.Errorf("%v %s", err, a.body)
	}
	if a := w.do("GET", "/v1/stats", "", wire.HeaderAPIKey, ""); a.StatusCode != 401 {
		t.Errorf("without a key: %d", a.StatusCode)
	}
}

// TestDiagnosticSince: logs leave out what is older, with a scope and without one. Where
// the time is not known, they say so.
func TestDiagnosticSince(t *testing.T) {
	w, id, book := newDiagnosed(t)
	book.Note(id, history.Operation, time.Now().Add(-time.Hour), "pull: ok in 9s")
	at := "/v1/sandboxes/" + id + "/diagnostics/"
	for path, want := range map[string]string{
		"logs?since=10m": "three\n", "logs?since=3h": "one\ntwo\nthree\n", "logs?since=0s": "three\n",
		"logs?since=" + time.Now().Add(-time.Minute).UTC().Format(time.RFC3339): "three\n",
	} {
		if a := w.do("GET", at+path, ""); string(a.body) != want {
			t.Errorf("%s: %s, want %s", path, a.body, want)
		}
	}
	if got := w.diagnose(at + "logs?scope=all&since=10m").Content; strings.Contains(got, "pull") || !strings.Contains(got, "create: ok") ||
		!strings.HasSuffix(got, "\nthree\n") || strings.Contains(got, "two") {
		t.Errorf("scope all, since 10m: %q", got)
	}
	if got := w.diagnose(at + "logs?scope=lifecycle&since=2h").Content; !strings.Contains(got, "pull") {
		t.Errorf("scope lifecycle, since 2h: %q", got)
	}
	w.agent = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "all\n") }) //nolint:errcheck // a recorder
	const older = "# since is ignored: the sandbox was started by an older release, whose agent keeps no times\nall\n"
	if a := w.do("GET", at+"logs?since=10m", ""); string(a.body) != older {
		t.Errorf("an agent of an older release: %s", a.body)
	}
	if a := w.do("GET", at+"logs", ""); string(a.body) != "all\n" {
		t.Errorf("without since: %s", a.body)
	}
	w.set(id, func(r *record.Record) {
		r.State, r.Reason, r.LastOutput, r.Changed = record.Ended, record.Exited, "the end\n", time.Now().Add(-time.Hour)
	})
	if a := w.do("GET", at+"logs?since=10m", ""); strings.Contains(string(a.body), "the end") ||
		!strings.Contains(string(a.body), "has written nothing since") {
		t.Errorf("ended before: %s", a.body)
	}
	if a := w.do("GET", at+"logs?since=2h", ""); !strings.HasSuffix(string(a.body), "\nthe end\n") {
		t.Errorf("ended after: %s", a.body)
	}
}
