package e2e_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// tellReasons: a sandbox that ends says why in the API, to ps, and as an event.
// What else can end one is told where it happens: restarts and reboots.
func tellReasons(t *testing.T, l *lab) {
	forks := "python3 -c '\nimport os, signal, time\ntry:\n  while os.fork(): pass\n  signal.pause()\nexcept OSError: time.sleep(0.2); " +
		"raise'"
	for name, c := range map[string]struct {
		args    []string
		reason  string
		message string
	}{
		"exited": {[]string{"base", "--", "sh", "-c", "exit 3"}, "exited", "code 3"},
		"killed": {[]string{"base", "--", "sh", "-c", "kill -9 $$"}, "killed", "SIGKILL"},
		"oom":    {[]string{"--memory", "128Mi", "python", "--", "python3", "-c", eat}, "oom", "128 MiB"},
		"disk_full": {
			[]string{"--disk", "32Mi", "base", "--", "dd", "if=/dev/urandom", "of=/var/fill", "bs=64k", "count=1000"},
			"disk_full", "32 MiB",
		},
		"pids_limit": {[]string{"--pids", "32", "python", "--", "sh", "-c", forks}, "pids_limit", "limit of 32"},
	} {
		t.Run(name, func(t *testing.T) {
			l := &lab{host: l.host, T: t, runtime: l.runtime}
			seen := l.events(t)
			r := l.ctl(append([]string{"create", "--runtime", l.runtime}, c.args...)...)
			id := strings.TrimSpace(r.out)
			if id == "" {
				t.Fatalf("create printed no id: %+v", r)
			}
			l.awaitState(t, id, wire.Failed, 30*time.Second)
			i := l.inspect(id)
			if i.Status.Reason != c.reason || !strings.Contains(i.Status.Message, c.message) {
				t.Errorf("status %+v, want %s with %q", i.Status, c.reason, c.message)
			}
			if ps := l.ok("ps", "-a", "--no-trunc"); !strings.Contains(ps, "Failed ("+c.reason+")") {
				t.Errorf("ps -a printed %s", ps)
			}
			seen(t, id, "ended", c.reason)
			l.ok("rm", "-f", id)
		})
	}
	t.Run("expired", func(t *testing.T) {
		l := &lab{host: l.host, T: t, runtime: l.runtime}
		seen := l.events(t)
		id := l.make("--no-wait", "base", "--timeout", "2s") // a slow host has not made it by then
		seen(t, id, "deleted", "expired")
	})
}

// events subscribes, and returns what waits for an event.
func (l *lab) events(t *testing.T) func(t *testing.T, id, kind, reason string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+l.TCP+"/v1/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(wire.HeaderAPIKey, daemontest.Key)
	resp, err := http.DefaultClient.Do(r) // it answers when it listens: what is made then is told
	if err != nil {
		t.Fatal(err)
	}
	all := make(chan wire.Event, 1000)
	go func() {
		defer close(all)
		defer resp.Body.Close()
		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			var ev wire.Event
			if data, ok := strings.CutPrefix(lines.Text(), "data:"); ok && json.Unmarshal([]byte(data), &ev) == nil {
				all <- ev
			}
		}
	}()
	return func(t *testing.T, id, kind, reason string) {
		t.Helper()
		for ev := range all {
			if ev.ID == id && ev.Type == kind {
				if ev.Reason != reason {
					t.Errorf("event %+v, want %s", ev, reason)
				}
				return
			}
		}
		t.Errorf("no event %s of %s came", kind, id)
	}
}

// tellFailures: a command that a limit stops says which, on the command line
// and in the stream that SDKs read, where exit code and name stay as they are.
func tellFailures(t *testing.T, l *lab) {
	id := l.make("python", "--memory", "128Mi", "--disk", "32Mi", "--pids", "32")
	const fill = "dd if=/dev/urandom of=/var/fill bs=64k count=1000"
	l.wants(l.ctl("exec", id, "--", "sh", "-c", fill), 1, "disk_full", "32Mi", "--disk")
	if ev := l.failure(id, fill); ev.Value != "1" || !strings.Contains(strings.Join(ev.Traceback, "|"),
		"disk_full: the disk limit of the sandbox, 32Mi") {
		t.Errorf("event %+v", ev)
	}
	if out := l.ok("exec", id, "--", "seq", "1", "200000"); !strings.HasSuffix(out, "\n199999\n200000\n") {
		t.Errorf("the end of what a command says while the disk is full: %q", out[max(0, len(out)-80):])
	}
	l.ok("exec", id, "--", "rm", "/var/fill")
	// A file system in memory that is full is no full disk.
	r := l.ctl("exec", id, "--", "dd", "if=/dev/zero", "of=/run/fill", "bs=64k", "count=1000")
	if l.wants(r, 1, "No space left"); strings.Contains(r.errout, "disk_full") {
		t.Errorf("/run is taken for the disk: %s", r.errout)
	}
	l.ok("exec", id, "--", "rm", "/run/fill")

	const forks = `python3 -c "
import os, signal
while os.fork(): pass
signal.pause()"`
	if ev := l.failure(id, forks); ev.Value != "1" ||
		!strings.Contains(strings.Join(ev.Traceback, "|"), "pids_limit: the sandbox may have 32 processes") {
		t.Errorf("event %+v", ev)
	}
	l.ok("rm", "-f", id)

	id = l.make("python", "--memory", "128Mi")
	ev := l.failure(id, fmt.Sprintf("python3 -c %q", eat))
	if got := strings.Join(ev.Traceback, "|"); ev.Value != "-1" || !strings.Contains(got, "signal: killed|oom: command was killed: out "+
		"of memory (sandbox limit 128 MiB)") {
		t.Errorf("event %+v", ev)
	}
	if l.runtime == "runsc" {
		return // that has ended the sandbox: see tellMemory
	}
	// Nobody watches one in the background; it is asked for.
	command := strings.TrimSpace(l.ok("exec", "-d", id, "--", "python3", "-c", eat))
	l.ctl("command", "logs", "-f", id, command)
	if out := l.ok("command", "status", id, command); !strings.Contains(out, `"reason": "oom"`) || !strings.Contains(out, "out of memory") {
		t.Errorf("a command in the background that went over the limit: %s", out)
	}
	command = strings.TrimSpace(l.ok("exec", "-d", id, "--", "sleep", "1000"))
	l.ok("command", "kill", "-s", "SIGKILL", id, command)
	l.ctl("command", "logs", "-f", id, command) // until it has ended
	if out := l.ok("command", "status", id, command); !strings.Contains(out, `"reason": "killed"`) {
		t.Errorf("a command in the background that was killed: %s", out)
	}
}

// An eventError is what the stream of a command says of its failure.
type eventError struct {
	Value     string   `json:"evalue"`
	Traceback []string `json:"traceback"`
}

// failure runs a command as SDKs do and returns the error that ends its stream.
func (l *lab) failure(id, command string) eventError {
	l.Helper()
	body, err := json.Marshal(map[string]string{"command": command})
	if err != nil {
		l.Fatal(err)
	}
	a := l.request("POST", "/v1/sandboxes/"+id+"/proxy/44772/command", strings.NewReader(string(body)), "Content-Type", "application/json")
	var ev struct {
		Type  string
		Error eventError
	}
	lines := strings.Split(strings.TrimSpace(a.body), "\n")
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &ev); err != nil || ev.Type != "error" {
		l.Errorf("the stream of %q ends with %.500q, %v", command, lines[len(lines)-1], err)
	}
	return ev.Error
}
