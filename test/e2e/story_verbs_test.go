package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"
)

// tellVerbs: docker's words do docker's things to a sandbox that lives.
func tellVerbs(t *testing.T, l *lab) {
	says := func(want string, args ...string) {
		t.Helper()
		if out := l.ok(args...); out != want {
			t.Errorf("%q says %q, want %q", args, out, want)
		}
	}
	id := l.make("--name", "old", "base", "--", "sh", "-c", "exec 2>/dev/null; trap 'echo hup' HUP; echo up; while :; do sleep 0.1; done")
	says("", "rename", "old", "new")
	l.wants(l.ctl("inspect", "old"), 125, "old")
	says(id+" new running\n", "ps", "--filter", "name=new", "--format", "{{.ID}} {{.Names}} {{.State}}")

	settles(t, func() error {
		if out := l.ok("logs", "new"); out != "up\n" {
			return fmt.Errorf("before a signal its output is %q", out)
		}
		return nil
	})
	says("new\n", "kill", "-s", "HUP", "new")
	settles(t, func() error {
		if out := l.ok("logs", "new"); out != "up\nhup\n" {
			return fmt.Errorf("after a signal its output is %q", out)
		}
		return nil
	})
	if out := l.ok("logs", "-t", "-n", "1", "new"); !regexp.MustCompile(`^\d{4}-\d\d-\d\dT[\d:]{8}\.\d{9}Z hup\n$`).MatchString(out) {
		t.Errorf("with times: %q", out)
	}
	says("up\nhup\n", "logs", "--since", "1h", "new")
	says("", "logs", "--since", "2200-01-01", "new")
	if out := l.ok("command", "ls", "new"); !strings.Contains(out, "entrypoint") || !strings.Contains(out, "running") {
		t.Errorf("commands: %s", out)
	}

	l.ok("exec", "new", "--", "sh", "-c", "echo kept >/note; mkfifo /pipe; rm /etc/debian_version")
	l.ok("commit", "new", "verbs/image:1")
	says("", "tag", "verbs/image:1", "verbs/image:2")
	for _, runtime := range runtimes { // either has the files of either
		says("kept\ngone\n", "run", "--runtime", runtime, "verbs/image:2", "sh", "-c",
			"cat /note; ls /pipe /etc/debian_version 2>/dev/null || echo gone")
	}
	says("Untagged: verbs/image:1\n", "rmi", "verbs/image:1")
	if out := l.ok("rmi", "verbs/image:2"); !regexp.MustCompile(`^Untagged: verbs/image:2\nDeleted: sha256:[0-9a-f]{64}\n$`).MatchString(out) {
		t.Errorf("rmi: %q", out)
	}
	says("", "snapshot", "ls", "-q")

	says("new\n", "restart", "-t", "0", "new")
	says("kept\n", "exec", "new", "--", "cat", "/note")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	wait := l.command(ctx, "wait", "new")
	var out bytes.Buffer
	wait.Stdout = &out
	if err := wait.Start(); err != nil {
		t.Fatal(err)
	}
	says("new\n", "kill", "new")
	if err := wait.Wait(); err != nil || out.String() != "137\n" {
		t.Errorf("wait: %q, %v", out.String(), err)
	}
	says("137\n", "wait", id)

	events := l.command(ctx, "events", "--since", "1h")
	past, err := events.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := events.Start(); err != nil {
		t.Fatal(err)
	}
	var seen []byte
	for b := make([]byte, 4096); !bytes.Contains(seen, []byte(id+" renamed new")); {
		n, err := past.Read(b)
		if seen = append(seen, b[:n]...); err != nil {
			t.Errorf("past events: %v after %q", err, seen)
			break
		}
	}
	cancel()
	events.Wait() //nolint:errcheck // it was killed
}
