package server

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/interpreter"
)

// 400 of java take half a minute, of go two minutes, of the others seconds.
var interrupts = flag.Int("interrupts", 18, "interrupts of each language in TestCodeInterrupts")

// An interrupt at any time of a call, also where the code ends by itself at that
// time and where several come at once, ends that call or nothing: the next one
// runs, in the same context.
func TestCodeInterrupts(t *testing.T) {
	for language, x := range map[string]struct {
		set, get, want string
		code           []string
		slow           time.Duration // how long a call takes to begin
	}{
		"python": {
			"x = 5\nimport time, subprocess, asyncio", "x", "result \"5\"\ncomplete",
			[]string{
				"while True: pass", "time.sleep(100)", "subprocess.run(['sleep', '100'])", "await asyncio.sleep(100)",
				"while True: print('y' * 1000)", "sum(range(100000))", "await asyncio.sleep(0.003)", "1",
			},
			0,
		},
		"bash": {
			"x=5", "echo $x", "stdout \"5\\n\"\ncomplete",
			[]string{
				"while :; do :; done", "sleep 100", "while :; do (:); done", "echo $(sleep 100)", "for i in {1..200}; do :; done",
				"sleep 0.003", "while :; do printf %01000d 1; done", ":",
			},
			0,
		},
		"javascript": {
			"var x = 5; const { execSync } = require('child_process')", "x", "result \"5\"\ncomplete",
			[]string{
				"while (true);", "await new Promise(() => setTimeout(() => {}, 1e6))", "execSync('sleep 100')",
				"while (true) console.log('y'.repeat(1000))", "for (let i = 0; i < 1e6; i++);",
				"await new Promise((f) => setTimeout(f, 3))", "process.once('SIGINT', () => {}); while (true);",
				"process.once('SIGINT', () => {}); await new Promise(() => {})", "1",
			},
			0,
		},
		"java": {
			"int x = 5;", "x", "result \"5\"\ncomplete",
			[]string{
				"while (true);", "Thread.sleep(100000)", "new ProcessBuilder(\"sleep\", \"100\").start().waitFor()",
				"while (true) System.out.println(\"y\".repeat(1000));", "for (int i = 0; i < 1000000; i++);", "Thread.sleep(3)",
				"class C" + "{}", "1",
			},
			0,
		},
		"go": {
			"func main() {}", "func main() { println(5) }", "stderr \"5\\n\"\ncomplete",
			[]string{
				"func main() { for {} }", "import \"time\"\nfunc main() { time.Sleep(time.Hour) }",
				"func main() { for { println(\"y\") } }", "func main() {}",
			},
			200 * time.Millisecond,
		},
	} {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			e := newCodeEnv(t)
			if language == "go" {
				e = newGoEnv(t)
			}
			e.s.code.contexts.Grace = 20 * time.Second
			c := e.context(language)
			e.cell(c, x.set)
			random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same each time
			for i := range *interrupts {
				code := x.code[i%len(x.code)]
				// From before the code begins to after most of it has ended.
				delay := time.Duration(random.Int64N(int64(8*time.Millisecond + x.slow)))
				ended := make(chan string, 1)
				go func() {
					ended <- e.call(200, "POST", "/code", agent.CodeRequest{Code: code, Context: c})
				}()
				time.Sleep(delay)
				end := ""
				for end == "" {
					var w sync.WaitGroup
					for range 1 + i%3 {
						w.Go(func() { e.call(200, "DELETE", "/code?id="+c.ID, nil) })
					}
					w.Wait()
					select {
					case end = <-ended:
					case <-time.After(500 * time.Millisecond): // one that came before the call is none
					}
				}
				kind := "ended"
				// execSync says that its command failed if it learns of the signal before node does.
				for _, s := range []string{"KeyboardInterrupt", `"130"`, "Command failed: sleep", "ContextDied", "complete"} {
					if strings.Contains(end, s) {
						kind = s
					}
				}
				if got := e.cell(c, x.get); got != x.want || kind == "ContextDied" || kind == "ended" {
					t.Fatalf("%d: %q interrupted after %v ended with %q; then %s gave %s, want %s", i, code, delay,
						end[max(0, len(end)-3000):], x.get, got, x.want)
				}
			}
		})
	}
}

// Code that does not mind interrupts ends with its context, which says so, and
// another one can be made. TestCodeIgnoresInterrupt tells it of python.
func TestCodeSleepsThroughInterrupt(t *testing.T) {
	for language, x := range map[string]struct{ code, sane, want string }{
		"bash":       {"trap '' INT; echo go; while :; do sleep 1; done", "echo 1", "stdout \"1\\n\"\ncomplete"},
		"javascript": {"await new Promise((f) => setTimeout(f, 1)); console.log('go'); while (true);", "1", "result \"1\"\ncomplete"},
		"java": {
			"while (true) { try { System.out.println(\"go\"); while (true) Thread.sleep(1000); } catch (Throwable e) {} }",
			"1", "result \"1\"\ncomplete",
		},
	} {
		t.Run(language, func(t *testing.T) {
			e := newCodeEnv(t)
			c := e.context(language)
			rest := e.started(c, x.code)
			e.call(200, "DELETE", "/code?id="+c.ID, nil)
			if got := rest(); !strings.Contains(got, "error ContextDied ") ||
				!strings.Contains(got, "did not stop within 300ms of an interrupt") {
				t.Error(got)
			}
			if out := e.call(404, "POST", "/code", agent.CodeRequest{Code: x.sane, Context: c}); !strings.Contains(out,
				"did not stop within 300ms of an interrupt") || !strings.Contains(out, "POST /code/context") {
				t.Error(out)
			}
			e.inOrder(e.context(language), []cellCase{{x.sane, x.want}})
		})
	}
}

// A child that bash started as the interrupt came is stopped before the next
// call, for which bash would wait.
func TestCodeInterruptLeftChild(t *testing.T) {
	e := newCodeEnv(t)
	e.s.code.contexts.Grace = 20 * time.Second
	c := e.context("bash")
	for range 40 {
		end := make(chan struct{})
		go func() {
			defer close(end)
			e.call(200, "POST", "/code", agent.CodeRequest{Code: "sleep 100", Context: c})
		}()
		for ended := false; !ended; { // at once when it has begun, which is while it forks
			e.call(200, "DELETE", "/code?id="+c.ID, nil)
			select {
			case <-end:
				ended = true
			default:
			}
		}
		begun := time.Now()
		e.inOrder(c, []cellCase{{"echo $((6 * 7))", "stdout \"42\\n\"\ncomplete"}})
		if took := time.Since(begun); took > 10*time.Second {
			t.Fatalf("the next call waited for %v", took)
		}
	}
}

// stopped has a context of bash accept code while it is stopped, which stands for one that gets no CPU. It goes
// on when the caller sends SIGCONT to pid; rest returns what came until the code ended.
func (e *env) stopped(c agent.CodeContext, code string) (pid int, rest func() string) {
	e.Helper()
	pid = e.bash(c)
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		e.Fatal(err)
	}
	body, _ := json.Marshal(agent.CodeRequest{Code: code, Context: c})
	resp, err := e.http.Client().Do(e.request("POST", "/code", bytes.NewReader(body))) // returns when the call is accepted
	if err != nil || resp.StatusCode != 200 {
		e.Fatal(resp, err)
	}
	return pid, func() string {
		defer resp.Body.Close()
		said, err := io.ReadAll(resp.Body)
		if err != nil {
			e.Error(err)
		}
		return e.cellEvents(string(said))
	}
}

// bash returns the process of a context of bash.
func (e *env) bash(c agent.CodeContext) (pid int) {
	e.Helper()
	if _, err := fmt.Sscanf(e.cell(c, "echo $$"), "stdout \"%d", &pid); err != nil {
		e.Fatal(err)
	}
	return pid
}

// Code that has not begun cannot be told to stop. The grace counts from its beginning on.
func TestCodeInterruptBeforeItBegins(t *testing.T) {
	t.Parallel() // it waits
	e := newCodeEnv(t)
	e.s.code.contexts.Grace = interpreter.Grace
	c := e.context("bash")
	e.cell(c, "x=7")
	pid, rest := e.stopped(c, "sleep 1000")
	interrupted := make(chan struct{})
	go func() {
		defer close(interrupted)
		e.call(200, "DELETE", "/code?id="+c.ID, nil)
	}()
	select {
	case <-interrupted:
		t.Error("code that has not begun was interrupted")
	case <-time.After(interpreter.Grace + time.Second):
	}
	syscall.Kill(pid, syscall.SIGCONT) //nolint:errcheck // else the call tells
	if got := rest(); got != "stderr \"\\n\"\nerror CommandExecError \"130\"" {
		t.Error(got)
	}
	<-interrupted
	e.inOrder(c, []cellCase{{"echo $x", "stdout \"7\\n\"\ncomplete"}})
}

// A bash that never begins with it is killed.
func TestCodeInterruptNeverBegins(t *testing.T) {
	t.Parallel() // it waits
	e := newCodeEnv(t)
	e.s.code.contexts.Grace = 100 * time.Millisecond
	c := e.context("bash")
	_, rest := e.stopped(c, "sleep 1000")
	e.call(200, "DELETE", "/code?id="+c.ID, nil)
	if got := rest(); !strings.Contains(got, "error ContextDied ") ||
		!strings.Contains(got, "did not begin with the code within 500ms of an interrupt") {
		t.Error(got)
	}
}

// A SIGINT that comes while bash begins to wait for a child may have it spin for
// ever, so it gets none where it does not sleep. Stopped, as here, stands for
// preempted: and what was sent can be seen.
func TestCodeInterruptSparesBash(t *testing.T) {
	e := newCodeEnv(t)
	e.s.code.contexts.Grace = 60 * time.Second
	c := e.context("bash")
	pid := e.bash(c)
	rest := e.started(c, "echo go; while :; do (:); done")
	state := func(name, format string) (value uint64) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		_, after, found := strings.Cut(string(b), "\n"+name+":\t")
		if _, bad := fmt.Sscanf(after, format, &value); err != nil || !found || bad != nil {
			t.Fatal(err, found, bad)
		}
		return value
	}
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventuallyTrue(t, func() bool { return state("State", "%c") == 'T' })
	interrupted := make(chan struct{})
	go func() {
		defer close(interrupted)
		e.call(200, "DELETE", "/code?id="+c.ID, nil)
	}()
	const chld = 1 << (syscall.SIGCHLD - 1)
	var pending uint64
	eventuallyTrue(t, func() bool { pending = state("ShdPnd", "%x") &^ chld; return pending != 0 })
	syscall.Kill(pid, syscall.SIGCONT) //nolint:errcheck // else the call tells
	if pending != 1<<(syscall.SIGURG-1) {
		t.Errorf("bash was sent the signals %#x, want SIGURG only", pending)
	}
	if got := rest(); got != "stdout \"go\\n\"\nstderr \"\\n\"\nerror CommandExecError \"130\"" {
		t.Error(got)
	}
	<-interrupted
	e.inOrder(c, []cellCase{{"echo $((6 * 7))", "stdout \"42\\n\"\ncomplete"}})
}

// A child that handles the interrupt and ends well does not keep it from bash.
func TestCodeInterruptHandledByChild(t *testing.T) {
	e := newCodeEnv(t)
	e.s.code.contexts.Grace = 20 * time.Second
	c := e.context("bash")
	rest := e.started(c, "while :; do sh -c 'trap \"exit 0\" INT; echo go; while :; do :; done'; done")
	e.call(200, "DELETE", "/code?id="+c.ID, nil)
	if got := rest(); got != "stdout \"go\\n\"\nstderr \"\\n\"\nerror CommandExecError \"130\"" {
		t.Error(got)
	}
}

// A shell that is slow to answer before the next call is not interrupted so soon
// again that no answer ever counts.
func TestCodeInterruptSlowAnswer(t *testing.T) {
	e := newCodeEnv(t)
	e.s.code.contexts.Grace = 20 * time.Second
	c := e.context("bash")
	rest := e.started(c, "trap '[[ ! -e slow ]] || sleep 0.15' DEBUG; echo go; sleep 100")
	e.call(200, "DELETE", "/code?id="+c.ID, nil)
	if got := rest(); !strings.HasSuffix(got, "error CommandExecError \"130\"") {
		t.Error(got)
	}
	if err := os.WriteFile(e.dir+"/slow", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	e.inOrder(c, []cellCase{{"trap - DEBUG; echo $((6 * 7))", "stdout \"42\\n\"\ncomplete"}})
}

// What no SIGINT ends in bash is ended before the context would be, and neither
// the shell nor what it runs in the background ends with it.
func TestCodeInterruptIgnoredByChild(t *testing.T) {
	t.Parallel() // it waits
	e := newCodeEnv(t)
	e.s.code.contexts.Grace = 12 * time.Second
	c := e.context("bash")
	// A child in the background ignores signals before it becomes its program, not from its beginning on.
	e.cell(c, "x=5; sleep 1000 & until read -r n </proc/$!/comm && [[ $n = sleep ]]; do :; done")
	rest := e.started(c, "(trap '' INT; echo go; sleep 100)")
	e.call(200, "DELETE", "/code?id="+c.ID, nil)
	if got := rest(); !strings.HasPrefix(got, "stdout \"go\\n\"\n") || !strings.HasSuffix(got, "error CommandExecError \"130\"") {
		t.Error(got)
	}
	e.inOrder(c, []cellCase{{"kill -0 %1 && echo $x", "stdout \"5\\n\"\ncomplete"}})
}
