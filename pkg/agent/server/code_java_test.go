package server

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

func TestCodeJava(t *testing.T) {
	e := newCodeEnv(t)
	c := e.context("java")
	e.inOrder(c, []cellCase{
		{"1+1", "result \"2\"\ncomplete"},
		{"int x = 41;", "complete"},
		{"x + 1", "result \"42\"\ncomplete"},
		{"x = 5", "complete"},
		{"x;", "result \"5\"\ncomplete"},
		{"System.err.print(\"err\");", "stderr \"err\"\ncomplete"}, // apart: two pipes have no order
		{"System.out.println(\"out ü€𝄞\"); \"value \\\"ü\\\"\"", "stdout \"out ü€𝄞\\n\"\nresult \"\\\"value " +
			"\\\\\\\"ü\\\\\\\"\\\"\"\ncomplete"},
		{
			"int a = 10;\nint b = 20;\nint sum = a + b;\nSystem.out.println(\"Sum: \" + sum);\nsum",
			"stdout \"Sum: 30\\n\"\nresult \"30\"\ncomplete",
		},
		{"import java.time.Duration;\nrecord P(int n) {}\nnew P((int) Duration.ofMinutes(1).toSeconds())", "result \"P[n=60]\"\ncomplete"},
		{"List.of(1, 2).stream().map(n -> n * n).collect(Collectors.toList())", "result \"[1, 4]\"\ncomplete"},
		{"new int[] {1, 2}", "result \"int[2] { 1, 2 }\"\ncomplete"},
		{"// a comment", "complete"},
		{"void v() {}\nv()", "complete"},
		{"null", "result \"null\"\ncomplete"},
		{"int f(int n) { return g(n); }", "stderr \"f cannot be used until this is fixed: method g(int)\\n\"\ncomplete"},
		{"f(1)", "error UnresolvedReferenceException \"f cannot be used until this is fixed: method g(int)\""},
		{"int g(int n) { return 7 / n; }\nf(1)", "result \"7\"\ncomplete"},
		{"f(0)", "error EvalException \"java.lang.ArithmeticException: / by zero\""},
		{"new Scanner(System.in).nextLine()", "error EvalException \"java.util.NoSuchElementException: No line found\""},
		{"System.in.read()", "result \"-1\"\ncomplete"},
		{
			"new ProcessBuilder(\"sh\", \"-c\", \"echo child; readlink /proc/self/fd/3 || echo closed\").inheritIO().start().waitFor()",
			"stdout \"child\\nclosed\\n\"\nresult \"0\"\ncomplete",
		},
		{"System.out.close()", "complete"},
		{"System.out.println(\"back\")", "stdout \"back\\n\"\ncomplete"},
		{"System.setOut(null)", "complete"},
		{"System.out.println(\"back\")", "stdout \"back\\n\"\ncomplete"},
		{"\"x\".repeat(5 << 20).length()", "result \"5242880\"\ncomplete"},
		{"Paths.get(\"\").toAbsolutePath().toString().equals(\"" + e.dir + "\")", "result \"true\"\ncomplete"},
	})
	for _, code := range []string{"int y = 1;\nint z = nope;", "int q = ", "}", "int w = \"s\";"} {
		if got := e.cell(c, code); !strings.HasPrefix(got, "error CompilationException \"<cell ") {
			t.Errorf("%s: %s", code, got)
		}
	}
	e.inOrder(c, []cellCase{{"x + y", "result \"6\"\ncomplete"}})
	if got := e.cell(c, "System.exit(3)"); !strings.Contains(got, "error ContextDied ") || !strings.Contains(got, "exited with status 3") {
		t.Error(got)
	}
}

// lastError runs code that fails, and returns how.
func (e *env) lastError(c agent.CodeContext, code string) *agent.EventError {
	e.Helper()
	events := strings.Split(strings.TrimSpace(e.call(200, "POST", "/code", agent.CodeRequest{Code: code, Context: c})), "\n\n")
	var ev agent.Event
	if err := json.Unmarshal([]byte(events[len(events)-1]), &ev); err != nil || ev.Error == nil {
		e.Fatalf("%s: %s", code, events[len(events)-1])
	}
	return ev.Error
}

// A trace shows lines of cells.
func TestCodeJavaTraceback(t *testing.T) {
	e := newCodeEnv(t)
	c := e.context("java")
	e.cell(c, "int f(int n) {\n  return 1 / n;\n}")
	got := strings.Join(e.lastError(c, "int x = 1;\ntry {\n  f(0);\n} catch (Exception e) {\n  throw new "+
		"IllegalStateException(\"outer\", e);\n}").Traceback, "\n")
	want := "java.lang.IllegalStateException: outer\n    at <cell 2>:5\nCaused by: java.lang.ArithmeticException: / by zero\n    at f " +
		"(<cell 1>:2)\n    at <cell 2>:3"
	if got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	got = strings.Join(e.lastError(c, "int y = 1;\n\nint z =  nope;").Traceback, "\n")
	if want := "    int z =  nope;\n             ^"; !strings.Contains(got, "<cell 3>:3: cannot find symbol\n") ||
		!strings.Contains(got, want) {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

func TestCodeJavaInterrupt(t *testing.T) {
	e := newCodeEnv(t)
	e.s.code.contexts.Grace = 20 * time.Second
	c := e.context("java")
	e.cell(c, "int x = 5; Object o = new Object();")
	for _, code := range []string{
		"System.out.println(\"go\"); while (true);", "System.out.println(\"go\"); Thread.sleep(100000);",
		"System.out.println(\"go\"); while (true) { try { Thread.sleep(1000); } catch (Exception e) {} }",
		"System.out.println(\"go\"); new ProcessBuilder(\"sleep\", \"100\").start().waitFor()",
		"System.out.println(\"go\"); synchronized (o) { o.wait(); }",
		"System.out.println(\"go\");\nwhile (true) System.out.print(\"\");\nx = 6;",
	} {
		rest := e.started(c, code)
		e.call(500, "POST", "/code", agent.CodeRequest{Code: "1", Context: c}) // busy
		e.call(200, "DELETE", "/code?id="+c.ID, nil)
		if got := rest(); got != "stdout \"go\\n\"\nerror KeyboardInterrupt \"the code was interrupted\"" {
			t.Errorf("%s: %s", code, got)
		}
	}
	e.inOrder(c, []cellCase{{"x", "result \"5\"\ncomplete"}})
	e.call(200, "DELETE", "/code?id="+c.ID, nil) // nothing runs
	e.inOrder(c, []cellCase{{"x", "result \"5\"\ncomplete"}})
}

// The heap is bounded, and a context that has filled it goes on.
func TestCodeJavaMemory(t *testing.T) {
	e := newEnvWith(t, agent.Bootstrap{Env: map[string]string{"PATH": os.Getenv("PATH")}, Limits: agent.Limits{MemoryBytes: 256 << 20}})
	c := e.context("java")
	e.inOrder(c, []cellCase{
		{"byte[] b = new byte[200 << 20];", "error EvalException \"java.lang.OutOfMemoryError: Java heap space\""},
		{"List<byte[]> l = new ArrayList<>(); while (true) l.add(new byte[1 << 20]);", "error EvalException " +
			"\"java.lang.OutOfMemoryError: Java heap space\""},
		{"l = null; 1", "result \"1\"\ncomplete"},
	})
	if err := e.s.code.contexts.Remove(c.ID); err != nil {
		t.Error(err)
	}
}
