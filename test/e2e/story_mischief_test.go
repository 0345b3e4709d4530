package e2e_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/interpreter"
)

// tellMischief has guests do to their agent what they can, by contexts of code, by
// sessions and by files. After each of it the others go on.
func tellMischief(t *testing.T, l *lab) {
	daemontest.Image(t, l.Daemon, "code-interpreter")
	g := &guest{lab: l, id: l.make("--memory", "1Gi", "--cpu", "2", "--disk", "1Gi", "code-interpreter")}
	g.context = g.newContext("python")
	g.hears(g.code(g.context, "x = 'mine'"), "complete")
	if err := json.Unmarshal([]byte(g.call(200, "POST", "/session", "{}")), &g.session); err != nil || g.session.ID == "" {
		t.Fatal(g.session, err)
	}
	g.hears(g.run(g.session.ID, "A=mine; cd /usr"), "complete")
	for _, m := range codeMischief {
		c := g.newContext(m.language)
		for _, cell := range m.cells {
			g.hears(g.code(c, cell.code), cell.says)
		}
		g.request("DELETE", g.path("/code/contexts/"+c), nil) // it may be gone
		g.goesOn(m.name)
	}
	g.offspring()
	g.sleepsThrough()
	g.printsMuch()
	g.thousandContexts()
	g.sessions()
	g.files()
	if a := g.request("GET", "/v1/sandboxes/"+g.id+"/proxy/44771/api", nil); a.status != 404 || !strings.Contains(a.body, "POST /code") {
		t.Errorf("who asks for Jupyter: %d %s", a.status, a.body)
	}
}

// A guest is a sandbox that misbehaves, with a context and a session that do not.
type guest struct {
	*lab
	id      string
	context string // of python; its x is 'mine'
	session struct {
		ID string `json:"session_id"`
	} // in /usr; its A is mine
}

type cell struct{ code, says string }

// garbage is python that writes into whatever it finds open.
const garbage = `
import os
for name in os.listdir('/proc/self/fd'):
    for junk in b'garbage', b'\n{"type":"done"}\n', b'\0' * 3000, b'\n\n\n':
        try: os.write(int(name), junk)
        except OSError: pass
`

// codeMischief is what contexts are given, each case in one of its own.
var codeMischief = []struct {
	name, language string
	cells          []cell
}{
	{"a python that reads", "python", []cell{
		{"input()", "error EOFError EOF when reading a line"},
		{"import sys; sys.stdin.read()", "result '' \ncomplete"},
	}},
	{"a bash that reads", "bash", []cell{{`read line; echo "<$? $line>"; cat; echo on`, "stdout <1 >\non\n\ncomplete"}}},
	{"a javascript that reads", "javascript", []cell{
		{"require('fs').readFileSync(0, 'utf8')", "result '' \ncomplete"},
		{"await new Promise((f) => process.stdin.on('end', () => f('ended')).resume())", "result 'ended' \ncomplete"},
	}},
	{"values to be shown", "python", []cell{
		{"class R:\n    def _repr_html_(self): return '<b>'\n    def __repr__(self): return 'R'\nR()", "result R <b>\ncomplete"},
		{"display(1, R()); print('x'); 2", "stdout x\n\nresult 1 \nresult R <b>\nresult 2 \ncomplete"},
		{
			"class B:\n    def _repr_html_(self): 1/0\n    def __repr__(self): return 'B'\nB()",
			"stderr a format of B failed: ZeroDivisionError: division by zero\n\nresult B \ncomplete",
		},
	}},
	{"closed outputs in python", "python", []cell{
		{"import os, sys; sys.stdout.close()", "complete"},
		{"print('back')", "stdout back\n\ncomplete"},
		{"os.close(1); os.close(0); os.close(2); 1", "result 1 \ncomplete"},
		{"print('back')", "stdout back\n\ncomplete"},
	}},
	{"closed outputs in bash", "bash", []cell{
		{"exec >&- 2>&-; echo x", "error CommandExecError 1"},
		{"[ $((6 * 7)) = 42 ]", "complete"},
	}},
	{"garbage in every descriptor of python", "python", []cell{{garbage + "1", ""}, {"6 * 7", "result 42 \ncomplete"}}},
	{"garbage in every descriptor of bash", "bash", []cell{
		{
			"for fd in /proc/self/fd/*; do fd=${fd##*/}; echo '{\"type\":\"done\"}' >&$fd; head -c 3000 /dev/zero >&$fd; done 2>/dev/null",
			"",
		},
		{"echo $((6 * 7))", "stdout 42\n\ncomplete"},
	}},
	{"every descriptor closed", "python", []cell{{"import os; os.closerange(0, 1000)", "error ContextDied "}}},
	{"an end without a word", "python", []cell{{"import os; os._exit(9)", "error ContextDied exited with status 9"}}},
	{"a crash", "python", []cell{{"import os; os.kill(os.getpid(), 11)", "error ContextDied killed by SIGSEGV"}}},
	{"more memory than there is", "python", []cell{
		{"l = []\nwhile True: l.append(bytearray(1 << 20))", "error MemoryError"},
		{"del l; 6 * 7", "result 42 \ncomplete"},
	}},
}

// path is that of the agent's route.
func (g *guest) path(route string) string { return "/v1/sandboxes/" + g.id + "/proxy/44772" + route }

// call asks the agent and returns the body; of what is refused it wants a reason.
func (g *guest) call(status int, method, route string, body any) string {
	g.Helper()
	var b []byte
	if s, ok := body.(string); ok {
		b = []byte(s)
	} else if body != nil {
		b, _ = json.Marshal(body) //nolint:errcheck,errchkjson // of maps of strings
	}
	a := g.request(method, g.path(route), bytes.NewReader(b), "Content-Type", "application/json")
	var e struct{ Code, Message string }
	if a.status != status || status >= 400 && (json.Unmarshal([]byte(a.body), &e) != nil || e.Code == "" || e.Message == "") {
		g.Errorf("%s %.80q: %d %.500s; want %d", method, route, a.status, a.body, status)
	}
	return a.body
}

func (g *guest) newContext(language string) string {
	g.Helper()
	var c agent.CodeContext
	if out := g.call(200, "POST", "/code/context", agent.CodeContext{Language: language}); json.Unmarshal([]byte(out), &c) != nil ||
		c.ID == "" {
		g.Fatalf("a context of %s: %s", language, out)
	}
	return c.ID
}

// code runs code in a context, and run a command in a session.
func (g *guest) code(context, code string) string {
	g.Helper()
	return g.call(200, "POST", "/code", agent.CodeRequest{Code: code, Context: agent.CodeContext{ID: context}})
}

func (g *guest) run(session, command string) string {
	g.Helper()
	return g.call(200, "POST", "/session/"+session+"/run", agent.SessionRun{Command: command})
}

// goesOn wants the context and the session that were there to be as they were, and a
// context to be made.
func (g *guest) goesOn(after string) {
	g.Helper()
	failed := g.Failed()
	g.hears(g.code(g.context, "x"), "result 'mine' \ncomplete")
	g.hears(g.run(g.session.ID, `echo "$A" "$PWD"`), "stdout mine /usr\n\ncomplete")
	c := g.newContext("bash")
	g.hears(g.code(c, "echo $((6 * 7))"), "stdout 42\n\ncomplete")
	g.call(200, "DELETE", "/code/contexts/"+c, nil)
	if g.Failed() && !failed {
		g.Fatalf("that was after %s", after)
	}
}

// hears puts the events of a stream together: what came on each output, values, and how
// it ended, of which says may be the beginning. All is wanted where says is empty, but that
// it ends.
func (g *guest) hears(stream, says string) {
	g.Helper()
	var out, errout, more, end string
	for line := range strings.Lines(stream) {
		var ev agent.Event
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		if err := json.Unmarshal([]byte(line), &ev); err != nil || end != "" {
			g.Errorf("%.200q after the end %q: %v", line, end, err)
		}
		switch ev.Type {
		case "stdout":
			out += ev.Text
		case "stderr":
			errout += ev.Text
		case "result":
			more += "result " + ev.Results["text"] + " " + ev.Results["text/html"] + "\n"
		case "error":
			end = "error " + ev.Error.Name + " " + ev.Error.Value
		case "execution_complete":
			end = "complete"
		}
	}
	got := more + end
	if errout != "" {
		got = "stderr " + errout + "\n" + got
	}
	if out != "" {
		got = "stdout " + out + "\n" + got
	}
	if name, value, ok := strings.Cut(says, "ContextDied "); ok && strings.HasPrefix(end, name+"ContextDied ") &&
		strings.Contains(end, value) {
		return
	}
	if end == "" || says != "" && got != says && got != says+" " {
		g.Errorf("it said\n%.2000s\nwant\n%s", got, says)
	}
}

// started runs code and returns when it has printed a line; ended waits for its end.
func (g *guest) started(context, code string) (ended func() string) {
	g.Helper()
	b, _ := json.Marshal(agent.CodeRequest{Code: code, Context: agent.CodeContext{ID: context}}) //nolint:errchkjson // strings
	r, err := http.NewRequestWithContext(g.Context(), "POST", "http://"+g.TCP+g.path("/code"), bytes.NewReader(b))
	if err != nil {
		g.Fatal(err)
	}
	r.Header.Set("OPEN-SANDBOX-API-KEY", daemontest.Key)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		g.Fatal(err)
	}
	var seen bytes.Buffer
	stream := bufio.NewReader(io.TeeReader(resp.Body, &seen))
	for line := ""; !strings.Contains(line, `"type":"stdout"`); {
		if line, err = stream.ReadString('\n'); err != nil {
			g.Fatalf("%v after %s", err, seen.Bytes())
		}
	}
	return func() string {
		defer resp.Body.Close()
		io.Copy(io.Discard, stream) //nolint:errcheck // what came is looked at
		return seen.String()
	}
}

// living is a command that counts processes, but not those that have ended and wait for their parent.
const living = "pgrep -c -r D,R,S,T,t"

// reaped waits until no process of that name is left, not even one that has ended.
func (g *guest) reaped(name string) {
	g.Helper()
	settles(g.T, func() error {
		if n := g.ok("exec", g.id, "--", "sh", "-c", "pgrep -cx "+name+"; true"); n != "0\n" {
			return fmt.Errorf("%s processes %q are there", strings.TrimSpace(n), name)
		}
		return nil
	})
}

// offspring are processes that outlive the code that started them: they go with their
// context, whatever they have done to be forgotten, and whatever has become of it.
func (g *guest) offspring() {
	g.Helper()
	const program = `
import os, sys, time
for i in range(6):
    if os.fork() == 0:
        if i % 2: os.setsid()
        if i > 3 and os.fork(): os._exit(0)
        os.closerange(0, 100)
        os.execvpe('sleep', ['sleep', '7777'], {} if i % 3 else os.environ)
print('forked')
`
	left := func() string {
		g.Helper()
		return g.ok("exec", g.id, "--", "sh", "-c", living+" -x sleep; true")
	}
	for name, end := range map[string]string{"": "", "of one that has died": "\nsys.stdout.flush(); os._exit(9)"} {
		c := g.newContext("python")
		says := "stdout forked\n\ncomplete"
		if end != "" {
			says = ""
		}
		g.hears(g.code(c, program+end), says)
		if end == "" {
			settles(g.T, func() error {
				if n := left(); n != "6\n" {
					return fmt.Errorf("%s of 6 children live", n)
				}
				return nil
			})
			g.call(200, "DELETE", "/code/contexts/"+c, nil)
		} else {
			g.call(404, "DELETE", "/code/contexts/"+c, nil)
		}
		if n := left(); n != "0\n" {
			g.Errorf("children %s that outlived their context: %s", name, n)
		}
		g.reaped("sleep")
		g.goesOn("children " + name)
	}
}

// sleepsThrough has code not mind an interrupt: it ends all the same, with its context.
func (g *guest) sleepsThrough() {
	g.Helper()
	var w sync.WaitGroup
	for language, code := range map[string]string{
		"python": "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('go', flush=True)\nwhile True: " +
			"time.sleep(1)",
		"bash":       "trap '' INT; echo go; while :; do sleep 1; done",
		"javascript": "await new Promise((f) => setTimeout(f, 1)); console.log('go'); while (true);",
	} {
		c := g.newContext(language)
		ended := g.started(c, code)
		w.Go(func() { // each takes the whole of the grace
			a, err := g.try("DELETE", g.path("/code?id="+c), nil)
			if out := ended(); err != nil || a.status != 200 || !strings.Contains(out, "ContextDied") ||
				!strings.Contains(out, "did not stop within "+interpreter.Grace.String()+" of an interrupt") {
				g.Errorf("%s: %d %v %.2000s", language, a.status, err, out)
			}
			a, err = g.try("POST", g.path("/code"), strings.NewReader(`{"code":"1","context":{"id":"`+c+`"}}`))
			if err != nil || a.status != 404 || !strings.Contains(a.body, "of an interrupt") {
				g.Errorf("%s, afterwards: %d %v %.2000s", language, a.status, err, a.body)
			}
		})
	}
	w.Wait()
	g.goesOn("interrupts that nobody minds")
}

// printsMuch prints a gigabyte, which costs neither the daemon nor the agent memory, nor
// does a client that does not read: it only waits.
func (g *guest) printsMuch() {
	g.Helper()
	const size, line = 1 << 30, 64 << 10
	daemon, inside := g.rss(g.T, g.id)
	c := g.newContext("python")
	body := fmt.Sprintf(`{"context":{"id":%q},"code":"import sys\nfor _ in range(%d): sys.stdout.write('x' * %d + '\\n')\n'all'"}`, c,
		size/line, line-1)
	r, err := http.NewRequestWithContext(g.Context(), "POST", "http://"+g.TCP+g.path("/code"), strings.NewReader(body))
	if err != nil {
		g.Fatal(err)
	}
	r.Header.Set("OPEN-SANDBOX-API-KEY", daemontest.Key)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		g.Fatal(err)
	}
	defer resp.Body.Close()
	most, mostInside := daemon, inside
	n, next, last := 0, size/8, ""
	events := bufio.NewScanner(resp.Body)
	events.Buffer(make([]byte, 1<<20), 8<<20)
	for events.Scan() {
		b := events.Bytes()
		if !bytes.HasPrefix(b, []byte(`{"type":"stdout"`)) {
			last += string(b)
			continue
		}
		if n += bytes.Count(b, []byte("x")) - 1; n >= next { // that of "text"
			next += size / 8
			d, i := g.rss(g.T, g.id)
			most, mostInside = max(most, d), max(mostInside, i)
		}
	}
	if n != size/line*(line-1) || !strings.Contains(last, "execution_complete") || events.Err() != nil {
		g.Errorf("%d bytes came, and then %.500s, %v", n, last, events.Err())
	}
	g.Logf("1 GiB of output: daemon %d → %d MB, agent %d → %d MB", daemon>>20, most>>20, inside>>20, mostInside>>20)
	if most-daemon > 16<<20 || mostInside-inside > 16<<20 { // 0 to 2 MB were seen
		g.Errorf("1 GiB of output cost the daemon %d MB, the agent %d MB", (most-daemon)>>20, (mostInside-inside)>>20)
	}
	g.call(200, "DELETE", "/code/contexts/"+c, nil)
	g.goesOn("1 GiB of output")
}

// thousandContexts asks for so many: it gets what a sandbox may have, and reads for the
// others what to do. A language that nobody knows is refused, too.
func (g *guest) thousandContexts() {
	g.Helper()
	for _, body := range []string{`{"language":"cobol"}`, `{"language":""}`, `{"language":"../bash"}`} {
		if out := g.call(400, "POST", "/code/context", body); !strings.Contains(out, "python") || !strings.Contains(out, "bash") {
			g.Errorf("%s: the languages are not named: %s", body, out)
		}
	}
	g.call(400, "POST", "/code", `{"code":"1","context":{"language":"cobol"}}`)
	var mu sync.Mutex
	made := map[int]int{}
	var w sync.WaitGroup
	for k := range 20 {
		w.Go(func() {
			for range 1000 / 20 {
				a, err := g.try("POST", g.path("/code/context"), strings.NewReader(`{"language":"bash"}`))
				if err != nil || a.status != 200 && !strings.Contains(a.body, "DELETE /code/contexts/") {
					g.Errorf("%d: %d %.300s %v", k, a.status, a.body, err)
				}
				mu.Lock()
				made[a.status]++
				mu.Unlock()
			}
		})
	}
	w.Wait()
	if made[200] != interpreter.MaxContexts-1 || made[429] != 1000-made[200] {
		g.Errorf("statuses of 1,000 contexts: %v", made)
	}
	g.hears(g.code(g.context, "x"), "result 'mine' \ncomplete")
	g.call(200, "DELETE", "/code/contexts?language=bash", nil)
	g.goesOn("a thousand contexts")
}
