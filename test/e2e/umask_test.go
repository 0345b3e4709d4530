package e2e_test

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
)

// TestUmask: what a guest sees has the modes that it should, also where the
// daemon was started with a narrow umask, as by its unit.
func TestUmask(t *testing.T) {
	h := newHost(t, daemontest.Options{Wrap: []string{"sh", "-c", `umask 077; exec "$@"`, "sh"}})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			l := &lab{host: h, T: t, runtime: runtime}
			id := l.make("base")
			const look = `stat -c %a / /tmp /etc /run; cat /etc/hosts /etc/resolv.conf /etc/hostname >/dev/null && echo hello >/tmp/mine && cat /tmp/mine`
			if out := l.ok("exec", "-u", "nobody", id, "--", "sh", "-c", look); out != "755\n1777\n755\n755\nhello\n" {
				t.Errorf("%q", out)
			}
			snap := l.ok("snapshot", "create", id)
			second := l.make("--from", strings.TrimSpace(snap))
			if out := l.ok("exec", "-u", "nobody", second, "--", "cat", "/tmp/mine"); out != "hello\n" {
				t.Errorf("%q", out)
			}
			l.ok("rm", "-f", id, second)
			l.ok("snapshot", "rm", strings.TrimSpace(snap))
		})
	}
	h.deleteAll(t)
}
