package api

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestLostStreams: a stream that breaks because its sandbox has ended has a last event that says why, in the words that
// SDKs know from a command that was killed. A stream that breaks for another reason stays broken.
func TestLostStreams(t *testing.T) {
	const output = `{"type":"stdout","text":"{\"type\":\"error\"","timestamp":1}` + "\n\n"
	const complete = `{"type":"execution_complete","execution_time":1,"timestamp":2}` + "\n\n"
	for name, c := range map[string]struct {
		path, sent string
		end        func(*record.Record)
		want       string // how the line of the reason begins; "": the stream stays broken
	}{
		"oom": {
			"command", output, func(r *record.Record) { r.State, r.Reason = record.Ended, record.OOM },
			"oom: command was killed: out of memory (sandbox limit 2048 MiB)",
		},
		"oom of code": {
			"code", output, func(r *record.Record) { r.State, r.Reason = record.Ended, record.OOM },
			"oom: the context was killed and its state is lost: out of memory",
		},
		"stopped": {"session/x/run", output, func(r *record.Record) {
			r.State, r.Reason, r.Message = record.Stopping, record.Stopped, "a client stopped it"
		}, "stopped: sandbox "},
		"deleted":       {"command", output, func(r *record.Record) { r.State = record.Deleting }, "deleted: sandbox "},
		"hibernated":    {"command", output, func(r *record.Record) { r.Hibernation = &record.MemoryImage{} }, "hibernated: sandbox "},
		"restarted":     {"command", output, func(r *record.Record) { r.Started = r.Started.Add(time.Second) }, "restarted: sandbox "},
		"half a line":   {"command", output + `{"type":"std`, func(r *record.Record) { r.State = record.Deleting }, "deleted: sandbox "},
		"nothing sent":  {"command", "", func(r *record.Record) { r.State = record.Deleting }, "deleted: sandbox "},
		"it had ended":  {"command", output + complete, func(r *record.Record) { r.State = record.Deleting }, ""},
		"it had failed": {"command", output + killed, func(r *record.Record) { r.State = record.Deleting }, ""},
		"it runs on":    {"command", output, func(*record.Record) {}, ""},
		"another path":  {"command/status/x", output, func(r *record.Record) { r.State = record.Deleting }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			end := w.mortal()
			sb := w.create()
			w.set(sb.ID, func(r *record.Record) { r.Started = time.Now() })
			app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("Content-Type", "text/event-stream")
				io.WriteString(rw, c.sent)             //nolint:errcheck // the client sees what is missing
				http.NewResponseController(rw).Flush() //nolint:errcheck // likewise
				w.set(sb.ID, c.end)
				end()
				panic(http.ErrAbortHandler)
			}))
			defer app.Close()
			w.agentAt = app.Listener
			method := "POST"
			if c.path == "command/status/x" {
				method = "GET"
			}
			req, err := http.NewRequest(method, w.url+"/v1/sandboxes/"+sb.ID+"/proxy/44772/"+c.path, strings.NewReader(`{"command":"x"}`))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set(wire.HeaderAPIKey, testKey)
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			if c.want == "" {
				if string(b) != c.sent || err == nil {
					t.Errorf("%s, %v; want %s and an error", b, err, c.sent)
				}
				return
			}
			rest, ok := strings.CutPrefix(string(b), c.sent)
			if err != nil || !ok || !strings.HasSuffix(rest, "\n\n") {
				t.Fatalf("%s, %v", b, err)
			}
			var ev agent.Event
			if err := json.Unmarshal([]byte(rest), &ev); err != nil {
				t.Fatalf("%s: %v", rest, err)
			}
			if ev.Type != "error" || ev.Error == nil || len(ev.Error.Traceback) != 2 || !strings.HasPrefix(ev.Error.Traceback[1], c.want) {
				t.Errorf("the last event is %s", rest)
			}
			if code := c.path == "code"; code != (ev.Error.Name == agent.ContextDied) || !code && ev.Error.Value != "-1" {
				t.Errorf("the last event is %s", rest)
			}
		})
	}
}
