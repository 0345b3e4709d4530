package e2e_test

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// tellEntrypoints: however an entrypoint ends, and if it never began, the
// sandbox says so for as long as it is remembered.
func tellEntrypoints(t *testing.T, l *lab) {
	for name, c := range map[string]struct {
		argv                []string
		state, reason, last string
		code                int // -1: none
		message             string
	}{
		"missing":   {[]string{"/no/such/program"}, wire.Failed, "", "", 127, "/no/such/program"},
		"forbidden": {[]string{"/etc/passwd"}, wire.Failed, "", "", 126, "/etc/passwd"},
		"well":      {[]string{"true"}, wire.Terminated, "exited", "", 0, ""},
		"badly":     {[]string{"sh", "-c", "exit 3"}, wire.Failed, "exited", "", 3, "3"},
		"last words": {
			[]string{"sh", "-c", "echo starting; echo cannot open the door >&2; exit 4"},
			wire.Failed,
			"exited", "starting\ncannot open the door\n", 4, "4",
		},
		"killed": {[]string{"sh", "-c", "kill -9 $$"}, wire.Failed, "killed", "", 137, "SIGKILL"},
	} {
		t.Run(name, func(t *testing.T) {
			l := &lab{host: l.host, T: t, runtime: l.runtime}
			r := l.ctl(append([]string{"create", "--runtime", l.runtime, "base", "--"}, c.argv...)...)
			id := strings.TrimSpace(r.out)
			if id == "" {
				t.Fatalf("create printed no id: %+v", r)
			}
			l.awaitState(t, id, c.state, patience)
			i := l.inspect(id)
			if i.Status.Reason != c.reason && c.reason != "" {
				t.Errorf("reason %q, want %q", i.Status.Reason, c.reason)
			}
			switch code := i.Sandboxd.ExitCode; {
			case code == nil:
				t.Errorf("no exit code: %+v", i.Status)
			case *code != c.code:
				t.Errorf("exit code %d, want %d", *code, c.code)
			}
			if i.LastOutput != c.last {
				t.Errorf("last output %q, want %q", i.LastOutput, c.last)
			}
			if !strings.Contains(i.Status.Message, c.message) {
				t.Errorf("message %q lacks %q", i.Status.Message, c.message)
			}
			if logs := l.ok("logs", id); logs != c.last {
				t.Errorf("logs %q, want %q", logs, c.last)
			}
			if ps := l.ok("ps", "-a", "--no-trunc"); !strings.Contains(ps, c.state+" ("+i.Status.Reason+")") {
				t.Errorf("ps -a printed %s", ps)
			}
			if ps := l.ok("ps", "-q"); strings.Contains(ps, id) {
				t.Error("ps shows what has ended")
			}
			l.wants(l.ctl("exec", id, "--", "true"), 125, "ended")
			l.ok("rm", "-f", id)
		})
	}
}
