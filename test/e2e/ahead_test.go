package e2e_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
)

// line runs a shell line as an SDK does and returns its events without times.
func (h host) line(t *testing.T, sandbox string, request map[string]any) string {
	t.Helper()
	b, err := json.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	_, events, ok := strings.Cut(eventTimes.ReplaceAllString(h.ask(t, sandbox, "POST", "/command", string(b)), ""), `"text":"pong"}`)
	if !ok {
		t.Fatalf("%s: %s", b, events)
	}
	// While a command says nothing for three seconds, the agent does.
	return strings.TrimSpace(strings.ReplaceAll(events, `{"type":"ping","text":"pong"}`+"\n\n", ""))
}

// stdout is the only line of output of a shell line that ends well.
func (h host) stdout(t *testing.T, sandbox, command string) string {
	t.Helper()
	events := h.line(t, sandbox, map[string]any{"command": command})
	var ev struct{ Text string }
	first, rest, _ := strings.Cut(events, "\n\n")
	if err := json.Unmarshal([]byte(first), &ev); err != nil || rest != `{"type":"execution_complete"}` {
		t.Fatalf("%s: %s, %v", command, events, err)
	}
	return strings.TrimSpace(ev.Text)
}

// inside runs a program and returns its output.
func (h host) inside(t *testing.T, sandbox string, argv ...string) string {
	t.Helper()
	out, err := h.exec(t.Context(), sandbox, argv...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// shellsAhead returns the pids of the shells that wait in a sandbox, as seen by
// a program that is not given to one.
func (h host) shellsAhead(t *testing.T, sandbox string) []string {
	t.Helper()
	const find = `for p in /proc/[0-9]*; do case $(tr '\0' ' ' <$p/cmdline 2>/dev/null) in 'bash -c ((BASH_VERSINFO'*) echo ${p#/proc/};; esac; done`
	return strings.Fields(h.inside(t, sandbox, "sh", "-c", find))
}

// aheadOf waits for the shell that waits.
func (h host) aheadOf(t *testing.T, sandbox string) string {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; {
		if pids := h.shellsAhead(t, sandbox); len(pids) == 1 {
			return pids[0]
		} else if time.Now().After(deadline) {
			t.Fatalf("shells that wait: %v", pids)
		}
		time.Sleep(20 * time.Millisecond) // the guest tells of it by no event
	}
}

// TestShellAhead: the next command is run by a shell that waits for it, in every
// way as by one that is started for it; an idle sandbox has none.
func TestShellAhead(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			sb := h.create(t, spec(runtime))
			if pids := h.shellsAhead(t, sb.ID); len(pids) > 0 {
				t.Errorf("before the first command there wait %v", pids)
			}
			h.stdout(t, sb.ID, "echo $$")
			var ran []string
			for range 3 {
				// It is there before it is ready: who is too early gets a shell of his own,
				// and that one waits on.
				taken := false
				for try := 0; try < 5 && !taken; try++ {
					waits := h.aheadOf(t, sb.ID)
					got := h.stdout(t, sb.ID, "echo $$")
					if slices.Contains(ran, got) {
						t.Errorf("process %s ran another command, after %v", got, ran)
					}
					ran = append(ran, got)
					taken = got == waits
				}
				if !taken {
					t.Error("the shell that waited was not taken, five times")
				}
			}
			// Both ways say the same. The argument list is the way of old.
			for _, c := range []string{
				"echo $HOME $PWD $OLDPWD $SHLVL $- $_; umask; ulimit -n 2>&1; echo err >&2", "cd /usr && ls", "exit 7", "kill -9 $$",
				"true; sh -c 'kill -TERM $$'", "set -e; false; echo no",
				"for i in a b; do echo $i; done | tr a-z A-Z", "cat; wc -c <<EOF\ntext\nEOF", "readlink /proc/self/fd/0",
				"ls 'nope'", "if", "nosuch-program 1", "trap 'echo bye' EXIT; exit 3",
			} {
				h.aheadOf(t, sb.ID)
				for _, more := range []map[string]any{{}, {"cwd": "/tmp", "envs": map[string]string{"A": "it's"}}} {
					ahead, own := map[string]any{"command": c}, map[string]any{"argv": []string{"bash", "-c", c}}
					for k, v := range more {
						ahead[k], own[k] = v, v
					}
					if a, b := sortedEvents(h.line(t, sb.ID, ahead)), sortedEvents(h.line(t, sb.ID, own)); a != b {
						t.Errorf("%q with %v:\n%s\nwant\n%s", c, more, a, b)
					}
				}
			}
			// Killed or stopped it is nobody's command, and the command runs once.
			for i, sig := range []string{"KILL", "STOP"} {
				waits := h.aheadOf(t, sb.ID)
				h.inside(t, sb.ID, "sh", "-c", "kill -"+sig+" "+waits)
				file := fmt.Sprintf("/tmp/once%d", i)
				if got := h.stdout(t, sb.ID, "echo $$ | tee -a "+file); got == waits || got == "" {
					t.Errorf("%s: %s was run by %s", sig, got, waits)
				}
				if n := strings.TrimSpace(h.inside(t, sb.ID, "wc", "-l", file)); n != "1 "+file {
					t.Errorf("%s: it has run %s", sig, n)
				}
			}
			// Time limit and interrupt reach all it started.
			h.aheadOf(t, sb.ID)
			if got := h.line(t, sb.ID, map[string]any{
				"command": "sleep 4321 & setsid sleep 4321; true",
				"timeout": 300,
			}); !strings.Contains(got, "timed out after 300ms") {
				t.Error(got)
			}
			settles(t, func() error { // the answer waits for the shell's end, not for theirs
				if left := h.inside(t, sb.ID, "sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep 432[1]' "+
					"|| true"); strings.TrimSpace(left) != "0" {
					return fmt.Errorf("%s survive the time limit", left)
				}
				return nil
			})
		})
	}
}

func sortedEvents(events string) string {
	// Both streams come by ways of their own, and a message has the pid of what was killed.
	all := strings.Split(events, "\n\n")
	slices.SortStableFunc(all, func(a, b string) int { return strings.Compare(a[:16], b[:16]) })
	return strings.Join(all, "\n")
}

// TestShellAheadIsOff: by configuration.
func TestShellAheadIsOff(t *testing.T) {
	h := newHost(t, daemontest.Options{Config: []string{"[defaults]", "shell_ahead = false"}})
	for _, runtime := range runtimes {
		sb := h.create(t, spec(runtime))
		for range 3 {
			h.stdout(t, sb.ID, "echo $$")
		}
		time.Sleep(300 * time.Millisecond) // where it is on, one waits by then
		if pids := h.shellsAhead(t, sb.ID); len(pids) > 0 {
			t.Errorf("%s: there wait %v", runtime, pids)
		}
	}
}
