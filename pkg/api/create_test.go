package api

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestHold: the answer to a creation waits for its sandbox, and for nothing before it.
func TestHold(t *testing.T) {
	w := newWorld(t)
	w.hold, w.held = make(chan struct{}), make(chan struct{})
	answers := make(chan answer)
	go func() { answers <- w.do("POST", "/v1/sandboxes", createBody) }()
	<-w.held
	select {
	case a := <-answers:
		t.Fatalf("it does not wait: %d %s", a.StatusCode, a.body)
	default:
	}
	close(w.hold)
	a := <-answers
	if sb := a.sandbox(t); a.StatusCode != 202 || sb.Status.State != wire.Running || a.Header.Get(wire.HeaderSandbox) != sb.ID ||
		a.Header.Get("Preference-Applied") != "" {
		t.Errorf("%d %v %s", a.StatusCode, a.Header, a.body)
	}

	// From here on nothing runs, and nothing waits for it.
	w.hold, w.held = make(chan struct{}), nil
	pending := func(what, applied string, a answer) {
		t.Helper()
		if sb := a.sandbox(t); a.StatusCode != 202 || sb.Status.State != wire.Pending || a.Header.Get("Preference-Applied") != applied {
			t.Errorf("%s: %d %v %s", what, a.StatusCode, a.Header, a.body)
		}
	}
	w.s.sandboxes.holdLimit = time.Hour
	for _, prefer := range []string{"respond-async", "Respond-Async, handling=lenient"} {
		pending(prefer, "respond-async", w.do("POST", "/v1/sandboxes", createBody, "Prefer", prefer))
	}
	pending("?wait=false", "", w.do("POST", "/v1/sandboxes?wait=false", createBody))
	pending("a pull", "", w.do("POST", "/v1/sandboxes", strings.Replace(createBody, "python", "registry.example.com/far", 1)))
	w.queued = true
	pending("a queue", "", w.do("POST", "/v1/sandboxes", createBody))
	w.queued = false
	w.s.sandboxes.holdLimit = 20 * time.Millisecond
	start := time.Now()
	pending("too long", "", w.do("POST", "/v1/sandboxes", createBody))
	if took := time.Since(start); took < w.s.sandboxes.holdLimit {
		t.Errorf("it waits for %v", took)
	}
}

// TestHoldLimit: what takes longer is Pending after two seconds.
func TestHoldLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{recs: map[string]record.Record{}, hold: make(chan struct{})}
		s := sandboxHandlers{sandboxes: f, holdLimit: holdLimit}
		start := time.Now()
		f.recs["x"] = record.Record{ID: "x", State: record.Creating}
		rec, err := s.hold((&http.Request{}).WithContext(t.Context()), f.recs["x"])
		if took := time.Since(start); err != nil || rec.State != record.Creating || took != 2*time.Second {
			t.Errorf("%s, %v after %v", rec.State, err, took)
		}
	})
}

// TestHangUp: a client that does not wait for the answer has its sandbox all the same.
func TestHangUp(t *testing.T) {
	w := newWorld(t)
	w.hold, w.held = make(chan struct{}), make(chan struct{})
	ctx, hangUp := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "POST", w.url+"/v1/sandboxes", strings.NewReader(createBody))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(wire.HeaderAPIKey, testKey)
	req.Header.Set(wire.HeaderIdempotency, "again")
	gone := make(chan error)
	go func() {
		resp, err := noRedirect.Do(req)
		if err == nil {
			resp.Body.Close()
		}
		gone <- err
	}()
	<-w.held
	hangUp()
	if err := <-gone; err == nil {
		t.Fatal("it was answered")
	}
	w.held = nil
	close(w.hold)
	a := w.do("POST", "/v1/sandboxes", createBody, wire.HeaderIdempotency, "again")
	if a.StatusCode != 202 || a.Header.Get(wire.HeaderReplayed) != "true" || a.sandbox(t).Status.State != wire.Running || len(w.recs) != 1 {
		t.Errorf("%d %s, %d sandboxes", a.StatusCode, a.body, len(w.recs))
	}
}

// ended changes a record to one of a sandbox that ended with a code.
func ended(reason record.Reason, code int, message string) func(*record.Record) {
	return func(r *record.Record) { r.Reason, r.ExitCode, r.Message = reason, &code, message }
}

// failsOn changes a record to one whose creation failed in a step.
func failsOn(step string) func(*record.Record) {
	return func(r *record.Record) { r.Reason, r.Message = record.CreateFailed, "could not be created: step "+step }
}

// again gives what ended a policy that starts it again.
func again(end func(*record.Record)) func(*record.Record) {
	return func(r *record.Record) { end(r); r.Spec.Restart.Policy = record.RestartAlways }
}

// TestCreateFails: a creation that fails is an error, the same one each time, and what
// is left of it can be looked at and deleted.
func TestCreateFails(t *testing.T) {
	for name, c := range map[string]struct {
		end    func(*record.Record)
		status int
		code   string // or the state
	}{
		"not there":     {ended(record.CreateFailed, 127, `entrypoint "x": no such file`), 400, "DOCKER::INVALID_ENTRYPOINT"},
		"not a program": {ended(record.CreateFailed, 126, `entrypoint "x": not executable`), 400, "DOCKER::INVALID_ENTRYPOINT"},
		"ended at once": {ended(record.Exited, 3, "code 3; its last lines:\nboom"), 500, "DOCKER::SANDBOX_START_FAILED"},
		"a shell's 127": {ended(record.Exited, 127, "code 127; its last lines:\nsh: x: not found"), 500, "DOCKER::SANDBOX_START_FAILED"},
		"out of memory": {ended(record.OOM, 137, "over its memory limit"), 500, "DOCKER::SANDBOX_START_FAILED"},
		"a step failed": {failsOn("network"), 500, "DOCKER::SANDBOX_START_FAILED"},
		"not pulled": {func(r *record.Record) {
			r.Reason, r.Message, r.Spec.Image.Layers = record.CreateFailed, "step image", nil
		}, 500, "DOCKER::SANDBOX_IMAGE_PULL_FAILED"},
		"ended well":     {ended(record.Exited, 0, "code 0"), 202, wire.Terminated},
		"started again":  {again(ended(record.Exited, 3, "x")), 202, wire.Pending},
		"ran for a time": {func(r *record.Record) { ended(record.Exited, 3, "x")(r); r.Started = time.Now() }, 202, wire.Failed},
	} {
		t.Run(name, func(t *testing.T) {
			answers := make(chan Answer, 16)
			w := newWorld(t, func(c *Config) { c.OnAnswer = func(a Answer) { answers <- a } })
			w.end = c.end
			first := w.do("POST", "/v1/sandboxes", createBody, wire.HeaderIdempotency, "k")
			second := w.do("POST", "/v1/sandboxes", createBody, wire.HeaderIdempotency, "k")
			id := first.Header.Get(wire.HeaderSandbox)
			rec, known := w.recs[id]
			if !known || first.StatusCode != c.status || first.Header.Get(wire.HeaderReplayed) != "" {
				t.Fatalf("%d %v %s", first.StatusCode, first.Header, first.body)
			}
			if second.StatusCode != c.status || string(second.body) != string(first.body) || second.Header.Get(wire.HeaderSandbox) != id ||
				second.Header.Get(wire.HeaderReplayed) != "true" {
				t.Errorf("again: %d %v %s, before that %s", second.StatusCode, second.Header, second.body, first.body)
			}
			if c.status == 202 {
				if state := first.sandbox(t).Status.State; state != c.code {
					t.Errorf("it is %s", state)
				}
				return
			}
			if e := first.error(t); e.Code != c.code || !strings.Contains(e.Message, id) || !strings.HasSuffix(e.Message, rec.Message) {
				t.Errorf("%+v; want %s and %q", e, c.code, rec.Message)
			}
			if a := <-answers; a.Status != c.status || a.Guests != (rec.Reason != record.CreateFailed) {
				t.Errorf("counted as %+v", a)
			}
			if strings.Contains(w.log.String(), `"level":"ERROR"`) {
				t.Errorf("the log has an error of the daemon's: %s", w.log)
			}
			if before, output, _ := strings.Cut(rec.Message, record.LastLines); output != "" &&
				(!strings.Contains(w.log.String(), before) || strings.Contains(w.log.String(), output)) {
				t.Errorf("the log has no reason, or the output: %s", w.log)
			}
			for _, how := range [][]string{{"?wait=true"}, {"", "Prefer", "wait"}, {"", "Prefer", "respond-async"}} {
				a := w.do("POST", "/v1/sandboxes"+how[0], createBody, append(how[1:], wire.HeaderIdempotency, "k")...)
				if a.StatusCode != 202 || a.sandbox(t).Status.State != wire.Failed {
					t.Errorf("%q: %d %s", how, a.StatusCode, a.body)
				}
			}
			if a := w.do("DELETE", "/v1/sandboxes/"+id, ""); a.StatusCode != 204 {
				t.Errorf("delete: %d %s", a.StatusCode, a.body)
			}
			if a := w.do("POST", "/v1/sandboxes", createBody, wire.HeaderIdempotency, "k"); a.StatusCode != 409 {
				t.Errorf("of one that is gone: %d %s", a.StatusCode, a.body)
			}
		})
	}
}

// TestEndpointOfFailed: SDKs ask for it at once, and would try a dead agent for long.
func TestEndpointOfFailed(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	for name, c := range map[string]struct {
		state  record.State
		change func(*record.Record)
		status int
	}{
		"failed":           {record.Ended, ended(record.Exited, 3, "code 3; its last lines:\nboom"), 409},
		"about to be":      {record.Stopping, ended(record.Exited, 3, "code 3; its last lines:\nboom"), 409},
		"ended well":       {record.Ended, ended(record.Exited, 0, "code 0"), 200},
		"stopped":          {record.Stopping, ended(record.Stopped, 143, "it was stopped"), 200},
		"being created":    {record.Creating, func(*record.Record) {}, 200},
		"running":          {record.Running, func(*record.Record) {}, 200},
		"to be started up": {record.Ended, again(ended(record.Exited, 3, "x")), 200},
	} {
		w.set(sb.ID, func(r *record.Record) {
			r.State, r.Reason, r.ExitCode, r.Message, r.Spec.Restart = c.state, "", nil, "", record.Restart{}
			c.change(r)
		})
		for _, port := range []string{"44772", "18080", "8000"} {
			a := w.do("GET", "/v1/sandboxes/"+sb.ID+"/endpoints/"+port, "")
			if a.StatusCode != c.status || c.status != 200 && !strings.HasSuffix(a.error(t).Message, "code 3; its last lines:\nboom") {
				t.Errorf("%s, port %s: %d %s", name, port, a.StatusCode, a.body)
			}
		}
	}
}
