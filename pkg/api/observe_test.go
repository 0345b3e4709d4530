package api

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// heard are the answers of a world, each told of after its request was answered and
// before its line is in the log.
type heard struct {
	slog.Handler
	answers chan Answer
	lines   chan struct{} // one for each line of a request
}

func newHeard() *heard {
	return &heard{answers: make(chan Answer, 100), lines: make(chan struct{}, 100)}
}

// hear is a change of newWorld.
func (h *heard) hear(c *Config) {
	h.Handler = c.Log.Handler()
	c.Log, c.OnAnswer = slog.New(h), func(a Answer) { h.answers <- a }
}

// Handle writes a line of the log.
func (h *heard) Handle(ctx context.Context, r slog.Record) error {
	err := h.Handler.Handle(ctx, r)
	if r.Message == "operation" || r.Message == "request" {
		h.lines <- struct{}{}
	}
	return err
}

// next returns the next answer when its line is in the log.
func (h *heard) next(t *testing.T) Answer {
	t.Helper()
	select {
	case <-h.lines:
		return <-h.answers
	case <-time.After(10 * time.Second):
		t.Fatal("nothing is heard of a request that was answered")
		return Answer{}
	}
}

// lines returns the records of the log with this message.
func (w *world) lines(msg string) (out []map[string]any) {
	for line := range strings.Lines(w.log.String()) {
		var m map[string]any
		if json.Unmarshal([]byte(line), &m) == nil && m["msg"] == msg {
			out = append(out, m)
		}
	}
	return out
}

// TestOperations holds what the API alone tells of: commands and images.
func TestOperations(t *testing.T) {
	h := newHeard()
	w := newWorld(t, h.hear)
	at := "/v1/sandboxes/" + w.create().ID
	if a := h.next(t); a.Op != "" || a.Route != "/sandboxes" || a.Status != 202 || a.Guests || a.First <= 0 || a.Took < a.First {
		t.Errorf("create: %+v", a)
	}
	for _, c := range []struct{ method, path, op, outcome, level string }{
		{"POST", at + "/proxy/44772/command", "exec", "ok", "INFO"},
		{"GET", at + "/proxy/44772/command/0/logs", "", "ok", ""},
		{"POST", "/v1/sandboxes/taaaaaaaaaaa/proxy/44772/command", "", "not_found", ""},
		{"DELETE", "/v1/images/python", "image_remove", "not_found", "INFO"},
		{"DELETE", "/v1/images/python:latest", "image_remove", "ok", "INFO"},
		{"POST", "/v1/images/python/tag", "image_tag", "invalid", "INFO"},
		{"GET", "/v1/images/build", "", "invalid", ""},
	} {
		before := len(w.lines("operation"))
		w.do(c.method, c.path, "", wire.HeaderRequestID, "my-request")
		a := h.next(t)
		if a.Op != c.op || a.Outcome != c.outcome || (c.op == "exec") != (a.Runtime == "runsc" && a.Op != "") {
			t.Errorf("%s %s: %+v", c.method, c.path, a)
		}
		lines := w.lines("operation")[before:]
		if (len(lines) == 1) != (c.op != "") {
			t.Fatalf("%s %s leaves %d wide lines: %v", c.method, c.path, len(lines), lines)
		}
		if c.op == "" {
			continue
		}
		l := lines[0]
		if l["op"] != c.op || l["outcome"] != c.outcome || l["level"] != c.level || l["request"] != "my-request" ||
			!strings.HasPrefix(l["actor"].(string), "key ") || l["image"] == nil {
			t.Errorf("%s %s: %v", c.method, c.path, l)
		}
	}
	for _, l := range w.lines("request") {
		if l["level"] != "DEBUG" {
			t.Errorf("a plain request at level %v: %v", l["level"], l)
		}
	}
}

// TestGuestsChooseNoLevel holds that a guest cannot fill the log with errors,
// and that its status is known for the guest's.
func TestGuestsChooseNoLevel(t *testing.T) {
	h := newHeard()
	w := newWorld(t, h.hear)
	w.agent = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(599) })
	w.do("GET", "/v1/sandboxes/"+w.create().ID+"/proxy/44772/x", "")
	h.next(t) // of the create
	if a := h.next(t); a.Status != 599 || !a.Guests {
		t.Errorf("%+v", a)
	}
	if strings.Contains(w.log.String(), `"level":"ERROR"`) {
		t.Errorf("the guest wrote an error into the log: %s", w.log)
	}
}

// BenchmarkRequest is a request with and without somebody who counts: what the
// hook costs is their difference.
func BenchmarkRequest(b *testing.B) {
	for name, hook := range map[string]func(Answer){"silent": nil, "heard": func(Answer) {}} {
		b.Run(name, func(b *testing.B) {
			w := newWorld(b, func(c *Config) {
				c.OnAnswer, c.Log = hook, slog.New(slog.NewTextHandler(io.Discard, nil))
			})
			r := httptest.NewRequest("GET", "/v1/version", nil)
			r.Header.Set(wire.HeaderAPIKey, testKey)
			b.ReportAllocs()
			for b.Loop() {
				w.s.ServeHTTP(httptest.NewRecorder(), r)
			}
		})
	}
}
