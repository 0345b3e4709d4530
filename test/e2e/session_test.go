package e2e_test

import (
	"encoding/json"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
)

// ask sends a request to the agent of a sandbox by TCP, as an SDK does, and
// returns the body of its answer.
func (h host) ask(t *testing.T, sandbox, method, path, body string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+h.TCP+"/v1/sandboxes/"+sandbox+"/proxy/44772"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("OPEN-SANDBOX-API-KEY", daemontest.Key)
	r.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s %s: %s, %v: %s", method, path, resp.Status, err, b)
	}
	return string(b)
}

var eventTimes = regexp.MustCompile(`,"(timestamp|execution_time)":\d+`)

// TestSessionSurvivesDaemon: a shell goes on while no daemon runs, in a run and
// between runs, and so does a run that nobody listens to any more.
func TestSessionSurvivesDaemon(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			sb := h.create(t, spec(runtime))
			var made struct {
				ID string `json:"session_id"`
			}
			if err := json.Unmarshal([]byte(h.ask(t, sb.ID, "POST", "/session", "")), &made); err != nil || made.ID == "" {
				t.Fatal(made, err)
			}
			run := func(command string) string {
				t.Helper()
				b, err := json.Marshal(map[string]any{"command": command, "timeout": 20_000})
				if err != nil {
					t.Fatal(err)
				}
				return eventTimes.ReplaceAllString(h.ask(t, sb.ID, "POST", "/session/"+made.ID+"/run", string(b)), "")
			}
			run("cd /usr; A=kept; f() { echo $A; }; mkfifo /tmp/go; (read x </tmp/go; touch /tmp/gone) &")
			h.Kill()
			if err := h.TryStart(); err != nil {
				t.Fatal(err)
			}
			got := run("f; pwd; echo >/tmp/go; wait; ls /tmp/gone; exit 3")
			for _, want := range []string{`"text":"kept`, `"text":"/usr`, `"text":"/tmp/gone`, `"evalue":"3"`} {
				if !strings.Contains(got, want) {
					t.Errorf("no %s in %s", want, got)
				}
			}
			if got := run("f"); !strings.Contains(got, `"text":"kept`) {
				t.Error(got)
			}
			// A shell that can not answer any more is replaced, not waited for.
			if got := run("set -n"); !strings.Contains(got, "can not say how the command ended") {
				t.Error(got)
			}
			if got := run("echo on"); !strings.Contains(got, `"text":"on`) {
				t.Error(got)
			}
			h.ask(t, sb.ID, "DELETE", "/session/"+made.ID, "")
			tellSession(&lab{host: h, T: t, runtime: runtime}, sb.ID)
		})
	}
}

// tellSession: a session by the command line, which keeps what a shell keeps, also
// over a command that was cut off.
func tellSession(l *lab, id string) {
	s := strings.TrimSpace(l.ok("command", "session", "create", "-w", "/var/new", id))
	run := func(args ...string) told { return l.ctl(append([]string{"command", "session", "run"}, args...)...) }
	if r := run(id, s, "--", `A="it's $HOME"; f() { echo "$A" >&2; return 3; }; pwd`); r != (told{"/var/new\n", "", 0}) {
		l.Errorf("%+v", r)
	}
	l.wants(run("--timeout", "300ms", id, s, "--", "sleep", "60"), 124, "--timeout 300ms")
	if r := run("-w", "/usr", id, s, "f"); r != (told{"", "it's /root\n", 3}) {
		l.Errorf("%+v", r)
	}
	if r := run(id, s, "--", "printf", "%s|", "a b", "$A", "it's"); r.out != "a b|$A|it's|" {
		l.Errorf("words became %+v", r)
	}
	if out := l.ok("command", "session", "rm", id, s); out != s+"\n" {
		l.Errorf("rm printed %q", out)
	}
	l.wants(run(id, s, "true"), 125, "no session has the id")
}
