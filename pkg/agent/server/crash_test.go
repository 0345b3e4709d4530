package server

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// TestNeverStarted asks for everything one can do with a command that could not
// be started. It has no process, so whoever looks for one kills the agent.
func TestNeverStarted(t *testing.T) {
	e := newEnv(t)
	for _, req := range []agent.CommandRequest{
		{Argv: []string{"nosuchprogram-x"}, Stdin: true}, // not in PATH
		{Argv: []string{"/nope/x"}, Stdin: true, Timeout: 1},
		{Argv: []string{"/etc/passwd"}, Stdin: true}, // not executable
		{Argv: []string{"nosuchprogram-x"}},
		{Argv: []string{"nosuchprogram-x"}, Background: true},
	} {
		id := e.id(e.call(http.StatusOK, "POST", "/command", req))
		e.call(http.StatusConflict, "POST", "/command/"+id+"/stdin", "typed")
		e.call(http.StatusConflict, "POST", "/command/"+id+"/signal?signal=INT", nil)
		e.call(http.StatusInternalServerError, "DELETE", "/command?id="+id, nil)
		if resp, _ := e.send(e.request("GET", "/command/"+id+"/logs?follow=true", nil)); resp.StatusCode != http.StatusOK {
			t.Errorf("%+v: logs %d", req, resp.StatusCode)
		}
		if s := e.call(http.StatusOK, "GET", "/command/status/"+id, nil); !strings.Contains(s, req.Argv[0]) {
			t.Errorf("%+v: status %s", req, s)
		}
		c := e.s.commands.Get(id)
		if c.Alive() || e.s.commands.Interrupt(t.Context(), c, syscall.SIGTERM) == nil {
			t.Errorf("%+v: it lives", req)
		}
	}
	e.call(http.StatusOK, "GET", "/ping", nil)
}

// TestPanicLeavesAnObituary: the agent's standard error is the null device, so
// what it died of must be on the disk.
func TestPanicLeavesAnObituary(t *testing.T) {
	e := newEnv(t)
	s := e.s
	old := proc.OnPanic
	defer func() { proc.OnPanic = old }()
	proc.OnPanic = s.state.crashed
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed: the agent would go on with half a state")
			}
		}()
		proc.Guarded(func() {
			var c command.Command
			c.Process.Ended = time.Now() // as a goroutine may err
		})
	}()
	b, err := os.ReadFile(filepath.Join(string(s.state), filepath.Base(agent.ObituaryFile)))
	if err != nil {
		t.Fatal(err)
	}
	var o agent.Obituary
	if err := json.Unmarshal(b, &o); err != nil || o.ExitCode != 2 ||
		!strings.Contains(o.Message, "the agent crashed: runtime error: invalid memory address") {
		t.Errorf("%+v %v", o, err)
	}
	last, err := os.ReadFile(filepath.Join(string(s.state), filepath.Base(agent.OutputFile)))
	if err != nil || !strings.Contains(string(last), "TestPanicLeavesAnObituary") || len(last) > agent.MaxLastOutput {
		t.Errorf("%d bytes: %.500s %v", len(last), last, err)
	}
}
