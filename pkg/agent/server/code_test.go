package server

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/interpreter"
)

// newCodeEnv is an agent whose contexts find the programs of this host.
func newCodeEnv(t *testing.T) *env {
	t.Helper()
	e := newEnvWith(t, agent.Bootstrap{Env: map[string]string{
		"PATH": os.Getenv("PATH"), "HOME": t.TempDir(),
		"NODE_PATH": os.Getenv("NODE_PATH"),
	}})
	e.s.code.contexts.Grace = 300 * time.Millisecond
	t.Cleanup(func() {
		for _, c := range e.s.code.contexts.List("") {
			e.s.code.contexts.Remove(c.ID) //nolint:errcheck // gone is what is wanted
		}
	})
	return e
}

func (e *env) context(language string) agent.CodeContext {
	e.Helper()
	var c agent.CodeContext
	out := e.call(http.StatusOK, "POST", "/code/context", agent.CodeContext{Language: language})
	if err := json.Unmarshal([]byte(out), &c); err != nil || c.ID == "" || c.Language != language || c.Cwd != e.dir {
		e.Fatalf("%s: %+v %v", out, c, err)
	}
	return c
}

// cell runs code and returns its events one a line, without init, pings and
// counts; chunks of one stream that follow one another are put together.
func (e *env) cell(c agent.CodeContext, code string) string {
	e.Helper()
	return e.cellEvents(e.call(http.StatusOK, "POST", "/code",
		agent.CodeRequest{Code: code, Context: agent.CodeContext{ID: c.ID, Language: c.Language}}))
}

func (e *env) cellEvents(out string) string {
	e.Helper()
	var lines []string
	last, text := "", ""
	flush := func() {
		if last != "" {
			lines = append(lines, last+" "+strconv.Quote(text))
		}
		last, text = "", ""
	}
	if !strings.HasSuffix(out, "}\n\n") {
		e.Errorf("the stream does not end with a blank line: %.200q", out)
	}
	for i, chunk := range strings.Split(strings.TrimSuffix(out, "\n\n"), "\n\n") {
		var ev agent.Event
		if err := json.Unmarshal([]byte(chunk), &ev); err != nil || ev.Timestamp == 0 {
			e.Errorf("event %.200q: %v", chunk, err)
		}
		if (i == 0) != (ev.Type == "init") || (i == 2) != (ev.Type == "execution_count") {
			e.Errorf("event %d is %s", i, ev.Type)
		}
		if ev.Type != last {
			flush()
		}
		switch ev.Type {
		case "stdout", "stderr":
			last, text = ev.Type, text+ev.Text
		case "result":
			if ev.Results["text"] != ev.Results["text/plain"] {
				e.Errorf("two texts: %.200q", chunk)
			}
			line := "result " + strconv.Quote(ev.Results["text"])
			for _, mime := range []string{"text/html", "text/markdown", "image/png", "image/svg+xml", "application/json"} {
				if v, ok := ev.Results[mime]; ok {
					if len(v) > 60 {
						v = v[:10] + "…"
					}
					line += " " + mime + "=" + v
				}
			}
			lines = append(lines, line)
		case "error":
			lines = append(lines, "error "+ev.Error.Name+" "+strconv.Quote(ev.Error.Value))
		case "execution_complete":
			lines = append(lines, "complete")
		}
	}
	flush()
	return strings.Join(lines, "\n")
}

type cellCase struct{ code, want string }

// inOrder runs cells in one context and compares what each says.
func (e *env) inOrder(c agent.CodeContext, cells []cellCase) {
	e.Helper()
	for _, x := range cells {
		if got := e.cell(c, x.code); got != x.want {
			e.Errorf("%s:\n%s\nwant\n%s", x.code, got, x.want)
		}
	}
}

func TestCodePython(t *testing.T) {
	e := newCodeEnv(t)
	c := e.context("python")
	e.inOrder(c, []cellCase{
		{"1+1", "result \"2\"\ncomplete"},
		{"x = 41", "complete"},
		{"x + 1", "result \"42\"\ncomplete"},
		{"_", "result \"42\"\ncomplete"},
		{"x;", "complete"},
		{"'a'", "result \"'a'\"\ncomplete"},
		{"None", "complete"},
		{"# nothing", "complete"},
		{"print('a'); print('b', end=''); 'c'", "stdout \"a\\nb\"\nresult \"'c'\"\ncomplete"},
		{"import sys; print('e', file=sys.stderr)", "stderr \"e\\n\"\ncomplete"},
		{"print('ü€𝄞\\u2028\\x85')", "stdout \"ü€𝄞\\u2028\\u0085\\n\"\ncomplete"},
		{"import os; os.write(1, b'\\xff\\n')", "stdout \"\ufffd\\n\"\nresult \"2\"\ncomplete"},
		{"import asyncio\nasync def f(n):\n    await asyncio.sleep(0.001)\n    return n\nawait f(3)", "result \"3\"\ncomplete"},
		{"[await f(i) for i in range(3)]", "result \"[0, 1, 2]\" application/json=[0, 1, 2]\ncomplete"},
		{"asyncio.run(f(5))", "result \"5\"\ncomplete"},
		{"from __future__ import annotations", "complete"},
		{"def g(a: Nowhere): pass\ng.__annotations__['a']", "result \"'Nowhere'\"\ncomplete"},
		{"nope", "error NameError \"name 'nope' is not defined\""},
		{"input()", "error EOFError \"EOF when reading a line\""},
		{"sys.exit(3)", "error SystemExit \"3\""},
		{"class R:\n    def _repr_html_(self): return '<b>'\n    def _repr_png_(self): return b'png'\n    def __repr__(self): return " +
			"'R'\nR()", "result \"R\" text/html=<b> image/png=cG5n\ncomplete"},
		{"R", "result \"<class '__main__.R'>\"\ncomplete"},
		{"display(1, R()); print('x'); 2", "result \"1\"\nresult \"R\" text/html=<b> image/png=cG5n\nstdout \"x\\n\"\nresult " +
			"\"2\"\ncomplete"},
		{"display({'text/markdown': '*m*'}, raw=True)", "result \"\" text/markdown=*m*\ncomplete"},
		{"class M:\n    def _repr_mimebundle_(self, include=None, exclude=None): return {'text/plain': 'plain', 'application/json': " +
			"{'a': 1}}, {}\nM()", "result \"plain\" application/json={\"a\": 1}\ncomplete"},
		{"class B:\n    def __repr__(self): 1/0\nB()", "error ZeroDivisionError \"division by zero\""},
		{
			"import pickle, __main__; __main__.x, __name__, pickle.loads(pickle.dumps(R)) is R",
			"result \"(41, '__main__', True)\"\ncomplete",
		},
		{"!echo shell", "stdout \"shell\\n\"\nresult \"CompletedProcess(args='echo shell', returncode=0)\"\ncomplete"},
		{"def h(", "error SyntaxError \"'(' was never closed (<cell 29>, line 1)\""},
		{"os.getcwd() == " + strconv.Quote(e.dir), "result \"True\"\ncomplete"},
		{"class Huge:\n    def __repr__(self): return 'x' * (5 << 20)\nlen(repr(Huge()))", "result \"5242880\"\ncomplete"},
	})
	if got := e.cell(c, "Huge()"); len(got) < 1<<20 || len(got) > 1<<20+200 || !strings.Contains(got, "(5242880 characters in all)") {
		t.Errorf("a huge value: %d bytes, %.100s", len(got), got)
	}
}

// A traceback shows the lines of the cell, and of cells before, and nothing of
// the driver.
func TestCodePythonTraceback(t *testing.T) {
	e := newCodeEnv(t)
	c := e.context("python")
	e.cell(c, "def f():\n    return 1 / 0  # here")
	out := e.call(200, "POST", "/code", agent.CodeRequest{Code: "x = 1\nf()", Context: c})
	var ev agent.Event
	events := strings.Split(strings.TrimSpace(out), "\n\n")
	if err := json.Unmarshal([]byte(events[len(events)-1]), &ev); err != nil || ev.Error == nil {
		t.Fatal(out)
	}
	tb := strings.Join(ev.Error.Traceback, "\n")
	for _, want := range []string{
		"Traceback (most recent call last):", `File "<cell 2>", line 2, in <module>`,
		"    f()", `File "<cell 1>", line 2, in f`, "return 1 / 0  # here", "ZeroDivisionError: division by zero",
	} {
		if !strings.Contains(tb, want) {
			t.Errorf("no %q in\n%s", want, tb)
		}
	}
	if strings.Contains(tb, "sandboxd") {
		t.Errorf("the driver shows:\n%s", tb)
	}
}

// Where figures and data frames can be made they are shown: see the story of
// test/compat for that. Here a module stands for the parts that the driver calls.
func TestCodePythonFigures(t *testing.T) {
	e := newCodeEnv(t)
	dir := e.dir + "/matplotlib"
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"__init__.py": "", "figure.py": `
class Figure:
    def savefig(self, out, format, bbox_inches): out.write(b"<svg/>" if format == "svg" else b"PNG")
    def __repr__(self): return "<Figure>"
`, "_pylab_helpers.py": `
import types
class Gcf:
    figs = []
    @classmethod
    def get_all_fig_managers(cls): return [types.SimpleNamespace(canvas=types.SimpleNamespace(figure=f)) for f in cls.figs]
    @classmethod
    def destroy_all(cls): cls.figs.clear()
    @classmethod
    def destroy_fig(cls, f): cls.figs[:] = [o for o in cls.figs if o is not f]
`, "pyplot.py": `
from matplotlib import figure, _pylab_helpers
def switch_backend(name): assert name == "agg"
def show(): raise RuntimeError("nothing can be shown")
def plot():
    f = figure.Figure()
    _pylab_helpers.Gcf.figs.append(f)
    return f
`,
	} {
		if err := os.WriteFile(dir+"/"+name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	figure := "result \"<Figure>\" image/png=UE5H image/svg+xml=<svg/>\n"
	e.inOrder(e.context("python"), []cellCase{
		{"import matplotlib.pyplot as plt\nplt.plot(); plt.show(); print('after')", figure + "stdout \"after\\n\"\ncomplete"},
		{"f = plt.plot()\n1", "result \"1\"\n" + figure + "complete"},
		{"plt.plot()", figure + "complete"},
		{"1", "result \"1\"\ncomplete"},
	})
}

func TestCodeBash(t *testing.T) {
	e := newCodeEnv(t)
	c := e.context("bash")
	e.inOrder(c, []cellCase{
		{"echo $((6*7))", "stdout \"42\\n\"\ncomplete"},
		{"x='a  b'; f() { echo \"f $x $1\"; }; alias hi='echo aliased'; cd /usr; declare -A m=([k]=v)", "complete"},
		{"f 1; hi; pwd; echo ${m[k]}", "stdout \"f a  b 1\\naliased\\n/usr\\nv\\n\"\ncomplete"},
		{"echo err >&2; false", "stderr \"err\\n\"\nerror CommandExecError \"1\""},
		{"(exit 7)", "error CommandExecError \"7\""},
		{"read line; echo \"<$line>\"", "stdout \"<>\\n\"\ncomplete"},
		{"cat", "complete"},
		{"set -u; echo $nope", "stderr \"bash: nope: unbound variable\\n\"\nerror CommandExecError \"1\""},
		{"set +u; echo '!bang' \"!x\" \\\\ \"it's\" $'\\t|'", "stdout \"!bang !x \\\\ it's \\t|\\n\"\ncomplete"},
		{"echo ü | cat\n\n# comment\nfor i in 1 2; do\n  echo $i\ndone", "stdout \"ü\\n1\\n2\\n\"\ncomplete"},
		{"printf 'a\\nb'", "stdout \"a\\nb\"\ncomplete"},
		{"sh -c 'kill -9 $$'; sh -c 'kill -INT $$'; sh -c 'kill -SEGV $$'; echo $?", "stdout \"139\\n\"\ncomplete"},
		{"sh -c 'kill -9 $$' | cat; (kill -9 $BASHPID); echo $? ${LINES-} ${COLUMNS-}", "stdout \"137\\n\"\ncomplete"},
		{"[ -t 0 ] || [ -t 1 ] || [ -t 2 ] || ls -l /proc/self/fd | grep pts", "error CommandExecError \"1\""},
		{"ls -l /proc/self/fd | grep -c socket", "stdout \"0\\n\"\nerror CommandExecError \"1\""},
	})
	if got := e.cell(c, "if"); !strings.Contains(got, "syntax error") || !strings.HasSuffix(got, "error CommandExecError \"2\"") {
		t.Error(got)
	}
	e.inOrder(c, []cellCase{{"pwd", "stdout \"/usr\\n\"\ncomplete"}})
	if got := e.cell(c, "exit 3"); !strings.Contains(got, "error ContextDied ") || !strings.Contains(got, "exited with status 3") {
		t.Error(got)
	}
}

// started runs code, and returns what it says later, once it printed a line.
func (e *env) started(c agent.CodeContext, code string) (rest func() string) {
	e.Helper()
	body, _ := json.Marshal(agent.CodeRequest{Code: code, Context: c})
	resp, err := e.http.Client().Do(e.request("POST", "/code", bytes.NewReader(body)))
	if err != nil || resp.StatusCode != 200 {
		e.Fatal(resp, err)
	}
	var seen bytes.Buffer
	r := bufio.NewReader(io.TeeReader(resp.Body, &seen))
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			e.Fatalf("%v after %s", err, seen.Bytes())
		}
		if strings.Contains(line, `"type":"stdout"`) {
			break
		}
	}
	return func() string {
		defer resp.Body.Close()
		io.Copy(io.Discard, r) //nolint:errcheck // what came is looked at
		return e.cellEvents(seen.String())
	}
}

// An interrupt ends the code and leaves the context.
func TestCodeInterrupt(t *testing.T) {
	e := newCodeEnv(t)
	e.s.code.contexts.Grace = 20 * time.Second // nothing here needs it
	for language, loops := range map[string][]string{
		"python": {
			"x = 5; print('go'); import time; time.sleep(100)", "print('go')\nwhile True: pass",
			"import subprocess; print('go'); subprocess.run(['sleep', '100'])",
			"import asyncio; print('go'); await asyncio.sleep(100)",
		},
		"bash": {"x=5; echo go; sleep 100; echo next", "echo go; while :; do :; done", "f() { echo go; sleep 100; }; while :; do f; done"},
	} {
		c := e.context(language)
		for _, code := range loops {
			rest := e.started(c, code)
			e.call(500, "POST", "/code", agent.CodeRequest{Code: "1", Context: c}) // busy
			e.call(200, "DELETE", "/code?id="+c.ID, nil)
			want := map[string]string{"python": "stdout \"go\\n\"\nerror KeyboardInterrupt \"\"", "bash": "stdout \"go\\n\"\nstderr " +
				"\"\\n\"\nerror CommandExecError \"130\""}[language]
			if got := rest(); got != want {
				t.Errorf("%s: %s\nwant\n%s", code, got, want)
			}
		}
		e.inOrder(c, []cellCase{map[string]cellCase{
			"python": {"x", "result \"5\"\ncomplete"},
			"bash":   {"echo $x", "stdout \"5\\n\"\ncomplete"},
		}[language]})
		e.call(200, "DELETE", "/code?id="+c.ID, nil) // nothing runs
		e.inOrder(c, []cellCase{map[string]cellCase{
			"python": {"x", "result \"5\"\ncomplete"},
			"bash":   {"echo $x", "stdout \"5\\n\"\ncomplete"},
		}[language]})
	}
	e.call(500, "DELETE", "/code?id=nope", nil)
	e.call(400, "DELETE", "/code", nil)
}

// Who does not mind an interrupt is killed, and its context says so.
func TestCodeIgnoresInterrupt(t *testing.T) {
	e := newCodeEnv(t)
	c := e.context("python")
	rest := e.started(c, "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('go')\nwhile True: time.sleep(1)")
	e.call(200, "DELETE", "/code?id="+c.ID, nil)
	if got := rest(); !strings.Contains(got, "error ContextDied ") || !strings.Contains(got, "did not stop within 300ms of an interrupt") {
		t.Error(got)
	}
	for _, out := range []string{
		e.call(404, "GET", "/code/contexts/"+c.ID, nil), e.call(404, "DELETE", "/code/contexts/"+c.ID, nil),
		e.call(404, "POST", "/code", agent.CodeRequest{Code: "1", Context: c}),
	} {
		if !strings.Contains(out, "did not stop within 300ms of an interrupt") || !strings.Contains(out, "CONTEXT_NOT_FOUND") {
			t.Error(out)
		}
	}
	if out := e.call(200, "GET", "/code/contexts", nil); out != "[]" {
		t.Error(out)
	}
}

// Code that does what it can to its own process harms nobody else.
func TestCodeMischief(t *testing.T) {
	e := newCodeEnv(t)
	other := e.context("python")
	e.cell(other, "x = 1")
	garbage := `
import os
for name in os.listdir('/proc/self/fd'):
    for junk in b'garbage', b'\n{"type":"done"}\n', b'\0' * 3000, b'\n\n\n':
        try: os.write(int(name), junk)
        except OSError: pass
`
	c := e.context("python")
	if got := e.cell(c, garbage+"1"); !strings.HasSuffix(got, "result \"1\"\ncomplete") {
		t.Errorf("garbage in every descriptor: %.500s", got)
	}
	e.inOrder(c, []cellCase{
		{"import sys; sys.stdout.close()", "complete"},
		{"print('back')", "stdout \"back\\n\"\ncomplete"},
		{"os.close(1)", "complete"},
		{"print('back')", "stdout \"back\\n\"\ncomplete"},
		{"os.close(0); os.close(2); 1", "result \"1\"\ncomplete"},
		{"sys.stdout = None", "complete"},
		{"print('back')", "stdout \"back\\n\"\ncomplete"},
		{
			"pid = os.fork()\nif pid == 0: print('child')\nelse: os.waitpid(pid, 0); print('parent')\n1",
			"stdout \"child\\nparent\\n\"\nresult \"1\"\ncomplete",
		},
		{"1", "result \"1\"\ncomplete"},
		{
			"import subprocess; subprocess.run(['ls', '-l', '/proc/self/fd'], capture_output=True, text=True).stdout.count('socket:')",
			"result \"0\"\ncomplete",
		},
	})
	for code, why := range map[string]string{
		"import os; os._exit(9)":                       "exited with status 9",
		"import os; os.kill(os.getpid(), 9)":           "killed by SIGKILL",
		"import os; os.kill(os.getpid(), 11)":          "killed by SIGSEGV",
		"import os; os.closerange(3, 1000)":            "its process exited with status 1",
		"import os; os.fork(); os.fork(); os._exit(9)": "exited with status 9",
	} {
		c := e.context("python")
		if got := e.cell(c, code); !strings.Contains(got, "error ContextDied ") || !strings.Contains(got, why) {
			t.Errorf("%s: %s", code, got)
		}
		e.call(404, "POST", "/code", agent.CodeRequest{Code: "1", Context: c})
	}
	e.inOrder(other, []cellCase{{"x", "result \"1\"\ncomplete"}})
}

// A context that dies takes with it what it has started, as one that is deleted does.
func TestCodeDeathTakesAll(t *testing.T) {
	e := newCodeEnv(t)
	mark := fmt.Sprintf("79.%09d", time.Now().UnixNano()%1e9)
	for language, code := range map[string]string{
		"python": "import os, subprocess\nfor argv in ['sleep', 'MARK'], ['setsid', 'sleep', 'MARK'], ['env', '-i', 'setsid', 'sh', " +
			"'-c', 'sleep MARK & sleep MARK']: subprocess.Popen(argv, close_fds=True)\nos._exit(9)",
		"bash": "sleep MARK & (setsid sleep MARK &); exit 9",
	} {
		if got := e.cell(e.context(language), strings.ReplaceAll(code, "MARK", mark)); !strings.Contains(got, "error ContextDied ") ||
			!strings.Contains(got, "exited with status 9") {
			t.Error(got)
		}
		if left := sleepers(mark); len(left) > 0 { // at once, not soon
			t.Errorf("%s left %v", language, left)
		}
	}
}

// Memory that the sandbox does not have is refused, and the context goes on.
func TestCodeMemory(t *testing.T) {
	e := newEnvWith(t, agent.Bootstrap{Env: map[string]string{"PATH": os.Getenv("PATH")}, Limits: agent.Limits{MemoryBytes: 256 << 20}})
	c := e.context("python")
	e.inOrder(c, []cellCase{
		{"x = bytearray(1 << 30)", "error MemoryError \"\""},
		{"l = []\nwhile True: l.append(bytearray(1 << 20))", "error MemoryError \"\""},
		{"del l; 1", "result \"1\"\ncomplete"},
	})
	if err := e.s.code.contexts.Remove(c.ID); err != nil {
		t.Error(err)
	}
}

// Output streams in constant memory, and waits for a client that does not read.
func TestCodeMuchOutput(t *testing.T) {
	e := newCodeEnv(t)
	c := e.context("python")
	const size = 1 << 28
	body, _ := json.Marshal(agent.CodeRequest{Code: fmt.Sprintf("import sys\nfor _ in range(%d): sys.stdout.write('x' * 65535 + '\\n')\n1",
		size>>16), Context: c})
	resp, err := e.http.Client().Do(e.request("POST", "/code", bytes.NewReader(body)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	before := heldBytes()
	most := before
	n, next, last := 0, 32<<20, ""
	r := bufio.NewScanner(resp.Body)
	r.Buffer(make([]byte, 1<<20), 8<<20)
	for r.Scan() {
		line := r.Bytes()
		if !bytes.HasPrefix(line, []byte(`{"type":"stdout"`)) {
			last = cmp.Or(string(line), last)
			continue
		}
		n += bytes.Count(line, []byte("x")) - 1 // that of "text"
		if n >= next {
			next += 32 << 20
			most = max(most, heldBytes())
		}
	}
	if n != size>>16*65535 || !strings.Contains(last, "execution_complete") {
		t.Errorf("%d bytes came, the last event is %s", n, last)
	}
	if grown := most - before; grown > 32<<20 {
		t.Errorf("256 MiB of output cost %d MiB of memory", grown>>20)
	}
}

// heldBytes is the heap without what nobody refers to: how much of that there is depends on
// what other tests held.
func heldBytes() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Without an id a call goes to the context of its language, which is made when
// it is needed, and made again after its death.
func TestCodeStanding(t *testing.T) {
	e := newCodeEnv(t)
	run := func(language, code string) string {
		e.Helper()
		return e.cellEvents(e.call(200, "POST", "/code", agent.CodeRequest{Code: code, Context: agent.CodeContext{Language: language}}))
	}
	run("python", "x = 1")
	if got := run("python", "x"); got != "result \"1\"\ncomplete" {
		t.Error(got)
	}
	run("bash", "x=2")
	if got := run("bash", "echo $x"); got != "stdout \"2\\n\"\ncomplete" {
		t.Error(got)
	}
	if got := run("python", "import os; os._exit(1)"); !strings.Contains(got, "ContextDied") {
		t.Error(got)
	}
	if got := run("python", "x"); got != "error NameError \"name 'x' is not defined\"" {
		t.Error(got)
	}
	var wg sync.WaitGroup
	e.call(200, "DELETE", "/code/contexts?language=python", nil)
	for range 5 { // at once: one context
		wg.Go(func() {
			body, _ := json.Marshal(agent.CodeRequest{Code: "1", Context: agent.CodeContext{Language: "python"}})
			resp, err := e.http.Client().Do(e.request("POST", "/code", bytes.NewReader(body)))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			b, _ := io.ReadAll(resp.Body)
			if !strings.Contains(string(b), "execution_complete") && !strings.Contains(string(b), "session is busy") {
				t.Errorf("%s", b)
			}
		})
	}
	wg.Wait()
	if n := len(e.s.code.contexts.List("python")); n != 1 {
		t.Errorf("%d contexts of python", n)
	}
	if got := e.plain(e.call(200, "POST", "/code",
		`{"code":"echo shell; exit 3"}`)); got != "stdout \"shell\"\nerror CommandExecError 3 exit status 3" {
		t.Errorf("without a language: %s", got)
	}
}

func TestCodeContexts(t *testing.T) {
	e := newCodeEnv(t)
	if out := e.call(200, "GET", "/code/contexts", nil); out != "[]" {
		t.Error(out)
	}
	a, b := e.context("python"), e.context("python")
	c := e.context("bash")
	if got := e.cell(a, "y = 1") + e.cell(b, "'y' in dir()"); got != "complete"+"result \"False\"\ncomplete" {
		t.Errorf("contexts share what they hold: %s", got)
	}
	// Two contexts run at once: each waits for the other.
	pipe := e.dir + "/pipe"
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	read := make(chan string)
	go func() { read <- e.cell(a, "open("+strconv.Quote(pipe)+").read()") }()
	if got := e.cell(b, "open("+strconv.Quote(pipe)+", 'w').write('met')"); got != "result \"3\"\ncomplete" {
		t.Error(got)
	}
	if got := <-read; got != "result \"'met'\"\ncomplete" {
		t.Error(got)
	}
	for query, want := range map[string]int{"": 3, "?language=python": 2, "?language=bash": 1, "?language=go": 0} {
		var list []agent.CodeContext
		out := e.call(200, "GET", "/code/contexts"+query, nil)
		if err := json.Unmarshal([]byte(out), &list); err != nil || list == nil || len(list) != want {
			t.Errorf("%q: %s", query, out)
		}
	}
	if out := e.call(200, "GET", "/code/contexts/"+a.ID, nil); !strings.Contains(out, `"language":"python"`) {
		t.Error(out)
	}
	// What a context has started goes with it.
	mark := fmt.Sprintf("78.%09d", time.Now().UnixNano()%1e9)
	e.cell(c, "sleep "+mark+" &")
	e.call(200, "DELETE", "/code/contexts/"+c.ID, nil)
	if left := sleepers(mark); len(left) > 0 {
		t.Errorf("survived its context: %v", left)
	}
	e.call(404, "GET", "/code/contexts/"+c.ID, nil)
	e.call(404, "DELETE", "/code/contexts/"+c.ID, nil)
	e.call(200, "DELETE", "/code/contexts?language=python", nil)
	e.call(200, "DELETE", "/code/contexts?language=python", nil)
	if out := e.call(200, "GET", "/code/contexts?language=python", nil); out != "[]" {
		t.Error(out)
	}
}

func TestCodeBadInput(t *testing.T) {
	e := newCodeEnv(t)
	for _, body := range []string{
		"", "{", "[]", `"x"`, "{}", `{"language":""}`, `{"language":"cobol"}`, `{"language":5}`,
		`{"language":"Python"}`, `{"language":"python","cwd":"/nope"}`, `{"language":"python","cwd":"a\u0000"}`,
	} {
		e.call(400, "POST", "/code/context", body)
	}
	if out := e.call(400, "POST", "/code/context", `{"language":"cobol"}`); !strings.Contains(out, "python") ||
		!strings.Contains(out, "bash") {
		t.Errorf("the languages are not named: %s", out)
	}
	for _, body := range []string{
		"", "{", "[]", "{}", `{"code":""}`, `{"code":5}`, `{"code":"a\u0000","context":{"language":"python"}}`,
		`{"code":"1","context":{"language":"cobol"}}`, `{"code":"1","context":[]}`,
	} {
		e.call(400, "POST", "/code", body)
	}
	e.call(413, "POST", "/code", agent.CodeRequest{
		Code:    strings.Repeat("#", interpreter.MaxCode+1),
		Context: agent.CodeContext{Language: "python"},
	})
	e.call(404, "POST", "/code", `{"code":"1","context":{"id":"nope","language":"python"}}`)
	c := e.context("bash")
	e.call(400, "POST", "/code", agent.CodeRequest{Code: "1", Context: agent.CodeContext{ID: c.ID, Language: "python"}})
	e.call(400, "DELETE", "/code/contexts", nil)
	e.call(200, "DELETE", "/code/contexts?language=cobol", nil)
	e.call(405, "GET", "/code", nil)
	e.call(405, "GET", "/code/context", nil)
	e.call(404, "GET", "/code/contexts/", nil)
	e.call(404, "GET", "/code/contexts/a/b", nil)
	big := strings.Repeat("# comment\n", 500_000) + "echo big"
	if got := e.cell(c, big); got != "stdout \"big\\n\"\ncomplete" {
		t.Errorf("5 MB of bash: %.200s", got)
	}
	e.s.guest().env["PATH"] = e.dir
	if out := e.call(400, "POST", "/code/context", `{"language":"python"}`); !strings.Contains(out, "python3") ||
		!strings.Contains(out, e.dir) {
		t.Errorf("an image without python: %s", out)
	}
	if err := os.WriteFile(e.dir+"/python3", []byte("#!/bin/sh\necho broken >&2; exit 4\n"),
		0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	if out := e.call(500, "POST", "/code/context", `{"language":"python"}`); !strings.Contains(out, "status 4") ||
		!strings.Contains(out, "broken") {
		t.Errorf("a python that does not start: %s", out)
	}
}

func TestCodeLanguages(t *testing.T) {
	if got, want := slices.Sorted(slices.Values(interpreter.Languages())),
		slices.Sorted(slices.Values(agent.CodeLanguages)); !slices.Equal(got, want) {
		t.Errorf("the agent has %v, and the API knows %v", got, want)
	}
}

// What was started ahead is the context of its language; what cannot be is
// refused when it is asked for.
func TestCodePrestart(t *testing.T) {
	e := newCodeEnv(t)
	e.s.prestart([]string{"cobol", "bash", "python"}, e.s.opens.Load())
	var list []agent.CodeContext
	if err := json.Unmarshal([]byte(e.call(200, "GET", "/code/contexts", nil)), &list); err != nil || len(list) != 2 ||
		list[0].Language != "bash" || list[1].Language != "python" {
		t.Fatalf("%v %v", list, err)
	}
	for _, c := range list {
		out := e.call(200, "POST", "/code", agent.CodeRequest{Code: "true or True", Context: agent.CodeContext{Language: c.Language}})
		if !strings.Contains(out, c.ID) {
			t.Errorf("%s did not run in the context that was there: %s", c.Language, out)
		}
	}
	if n := len(e.s.code.contexts.List("")); n != 2 {
		t.Errorf("%d contexts", n)
	}
}

// A thousand contexts are refused but for those that a sandbox may have.
func TestCodeManyContexts(t *testing.T) {
	e := newCodeEnv(t)
	var mu sync.Mutex
	made := map[int]int{}
	var wg sync.WaitGroup
	work := make(chan struct{})
	for range 20 {
		wg.Go(func() {
			for range work {
				resp, err := e.http.Client().Do(e.request("POST", "/code/context", strings.NewReader(`{"language":"bash"}`)))
				if err != nil {
					t.Error(err)
					continue
				}
				b, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				mu.Lock()
				made[resp.StatusCode]++
				mu.Unlock()
				if resp.StatusCode != 200 && !strings.Contains(string(b), "DELETE /code/contexts/") {
					t.Errorf("%d %s", resp.StatusCode, b)
				}
			}
		})
	}
	for range 1000 {
		work <- struct{}{}
	}
	close(work)
	wg.Wait()
	if made[200] != interpreter.MaxContexts || made[429] != 1000-interpreter.MaxContexts {
		t.Errorf("statuses: %v", made)
	}
	e.call(200, "DELETE", "/code/contexts?language=bash", nil)
	e.context("bash")
}

// A client that leaves does not end what it started.
func TestCodeClientGone(t *testing.T) {
	e := newCodeEnv(t)
	c := e.context("python")
	ctx, cancel := context.WithCancel(t.Context())
	fifo := e.dir + "/fifo"
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	body, _ := json.Marshal(agent.CodeRequest{Code: "print('go', flush=True)\nfor i in range(10000): print('x' * 100)\nopen(" +
		strconv.Quote(fifo) + ").read(); done = 1", Context: c})
	resp, err := e.http.Client().Do(e.request("POST", "/code", bytes.NewReader(body)).WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	bufio.NewReader(resp.Body).ReadString('\n') //nolint:errcheck // what it says does not matter
	cancel()
	resp.Body.Close()
	if err := os.WriteFile(fifo, nil, 0o600); err != nil { // waits until it is read
		t.Fatal(err)
	}
	for got := ""; got != "result \"1\"\ncomplete"; { // the end of a call that nobody follows is no event to us
		resp, out := e.send(e.request("POST", "/code", strings.NewReader(fmt.Sprintf(`{"code":"done","context":{"id":%q}}`, c.ID))))
		if resp.StatusCode == 500 && strings.Contains(out, "session is busy") {
			continue
		}
		if got = e.cellEvents(out); strings.Contains(got, "error") {
			t.Fatal(got)
		}
	}
}

// Clients connect to Jupyter's port to see whether code can be run.
func TestCodeReadiness(t *testing.T) {
	e := newCodeEnv(t)
	for _, x := range []struct{ port, host, want string }{
		{"", "", "127.0.0.1:44771"},
		{"5000", "", "127.0.0.1:5000"},
		{"0", "", ""},
		{"x", "", ""},
		{"70000", "", ""},
		{"", "http://127.0.0.1:44771", ""},
	} {
		e.s.guest().env["JUPYTER_PORT"], e.s.guest().env["JUPYTER_HOST"] = x.port, x.host
		if got := e.s.guest().jupyterAddress(); got != x.want {
			t.Errorf("JUPYTER_PORT=%q JUPYTER_HOST=%q: %q, want %q", x.port, x.host, got, x.want)
		}
	}
	ln, err := beReady("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	got := e.events(agent.CommandRequest{
		Command: "bash -c 'exec 3<>/dev/tcp/127.0.0.1/${JUPYTER_PORT:-44771}' && exit 0 || exit 1",
		Envs:    map[string]string{"JUPYTER_PORT": port},
	})
	if got != "complete" {
		t.Error(got)
	}
	resp, err := http.Get("http://" + ln.Addr().String() + "/api")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != 404 || !strings.Contains(string(b), "not a Jupyter server") || !strings.Contains(string(b), "POST /code") {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
	if again, err := beReady(ln.Addr().String()); again != nil || err != nil {
		t.Errorf("a port that is taken: %v %v", again, err)
	}
}
