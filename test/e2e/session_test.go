package e2e_test

import (
	"encoding/json"
	"fmt"
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
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+h.TCP+"/v1/sandboxes/"+sandbox+"/proxy/44772"+path,
		strings.NewReader(body))
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
// between runs, and so does a run that nobody listens to any more. A context of code
// does, too.
func TestSessionSurvivesDaemon(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	daemontest.Image(t, h.Daemon, "python")
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			r := spec(runtime)
			r.Image.URI = "python"
			sb := h.create(t, r)
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
			ended := h.cellGoesOn(t, sb.ID)
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
			// A shell that cannot answer any more is replaced, not waited for.
			if got := run("set -n"); !strings.Contains(got, "cannot report how the command ended") {
				t.Error(got)
			}
			if got := run("echo on"); !strings.Contains(got, `"text":"on`) {
				t.Error(got)
			}
			ended()
			h.ask(t, sb.ID, "DELETE", "/session/"+made.ID, "")
			tellSession(&lab{host: h, T: t, runtime: runtime}, sb.ID)
			h.deleteAll(t)
		})
	}
}

// cellGoesOn starts code in a context of python that has a variable, and waits until it
// runs. What it returns, to be called when another daemon is there, has the code end and
// looks at what it and the variable have become.
func (h host) cellGoesOn(t *testing.T, sandbox string) (ended func()) {
	t.Helper()
	l := &lab{host: h, T: t}
	code := func(context, code string) answer {
		t.Helper()
		b, err := json.Marshal(map[string]any{"code": code, "context": map[string]string{"id": context}})
		if err != nil {
			t.Fatal(err)
		}
		return l.request("POST", "/v1/sandboxes/"+sandbox+"/proxy/44772/code", strings.NewReader(string(b)))
	}
	var made struct{ ID string }
	if err := json.Unmarshal([]byte(h.ask(t, sandbox, "POST", "/code/context", `{"language":"python"}`)), &made); err != nil ||
		made.ID == "" {
		t.Fatal(made, err)
	}
	if a := code(made.ID, "import os\nfor f in 'begun', 'end': os.mkfifo('/tmp/' + f)\nx = 'kept'"); !strings.Contains(a.body,
		"execution_complete") {
		t.Fatal(a)
	}
	broken := make(chan error, 1)
	go func() {
		_, err := l.try("POST", "/v1/sandboxes/"+sandbox+"/proxy/44772/code", strings.NewReader(
			`{"context":{"id":"`+made.ID+`"},"code":"open('/tmp/begun', 'w').close()\ny = open('/tmp/end').read()"}`))
		broken <- err
	}()
	if _, err := h.exec(t.Context(), sandbox, "cat", "/tmp/begun"); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := <-broken; err == nil {
			t.Error("the stream of the code outlived the daemon, or the code did not wait")
		}
		if a := code(made.ID, "x"); a.status != http.StatusInternalServerError || !strings.Contains(a.body, "session is busy") {
			t.Errorf("while the code waits: %d %s", a.status, a.body)
		}
		if _, err := h.exec(t.Context(), sandbox, "sh", "-c", "printf end >/tmp/end"); err != nil {
			t.Fatal(err)
		}
		settles(t, func() error { // nobody is told of its end who did not listen from the beginning
			if a := code(made.ID, "x, y"); a.status != http.StatusOK || !strings.Contains(a.body, "('kept', 'end')") ||
				!strings.Contains(a.body, "execution_complete") {
				return fmt.Errorf("after its end: %d %s", a.status, a.body)
			}
			return nil
		})
	}
}

// tellSession: a session by the command line, which keeps what a shell keeps, also
// over a command that was cut off.
func tellSession(l *lab, id string) {
	s := strings.TrimSpace(l.ok("command", "session", "create", "-w", "/var/new", id))
	run := func(args ...string) result { return l.ctl(append([]string{"command", "session", "run"}, args...)...) }
	if r := run(id, s, "--", `A="it's $HOME"; f() { echo "$A" >&2; return 3; }; pwd`); r != (result{"/var/new\n", "", 0}) {
		l.Errorf("%+v", r)
	}
	l.wants(run("--timeout", "300ms", id, s, "--", "sleep", "60"), 124, "--timeout 300ms")
	if r := run("-w", "/usr", id, s, "f"); r != (result{"", "it's /root\n", 3}) {
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
