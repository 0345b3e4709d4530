package api

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestKept: an ended sandbox answers for its output as one that runs: by the route of logs, by that of
// diagnostics, and in the place of its agent.
func TestKept(t *testing.T) {
	dir, cmd := t.TempDir(), strings.Repeat("0a", 16)
	w := newWorld(t, func(c *Config) {
		c.Left = func(_, command string) (*os.File, error) { return os.Open(filepath.Join(dir, command)) }
	})
	for name, text := range map[string]string{agent.EntrypointID: "one\ntwo\nthree\n", cmd: "four\nfive\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	id := w.create().ID
	w.set(id, func(r *record.Record) { r.State, r.Reason, r.Changed = record.Ended, record.Stopped, time.Now() })
	logs, port := "/v1/sandboxes/"+id+"/logs", "/v1/sandboxes/"+id+"/proxy/44772/command/"
	for path, want := range map[string]struct{ body, cursor string }{
		logs:                                          {"one\ntwo\nthree\n", ""},
		logs + "?tail=1":                              {"three\n", ""},
		logs + "?follow=true":                         {"one\ntwo\nthree\n", "0"},
		logs + "?follow=true&tail=2":                  {"two\nthree\n", "4"},
		logs + "?follow=true&cursor=8":                {"three\n", "8"},
		logs + "?follow=true&cursor=99":               {"one\ntwo\nthree\n", "0"},
		logs + "?since=2099-01-01T00:00:00Z":          {"", ""},
		port + cmd + "/logs":                          {"four\nfive\n", "10"},
		port + cmd + "/logs?cursor=5":                 {"five\n", "10"},
		port + cmd + "/logs?cursor=50":                {"", "10"},
		port + "entrypoint/logs?follow=true&cursor=4": {"two\nthree\n", "4"},
	} {
		a := w.do("GET", path, "")
		if got := a.Header.Get(agent.CursorHeader); a.StatusCode != 200 || string(a.body) != want.body || got != want.cursor {
			t.Errorf("%s: %d %q, cursor %q; want %q, cursor %q", path, a.StatusCode, a.body, got, want.body, want.cursor)
		}
	}
	for path, status := range map[string]int{
		logs + "?timestamps=true": 409, port + strings.Repeat("1", 32) + "/logs": 404, port + cmd + "/logs?cursor=-1": 400,
		port + "status/" + cmd: 409,
	} {
		if a := w.do("GET", path, ""); a.StatusCode != status {
			t.Errorf("%s: %d %s, want %d", path, a.StatusCode, a.body, status)
		}
	}
	if a := w.do("GET", "/v1/sandboxes/"+id+"/diagnostics/logs", ""); !strings.HasSuffix(string(a.body), "one\ntwo\nthree\n") {
		t.Errorf("diagnostics: %s", a.body)
	}
	a := w.do("GET", port+cmd+"/logs", "", wire.HeaderAPIKey, "", wire.HeaderAgentToken, "wrong")
	if a.StatusCode != 401 || strings.Contains(string(a.body), "four") {
		t.Errorf("a wrong token: %d %s", a.StatusCode, a.body)
	}
}
