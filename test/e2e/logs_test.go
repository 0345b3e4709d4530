package e2e_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// printed is an entrypoint, or a command, that prints n lines and its last words, and what it prints:
// more than the record of a sandbox keeps.
func printed(n int, then string) (script, output string) {
	var all strings.Builder
	for i := range n {
		fmt.Fprintln(&all, i+1)
	}
	return fmt.Sprintf("seq %d; echo last words; %s", n, then), all.String() + "last words\n"
}

// TestLogsAfterTheEnd: what the entrypoint and commands have printed is there after each end for which
// people read logs. Nobody asks the agent to end, so it writes no obituary.
func TestLogsAfterTheEnd(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			for name, c := range map[string]struct {
				then   string // the entrypoint does
				reason string
				end    func(l *lab, id string)
			}{
				"killed": {"exec sleep 1000", "stopped", func(l *lab, id string) { l.ok("kill", id) }},
				"out of grace": {"trap '' TERM; while :; do sleep 1; done", "stopped", func(l *lab, id string) {
					l.ok("stop", "-t", "1", id)
				}},
				"oom": {"while [ ! -e /tmp/go ]; do sleep 0.1; done; tail /dev/zero", "oom", func(l *lab, id string) {
					l.ctl("exec", id, "--", "touch", "/tmp/go")
				}},
				"killed while the daemon is dead": {"exec sleep 1000", "runtime_crash", func(l *lab, id string) {
					h.Kill()
					l.killGuest(id)
					if err := h.TryStart(); err != nil {
						l.Fatal(err)
					}
				}},
			} {
				t.Run(name, func(t *testing.T) {
					l := &lab{host: h, T: t, runtime: runtime}
					entrypoint, want := printed(5000, c.then)
					other, wantOther := printed(3000, "exec sleep 1000")
					id := l.make("--memory", "64Mi", "base", "--", "sh", "-c", entrypoint)
					cmd := strings.TrimSpace(l.ok("exec", "-d", id, "--", "sh", "-c", other))
					for _, args := range [][]string{{"logs", id}, {"command", "logs", id, cmd}} {
						eventually(t, patience, func() error {
							if out := l.ok(args...); !strings.HasSuffix(out, "last words\n") {
								return fmt.Errorf("%v printed %d bytes", args, len(out))
							}
							return nil
						})
					}
					c.end(l, id)
					l.awaitEnd(t, id)
					// At an end for want of memory, the shell may still say what was killed.
					i, exact := l.inspect(id), c.reason != "oom"
					if i.Status.Reason != c.reason || exact && !strings.HasSuffix(i.LastOutput, "last words\n") {
						t.Errorf("%+v, last output %q", i.Status, i.LastOutput)
					}
					for _, ask := range []struct {
						args []string
						want string
					}{
						{[]string{"logs", id}, want},
						{[]string{"logs", "-f", id}, want},
						{[]string{"logs", "-n", "2", id}, "5000\nlast words\n"},
						{[]string{"command", "logs", id, cmd}, wantOther},
						{[]string{"command", "logs", "-f", id, cmd}, wantOther},
						{[]string{"command", "logs", "-n", "1", id, cmd}, "last words\n"},
					} {
						if out := l.ok(ask.args...); out != ask.want && (exact || !strings.Contains(out, "last words\n")) {
							t.Errorf("%v printed %d bytes, want %d: … %q", ask.args, len(out), len(ask.want), out[max(0, len(out)-40):])
						}
					}
					if r := l.ctl("diagnostics", "logs", id); !strings.Contains(r.out, "\n4999\n5000\nlast words\n") {
						t.Errorf("diagnostics logs: %d, %q, %q", r.code, r.out[max(0, len(r.out)-60):], r.errout)
					}
					l.wants(l.ctl("command", "logs", id, strings.Repeat("0", 32)), 125, "no output of command")
					l.ok("rm", id)
				})
			}
		})
	}
}

// awaitEnd waits until a sandbox has ended, however.
func (l *lab) awaitEnd(t *testing.T, id string) {
	t.Helper()
	eventually(t, patience, func() error {
		if i := l.inspect(id); i.Status.State != wire.Failed && i.Status.State != wire.Terminated {
			return fmt.Errorf("%+v", i.Status)
		}
		return nil
	})
}

// killGuest kills all processes of a sandbox.
func (l *lab) killGuest(id string) {
	l.Helper()
	pids := l.pids(id)
	if len(pids) == 0 {
		l.Fatalf("no process of sandbox %s was found", id)
	}
	for _, p := range pids {
		pid, err := strconv.Atoi(p)
		if err == nil {
			err = syscall.Kill(pid, syscall.SIGKILL)
		}
		if err != nil && !errors.Is(err, syscall.ESRCH) { // its parent took it along
			l.Fatalf("kill process %s of sandbox %s: %v", p, id, err)
		}
	}
}
