package api

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestBadHealth: what makes no sense of probes and policies is refused, with
// its name and what to do.
func TestBadHealth(t *testing.T) {
	w := newWorld(t)
	for key, c := range map[string]struct {
		bad  []string
		says string
	}{
		wire.ExtRestart: {[]string{
			"", "never", "ALWAYS", "on-failure:", "on-failure:0", "on-failure:-1", "on-failure:+1",
			"on-failure:x", "on-failure:1:2", "on-failure:99999999999", "always:3", "no:1",
		}, "want|only on-failure"},
		wire.ExtReadyCmd:         {[]string{"", "  ", "a\x00b", strings.Repeat("x", 4<<10+1)}, "give|at most|NUL"},
		wire.ExtReadyPort:        {[]string{"", "0", "70000", "-1", "80/tcp", "http", "+80"}, "from 1 to 65535"},
		wire.ExtReadyInterval:    {[]string{"", "0s", "-5s", "10", "2h", "soon"}, "want a duration"},
		wire.ExtReadyTimeout:     {[]string{"0s", "-1s", "99ms", "1h"}, "want a duration"},
		wire.ExtReadyStartPeriod: {[]string{"-1s", "2h", "x"}, "want a duration"},
		wire.ExtReadyRetries:     {[]string{"", "0", "-1", "101", "x"}, "from 1 to 100"},
		"sandboxd.ready.url":     {[]string{"x"}, "is unknown"},
	} {
		for _, v := range c.bad {
			ext := map[string]string{key: v}
			if key != wire.ExtReadyPort && key != wire.ExtRestart {
				ext[wire.ExtReadyPort] = "80"
			}
			a := w.do("POST", "/v1/sandboxes", healthRequest(t, ext))
			said := false
			for _, s := range strings.Split(c.says, "|") {
				said = said || strings.Contains(string(a.body), s)
			}
			if a.StatusCode != 400 || !strings.Contains(string(a.body), key) || !said {
				t.Errorf("%s=%q: %d %.300s", key, v, a.StatusCode, a.body)
			}
		}
	}
	for _, ext := range []map[string]string{
		{wire.ExtReadyInterval: "5s"},
		{wire.ExtReadyRetries: "5"},
		{wire.ExtRestart: "always", wire.ExtOneShot: "true"},
	} {
		if a := w.do("POST", "/v1/sandboxes", healthRequest(t, ext)); a.StatusCode != 400 {
			t.Errorf("%v: %d %s", ext, a.StatusCode, a.body)
		}
	}
	if len(w.recs) > 0 {
		t.Errorf("%d sandboxes of requests that were refused", len(w.recs))
	}
}

func healthRequest(t *testing.T, ext map[string]string) string {
	t.Helper()
	b, err := json.Marshal(map[string]any{"image": map[string]string{"uri": "python"}, "entrypoint": []string{"x"}, "extensions": ext})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestHealthSpec: what was asked for is in the record, and a create that waits
// waits until it is ready.
func TestHealthSpec(t *testing.T) {
	w := newWorld(t)
	asked := 0
	w.s.sandboxes.awaitReady = func(context.Context, record.Record) error { asked++; return nil }
	w.s.sandboxes.health = func(record.Record) *wire.Health {
		return &wire.Health{State: wire.HealthHealthy, LastOutput: "fine"}
	}
	a := w.do("POST", "/v1/sandboxes?wait=true", healthRequest(t, map[string]string{
		wire.ExtRestart: "on-failure:3", wire.ExtReadyCmd: "check", wire.ExtReadyPort: "80", wire.ExtReadyInterval: "1m",
		wire.ExtReadyStartPeriod: "0s",
	}))
	var sb wire.Sandbox
	if err := json.Unmarshal(a.body, &sb); err != nil || a.StatusCode != 202 || asked != 1 || sb.Sandboxd.Health == nil ||
		sb.Sandboxd.Health.LastOutput != "fine" {
		t.Fatalf("%d %s: %v, asked %d times", a.StatusCode, a.body, err, asked)
	}
	r := w.recs[sb.ID]
	want := record.Probe{Command: "check", Port: 80, Interval: time.Minute, Timeout: 5 * time.Second, Retries: 3}
	if r.Spec.Ready != want || r.Spec.Restart != (record.Restart{Policy: record.RestartOnFailure, Max: 3}) {
		t.Errorf("%+v, %+v", r.Spec.Ready, r.Spec.Restart)
	}
	if a := w.do("GET", "/v1/sandboxes", ""); !strings.Contains(string(a.body), `"state":"healthy"`) ||
		strings.Contains(string(a.body), "fine") {
		t.Errorf("the list: %s", a.body)
	}
	// While it waits for its restart, it is Pending and says until when.
	code := 3
	r.State, r.Reason, r.ExitCode, r.Restarts = record.Ended, record.Exited, &code, 1
	w.set(sb.ID, func(old *record.Record) { *old = r })
	w.s.sandboxes.health = func(record.Record) *wire.Health { return nil }
	a = w.do("GET", "/v1/sandboxes/"+sb.ID+"/inspect", "")
	var i wire.Inspection
	if err := json.Unmarshal(a.body, &i); err != nil || i.Status.State != wire.Pending || i.Status.Reason != "exited" ||
		i.Sandboxd.NextStart == nil || i.Sandboxd.Restarts != 1 {
		t.Errorf("%s: %v", a.body, err)
	}
}
