package server

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestCodeJavaScript(t *testing.T) {
	e := newCodeEnv(t)
	if err := os.WriteFile(e.dir+"/mod.mjs", []byte("export default 'd'; export const a = 1, b = 2;"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(e.dir+"/com.js", []byte("exports.c = 3;"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := e.context("javascript")
	e.inOrder(c, []cellCase{
		{"1+1", "result \"2\"\ncomplete"},
		{"const x = 41; let y = 1; function f() { return x + y }", "complete"},
		{"f()", "result \"42\"\ncomplete"},
		{"const x = 42", "complete"}, // as in the console of a browser
		{"x", "result \"42\"\ncomplete"},
		{"console.log('ü\\u2028\\x85')", "stdout \"ü\\u2028\\u0085\\n\"\ncomplete"},
		{"console.error('e')", "stderr \"e\\n\"\ncomplete"},
		{"'a'", "result \"'a'\"\ncomplete"},
		{"({a: 1, b: [2]})", "result \"{ a: 1, b: [ 2 ] }\" application/json={\"a\":1,\"b\":[2]}\ncomplete"},
		{"[1n, null]", "result \"[ 1n, null ]\"\ncomplete"},
		{"null", "result \"null\"\ncomplete"},
		{"undefined", "complete"},
		{"NaN", "result \"NaN\"\ncomplete"},
		{"-0", "result \"-0\"\ncomplete"},
		{"10n ** 20n", "result \"100000000000000000000n\"\ncomplete"},
		{"Symbol('s')", "result \"Symbol(s)\"\ncomplete"},
		{"f", "result \"[Function: f]\"\ncomplete"},
		{"await new Promise((r) => setTimeout(() => r('later'), 1))", "result \"'later'\"\ncomplete"},
		{"const { readFile } = require('fs/promises'); (await readFile('com.js', 'utf8')).length", "result \"14\"\ncomplete"},
		{"require('./com.js').c", "result \"3\"\ncomplete"},
		{"(await import('path')).sep", "result \"'/'\"\ncomplete"},
		{
			"import d, { a as one, b } from './mod.mjs';\nimport * as path from 'path';\n[d, one, b, path.sep].join(' ')",
			"result \"'d 1 2 /'\"\ncomplete",
		},
		{"export const z = 26", "complete"},
		{"z", "result \"26\"\ncomplete"},
		{"display('first'); ({[Symbol.for('Jupyter.display')]: () => ({'text/html': '<b>'})})", "result \"'first'\"\nresult \"{ " +
			"[Symbol(Jupyter.display)]: [Function: [Jupyter.display]] }\" text/html=<b>\ncomplete"},
		{"throw new TypeError('x')", "error TypeError \"x\""},
		{"throw 5", "error Uncaught \"5\""},
		{"await Promise.reject(new Error('r'))", "error Error \"r\""},
		{"nope", "error ReferenceError \"nope is not defined\""},
		{"1 +", "error SyntaxError \"Unexpected end of input\""},
		{"require('fs').readFileSync(0).length", "result \"0\"\ncomplete"},
		{"require('child_process').execSync('readlink /proc/self/fd/3 || echo closed').toString()", "result \"'closed\\\\n'\"\ncomplete"},
	})
	if got := e.cell(c, "process.exit(4)"); !strings.Contains(got, "ContextDied") || !strings.Contains(got, "status 4") {
		t.Error(got)
	}
}

func TestCodeJavaScriptInterrupt(t *testing.T) {
	e := newCodeEnv(t)
	e.s.code.contexts.Grace = 20 * time.Second
	c := e.context("javascript")
	for _, code := range []string{
		"var x = 5; console.log('go'); while (true);", "console.log('go'); await new Promise(() => setTimeout(() => {}, 1e6))",
		"var child = require('child_process').spawn('sleep', ['100']); console.log('go'); await new Promise(() => {})",
		"console.log('go'); require('child_process').execSync('sleep 100')",
	} {
		rest := e.started(c, code)
		e.call(200, "DELETE", "/code?id="+c.ID, nil)
		// execSync says that its command failed if it learns of the signal before node does.
		if got := strings.Replace(rest(), `error Error "Command failed: sleep 100"`, `error KeyboardInterrupt "the code was interrupted"`,
			1); got != "stdout \"go\\n\"\nerror KeyboardInterrupt \"the code was interrupted\"" {
			t.Errorf("%s: %s", code, got)
		}
	}
	e.inOrder(c, []cellCase{
		{"x", "result \"5\"\ncomplete"},
		{
			"await new Promise((r) => child.signalCode ? r(child.signalCode) : child.on('exit', (code, signal) => r(signal)))",
			"result \"'SIGINT'\"\ncomplete",
		},
	})
}

// A node that is not scheduled for more than a second is asked twice whether it has met its
// interrupts, and answers.
func TestCodeJavaScriptSettlesLate(t *testing.T) {
	e := newCodeEnv(t)
	e.s.code.contexts.Grace = 20 * time.Second
	c := e.context("javascript")
	pid, err := strconv.Atoi(strings.Trim(strings.TrimSuffix(strings.TrimPrefix(e.cell(c, "process.pid"), "result "), "\ncomplete"), `"`))
	if err != nil {
		t.Fatal(err)
	}
	rest := e.started(c, "console.log('go'); while (true);")
	e.call(200, "DELETE", "/code?id="+c.ID, nil)
	rest()
	signal := func(s unix.Signal) {
		if err := unix.Kill(pid, s); err != nil {
			t.Error(err)
		}
	}
	signal(unix.SIGSTOP)
	defer signal(unix.SIGCONT)
	got := make(chan string)
	go func() { got <- e.cell(c, "6 * 7") }()
	const interrupted = 1 << (unix.SIGINT - 1)
	for pending := uint64(0); pending&interrupted == 0; { // until it is asked once more
		time.Sleep(10 * time.Millisecond)
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(status), "ShdPnd:")
		if _, err := fmt.Sscanf(rest, "%x", &pending); err != nil {
			t.Fatal(err)
		}
	}
	signal(unix.SIGCONT)
	if out := <-got; out != "result \"42\"\ncomplete" {
		t.Error(out)
	}
}

// A child that dies of an interrupt's SIGINT ends its call before the interrupt itself is
// known to node: the call was interrupted all the same.
func TestCodeJavaScriptChildInterrupted(t *testing.T) {
	e := newCodeEnv(t)
	e.s.code.contexts.Grace = 20 * time.Second // it is not needed
	c := e.context("javascript")
	file := filepath.Join(t.TempDir(), "pid")
	code := fmt.Sprintf("console.log('go'); require('child_process').execSync('echo $$ >%[1]s.new; mv %[1]s.new %[1]s; exec sleep 100', "+
		"{ stdio: 'ignore' })", file)
	killed := func() (rest func() string) {
		rest = e.started(c, code)
		var pid int
		eventuallyTrue(t, func() bool {
			b, _ := os.ReadFile(file)
			_, err := fmt.Sscan(string(b), &pid)
			return err == nil
		})
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(pid, unix.SIGINT); err != nil {
			t.Fatal(err)
		}
		return rest
	}
	if got := killed()(); !strings.Contains(got, "error Error \"Command failed: ") { // by somebody else
		t.Error(got)
	}
	var all []string
	for range 5 { // on a busy host one or another is later than a second
		rest := killed()
		time.Sleep(100 * time.Millisecond) // as late is the interrupt
		e.call(200, "DELETE", "/code?id="+c.ID, nil)
		all = append(all, rest())
		if strings.Contains(all[len(all)-1], "error KeyboardInterrupt") {
			return
		}
	}
	t.Errorf("%q", all)
}

// Types are erased by the package typescript, which is looked for where Debian
// has it, too.
func TestCodeTypeScript(t *testing.T) {
	e := newCodeEnv(t)
	c := e.context("typescript")
	e.inOrder(c, []cellCase{
		{"interface P { x: number }\nconst p: P = { x: 41 };\nenum E { A = 1 }\np.x + E.A", "result \"42\"\ncomplete"},
		{"import { sep } from 'path'", "complete"},
		{"const q = <T,>(v: T): T => v; q<string>(sep as string)", "result \"'/'\"\ncomplete"},
		{"type T = string; (await Promise.resolve(p))!.x", "result \"41\"\ncomplete"},
		{"throw new Error('x' as any)", "error Error \"x\""},
		{"const y: = 1", "error SyntaxError \"Type expected. (line 1, column 10)\""},
	})
}
