package server

import (
	"testing"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// TestVariables: commands have the variables that the host gives at that moment, over those of the
// image and the sandbox; a session keeps those with which it began.
func TestVariables(t *testing.T) {
	e := newEnvWith(t, agent.Bootstrap{
		Env:       map[string]string{"OWN": "own", "FORCED": "own"},
		Variables: map[string]string{"FORCED": "first", "KEY": "first"}, ShellAhead: true,
	})
	t.Cleanup(e.s.ahead.Close)
	const say = `echo "$OWN ${FORCED-none} ${KEY-none} ${MORE-none}"`
	is := func(want string) {
		t.Helper()
		want = `stdout "` + want + "\"\ncomplete"
		for _, req := range []agent.CommandRequest{{Command: say}, {Argv: []string{"sh", "-c", say}}} {
			if got := e.events(req); got != want {
				t.Errorf("%+v: %s, want %s", req, got, want)
			}
		}
	}
	is("own first first none")
	session := e.session(map[string]any{})
	old := e.in(session, say)
	e.waits() // a shell that began with the old ones
	e.call(200, "PUT", "/variables", map[string]string{"KEY": "second", "MORE": "second"})
	is("own own second second")
	if got := e.in(session, say); got != old {
		t.Errorf("a session says %s, and said %s", got, old)
	}
	own := agent.CommandRequest{Command: say, Envs: map[string]string{"KEY": "asked"}}
	if got := e.events(own); got != "stdout \"own own asked second\"\ncomplete" {
		t.Errorf("a command that asks for its own: %s", got)
	}
	e.call(400, "PUT", "/variables", `["KEY"]`)
	e.call(405, "GET", "/variables", nil)
	is("own own second second")
	e.waits()
	e.call(200, "PUT", "/variables", map[string]string{})
	is("own own none none")
}
