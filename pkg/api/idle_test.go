package api

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestIdlePolicy: what a create asks for is in the record and shown; what makes no sense is refused,
// with what to do.
func TestIdlePolicy(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct{ after, action, want string }{
		{"10m", "", "10m"}, {"90s", "pause", "1m30s"}, {"2h", "stop", "2h"}, {"1s", "kill", "1s"}, {"1h", "hibernate", "1h"},
	} {
		ext := map[string]string{wire.ExtIdleAfter: c.after}
		if c.action != "" {
			ext[wire.ExtIdleAction] = c.action
		}
		sb := w.do("POST", "/v1/sandboxes", healthRequest(t, ext)).sandbox(t)
		if c.action == "" {
			c.action = "pause"
		}
		if got := sb.Sandboxd.Idle; got == nil || *got != (wire.Idle{After: c.want, Action: c.action}) {
			t.Errorf("%+v is shown as %+v", c, got)
		}
	}
	made := len(w.recs)
	for _, c := range []struct{ after, action, says string }{
		{"", "", "from 1s"},
		{"0s", "", "from 1s"},
		{"999ms", "pause", "from 1s"},
		{"-5m", "", "from 1s"},
		{"10", "", "such as 10m"},
		{"soon", "", "such as 10m"},
		{"8761h", "", "to 8760h"},
		{"10m", "", "one of pause, hibernate, stop, kill"},
		{"10m", "sleep", "one of pause, hibernate, stop, kill"},
		{"10m", "PAUSE", "one of pause, hibernate, stop, kill"},
		{"none", "stop", "add that"},
	} {
		ext := map[string]string{wire.ExtIdleAfter: c.after, wire.ExtIdleAction: c.action}
		if c.after == "none" {
			delete(ext, wire.ExtIdleAfter)
		}
		if c.after != "10m" && c.action == "" {
			delete(ext, wire.ExtIdleAction)
		}
		if a := w.do("POST", "/v1/sandboxes", healthRequest(t, ext)); a.StatusCode != 400 || !strings.Contains(string(a.body), c.says) {
			t.Errorf("%v: %d %s", ext, a.StatusCode, a.body)
		}
	}
	if len(w.recs) != made {
		t.Errorf("%d sandboxes of requests that were refused", len(w.recs)-made)
	}
}

// TestUses: requests to a sandbox use it until they end; pings, reads of what the daemon knows, and
// requests without the right to it do not. Those that use it wake it, and no other.
func TestUses(t *testing.T) {
	var uses atomic.Int64
	var open sync.WaitGroup
	var w *world
	var failure error
	w = newWorld(t, func(c *Config) {
		c.Use = func(_ context.Context, r *record.Record) (func(), error) {
			if failure != nil {
				return nil, failure
			}
			uses.Add(1)
			open.Add(1)
			if r.Asleep() {
				w.set(r.ID, func(r *record.Record) { r.State, r.Reason = record.Running, "" })
				r.State, r.Reason = record.Running, ""
			}
			return open.Done, nil
		}
	})
	sleep := func(id string) {
		w.set(id, func(r *record.Record) {
			r.State, r.Reason, r.Message = record.Paused, record.ReasonIdle, "it was idle"
			r.Spec.Idle = record.Idle{After: time.Minute, Action: record.IdlePause}
		})
	}
	id := w.create().ID
	none := []string{wire.HeaderAPIKey, ""}
	for _, c := range []struct {
		method, path string
		headers      []string
		status       int
		uses         bool
	}{
		{"GET", "/proxy/44772/files/info", nil, 200, true},
		{"POST", "/proxy/44772/command", nil, 200, true},
		{"GET", "/proxy/8000/", nil, 200, true},
		{"GET", "/proxy/44772/proxy/44772/ping", nil, 200, true}, // a port of the guest's
		{"GET", "/proxy/44772/ping", nil, 200, false},
		{"GET", "/proxy/44772/ping/", nil, 200, false},
		{"GET", "/proxy/44772/files/info", none, 401, false},
		{"GET", "/proxy/8000/", none, 401, false},
		{"GET", "", nil, 200, false},
		{"GET", "/inspect", nil, 200, false},
		{"GET", "/logs", nil, 409, false},
		{"GET", "/diagnostics/summary", nil, 200, false},
		{"GET", "/endpoints/8000", nil, 200, false},
		{"GET", "/networkpolicy", nil, 200, false},
		{"GET", "/network/flows", nil, 200, false},
	} {
		sleep(id)
		before := uses.Load()
		a := w.do(c.method, "/v1/sandboxes/"+id+c.path, "", c.headers...)
		rec, _ := w.get(id)
		if a.StatusCode != c.status && (c.status != 200 || !c.uses) || uses.Load() > before != c.uses || rec.Asleep() == c.uses {
			t.Errorf("%s %s: %d %.200s, %d uses, asleep: %v", c.method, c.path, a.StatusCode, a.body, uses.Load()-before, rec.Asleep())
		}
	}
	ended := make(chan struct{})
	go func() {
		open.Wait() // an answer arrives before its handler has returned
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("uses of requests that have ended go on")
	}
	// Shown as what it is, and what a client reads that it cannot wake.
	sleep(id)
	var sb wire.Sandbox
	if err := json.Unmarshal(w.do("GET", "/v1/sandboxes/"+id, "").body, &sb); err != nil || sb.Status.State != wire.Paused ||
		!sb.Sandboxd.Idle.Asleep || sb.Status.Message != "it was idle" {
		t.Errorf("%+v, %v", sb.Status, err)
	}
	if a := w.do("GET", "/v1/sandboxes/"+id+"/logs", ""); !strings.Contains(string(a.body), "a command does") {
		t.Errorf("logs: %s", a.body)
	}
	failure = errs.New(errs.Unavailable, "it did not wake")
	if a := w.do("GET", "/v1/sandboxes/"+id+"/proxy/8000/", ""); a.StatusCode != http.StatusServiceUnavailable ||
		!strings.Contains(string(a.body), "it did not wake") {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	// A client's pause is none of this: today's answers.
	failure = nil
	w.set(id, func(r *record.Record) { r.State, r.Reason = record.Paused, "" })
	for _, path := range []string{"/proxy/44772/ping", "/proxy/44772/files/info", "/proxy/8000/"} {
		if a := w.do("GET", "/v1/sandboxes/"+id+path, ""); a.StatusCode != 409 || !strings.Contains(string(a.body), "resume it first") {
			t.Errorf("%s of one that a client paused: %d %s", path, a.StatusCode, a.body)
		}
	}
	w.set(id, func(r *record.Record) { r.State = record.Hibernated })
	for path, words := range map[string]string{
		"/proxy/44772/files/info": "hibernates, because a client has put its memory on disk, and cannot answer; resume it first " +
			"(`sandboxctl resume " + id + "`)",
		"/stats": "hibernates: its memory is on disk",
	} {
		if a := w.do("GET", "/v1/sandboxes/"+id+path, ""); a.StatusCode != 409 || !strings.Contains(string(a.body), words) {
			t.Errorf("%s of one that a client hibernated: %d %s", path, a.StatusCode, a.body)
		}
	}
}
