package e2e_test

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// tellEval has somebody calculate at a prompt, and script it.
func tellEval(t *testing.T, l *lab) {
	id := l.make("python")
	if out := l.ok("eval", id, "x = 6 * 7\nprint('out')\nx"); out != "out\n42\n" {
		t.Errorf("%q", out)
	}
	if r := l.feed(strings.NewReader("import sys\nprint(x, file=sys.stderr)"), "eval", id); r.code != 0 || r.out != "" ||
		r.errout != "42\n" {
		t.Errorf("what was defined is not remembered: %+v", r)
	}
	l.wants(l.ctl("eval", id, "def f(): return 1 / 0\nf()"), 1, "ZeroDivisionError", "line 1")
	if out := l.ok("eval", "-l", "bash", id, "cd /usr; a() { echo $PWD; }; a"); out != "/usr\n" {
		t.Errorf("%q", out)
	}
	l.wants(l.ctl("eval", "-l", "bash", id, "a; false"), 1)
	if r := l.ctl("eval", "-l", "bash", id, "sh -c 'kill -9 $$'; echo $?"); r.code != 0 || r.out != "137\n" || r.errout != "" {
		t.Errorf("a child that dies by a signal: %+v", r)
	}
	file := filepath.Join(t.TempDir(), "figure.py")
	if err := os.WriteFile(file, []byte("class F:\n    def _repr_svg_(self): return '<svg>é</svg>'\n    def _repr_png_(self): return "+
		"b'png'\nF()"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	l.ok("eval", "--figures", dir, "-f", file, id)
	for name, want := range map[string]string{"figure-1.svg": "<svg>é</svg>", "figure-1.png": "png"} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
	var value map[string]string
	if err := json.Unmarshal([]byte(l.ok("eval", "-o", "json", id, "x")), &value); err != nil || value["text/plain"] != "42" {
		t.Errorf("%v, %v", value, err)
	}

	one, two := strings.TrimSpace(l.ok("code", "context", "create", id)),
		strings.TrimSpace(l.ok("code", "context", "create", "-l", "bash", "-w", "/tmp", id))
	l.wants(l.ctl("eval", "-c", one, id, "x"), 1, "NameError")
	if out := l.ok("eval", "-c", two, id, "pwd"); out != "/tmp\n" {
		t.Errorf("%q", out)
	}
	var list []agent.CodeContext
	if err := json.Unmarshal([]byte(l.ok("code", "context", "ls", "-l", "bash", "-o", "json", id)), &list); err != nil || len(list) != 2 ||
		list[1].ID != two || list[1].Cwd != "/tmp" {
		t.Errorf("%+v, %v", list, err)
	}
	l.interrupts(id)
	l.ok("code", "context", "rm", id, one, two)
	l.wants(l.ctl("eval", "-c", one, id, "1"), 125, one)
	l.wants(l.ctl("code", "context", "rm", id, "../command"), 125)
	l.wants(l.ctl("eval", "-l", "cobol", id, "1"), 125, "cobol", "python")
	for language, program := range map[string]string{"javascript": "node", "java": "java", "go": "go"} {
		l.wants(l.ctl("eval", "-l", language, id, "1"), 125, program)
	}
	l.wants(l.ctl("eval", "-f", "/nonexistent", id), 125, "/nonexistent")
	l.wants(l.ctl("eval", "-f", file, id, "1"), 125, "exclude")
	l.wants(l.ctl("eval", id, ""), 125, "code is missing")
}

// tellPrestart has interpreters there before anybody asks, also when the sandbox
// is started anew.
func tellPrestart(t *testing.T, l *lab) {
	id := l.make("python", "--prestart", "python,bash")
	first := l.interpreters(id, 2)
	if out := l.ok("eval", id, "import os; x = os.getpid(); 'kept'"); out != "'kept'\n" {
		t.Errorf("%q", out)
	}
	l.ok("eval", "-l", "bash", id, "true")
	if again := l.interpreters(id, 2); again != first {
		t.Errorf("eval made others: %s, then %s", first, again)
	}
	l.ok("stop", id)
	l.ok("start", id)
	if again := l.interpreters(id, 2); again == first {
		t.Errorf("after a start: %s", again)
	}
	l.wants(l.ctl("create", "--prestart", "cobol", "python"), 125, "cobol", "python, javascript")
}

// interpreters waits for n contexts, and returns their ids. Nobody is told when
// one that was not asked for is there.
func (l *lab) interpreters(id string, n int) string {
	l.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		ids := strings.Fields(l.ok("code", "context", "ls", "-o", "name", id))
		if len(ids) == n {
			return strings.Join(ids, " ")
		}
		if len(ids) > n || time.Now().After(deadline) {
			l.Fatalf("%d contexts, not %d: %v", len(ids), n, ids)
		}
	}
}

// interrupts presses Ctrl-C while code runs; its context lives on.
func (l *lab) interrupts(id string) {
	l.Helper()
	cmd := l.command(l.Context(), "eval", id, "import time\nprint('begun', flush=True)\nwhile True: time.sleep(1)")
	out, err := cmd.StdoutPipe()
	if err != nil {
		l.Fatal(err)
	}
	var errout bytes.Buffer
	cmd.Stderr = &errout
	if err := cmd.Start(); err != nil {
		l.Fatal(err)
	}
	begun := make([]byte, len("begun\n"))
	if _, err := io.ReadFull(out, begun); err != nil || string(begun) != "begun\n" {
		l.Errorf("%q, %v", begun, err)
	}
	start := time.Now()
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		l.Error(err)
	}
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(errout.String(), "KeyboardInterrupt") ||
		time.Since(start) > 20*time.Second {
		l.Errorf("exit status %d after %s, %q", code, time.Since(start), errout.String())
	}
	if out := l.ok("eval", id, "x"); out != "42\n" {
		l.Errorf("after an interrupt: %q", out)
	}
}
