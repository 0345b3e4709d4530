package server

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// TestReasons: the last event and the status say why, and blame a limit only
// on what the command itself said and, for the disk, on a try.
func TestReasons(t *testing.T) {
	e := newEnvWith(t, agent.Bootstrap{Limits: agent.Limits{Pids: 32, DiskBytes: 64 << 20}})
	for name, c := range map[string]struct {
		command, reason, event string
		timeout                int64
	}{
		"well":   {"true", agent.ReasonExited, "", 0},
		"badly":  {"exit 3", agent.ReasonExited, "error CommandExecError 3 exit status 3", 0},
		"killed": {"kill -9 $$", agent.ReasonKilled, "error CommandExecError -1 signal: killed", 0},
		"timeout": {
			"exec sleep 1000", agent.ReasonTimeout, "error CommandExecError -1 signal: killed|command timed out after 50ms",
			50,
		},
		"pids": {
			"echo 'sh: fork: Resource temporarily unavailable' >&2; exit 254", agent.ReasonPidsLimit,
			"error CommandExecError 254 exit status 254|pids_limit: the sandbox may have 32 processes and threads, its pids limit", 0,
		},
		// /proc shows the host's
		"pids, near": {
			"echo 'BlockingIOError: Resource temporarily unavailable' >&2; exit 1", agent.ReasonPidsLimit,
			"error CommandExecError 1 exit status 1|pids_limit: the sandbox may have 32 processes and threads, its pids limit", 0,
		},
		"pids, coped": {"echo 'sh: fork: Resource temporarily unavailable' >&2", agent.ReasonExited, "", 0},
		// another disk was full, or none
		"disk, a lie": {"echo 'dd: No space left on device' >&2; exit 1", agent.ReasonExited, "error CommandExecError 1 exit status 1", 0},
		"not there":   {"", agent.ReasonExited, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			e := &env{t, e.s, e.http, e.dir}
			req := agent.CommandRequest{Argv: []string{"sh", "-c", c.command}, Timeout: c.timeout}
			if c.command == "" {
				req.Argv = []string{"/nowhere"}
			}
			out := e.call(http.StatusOK, "POST", "/command", req)
			if last := lastLine(e.plain(out)); c.event != "" && last != c.event {
				t.Errorf("it ends with %q, want %q", last, c.event)
			}
			if st := e.await(e.id(out)); st.Reason != c.reason {
				t.Errorf("status %+v, want %s", st, c.reason)
			}
		})
	}
}

// Where few processes are, EAGAIN is a socket's or a lock's.
func TestAgainOfOthers(t *testing.T) {
	e := newEnvWith(t, agent.Bootstrap{Limits: agent.Limits{Pids: 1 << 30}})
	out := e.events(agent.CommandRequest{Argv: []string{"sh", "-c", "echo 'recv: Resource temporarily unavailable' >&2; exit 1"}})
	if want := "error CommandExecError 1 exit status 1"; lastLine(out) != want {
		t.Errorf("it ends with %q, want %q", lastLine(out), want)
	}
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}

// TestNewLimits: what the host says later is what is reported.
func TestNewLimits(t *testing.T) {
	e := newEnvWith(t, agent.Bootstrap{Limits: agent.Limits{CPUMillis: 1000, Pids: 8}})
	e.call(http.StatusOK, "PUT", "/limits", agent.Limits{CPUMillis: 2500, Pids: 99})
	if got := e.call(http.StatusOK, "GET", "/metrics", nil); !strings.Contains(got, `"cpu_count":2.5`) {
		t.Errorf("metrics %s", got)
	}
	out := e.events(agent.CommandRequest{Argv: []string{"sh", "-c", "echo cannot fork; exit 1"}})
	if !strings.Contains(out, "may have 99 processes") {
		t.Errorf("events %s", out)
	}
	e.call(http.StatusBadRequest, "PUT", "/limits", "[]")
	e.call(http.StatusMethodNotAllowed, "POST", "/limits", agent.Limits{})
}

// A command in the background that somebody killed has died of memory if the kernel
// has killed for that since it began. What happens after somebody knew how it ended,
// and what a client did, is no evidence.
func TestBackgroundOOM(t *testing.T) {
	e := newEnv(t)
	with := func(method, path, body, kills string) string {
		r := e.request(method, path, strings.NewReader(body))
		if kills != "" {
			r.Header.Set(agent.OOMKillsHeader, kills)
		}
		resp, text := e.send(r)
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s %s: %d %s", method, path, resp.StatusCode, text)
		}
		return text
	}
	status := func(id, kills string) (st agent.CommandStatus) {
		t.Helper()
		if err := json.Unmarshal([]byte(with("GET", "/command/status/"+id, "", kills)), &st); err != nil {
			t.Fatal(err)
		}
		return st
	}
	for name, c := range map[string]struct {
		command, before string
		signal          bool
		after           []string
		reason          string
	}{
		"memory":            {"kill -9 $$", "2", false, []string{"3", "3"}, agent.ReasonOOM},
		"killed":            {"kill -9 $$", "2", false, []string{"2", "2"}, agent.ReasonKilled},
		"memory, but later": {"kill -9 $$", "2", false, []string{"2", "3"}, agent.ReasonKilled},
		"nobody counted":    {"kill -9 $$", "", false, []string{"3"}, agent.ReasonKilled},
		"by a client":       {"sleep 1000", "2", true, []string{"3"}, agent.ReasonKilled},
		"another signal":    {"kill -15 $$", "2", false, []string{"3"}, agent.ReasonKilled},
		"exited":            {"exit 3", "2", false, []string{"3"}, agent.ReasonExited},
	} {
		id := e.id(with("POST", "/command", `{"background":true,"command":"`+c.command+`"}`, c.before))
		if c.signal {
			e.call(http.StatusOK, "POST", "/command/"+id+"/signal?signal=SIGKILL", nil)
		}
		with("GET", "/command/"+id+"/logs?follow=true", "", "") // until its end
		var st agent.CommandStatus
		for _, kills := range c.after {
			st = status(id, kills)
		}
		if st.Reason != c.reason || strings.Contains(st.Error, "out of memory") != (c.reason == agent.ReasonOOM) {
			t.Errorf("%s: %+v", name, st)
		}
	}
}
