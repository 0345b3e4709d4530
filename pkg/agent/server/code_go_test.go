package server

import (
	"cmp"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

const hello = "package main\n\nimport \"fmt\"\n\nfunc main() { fmt.Println(\"hello\") }\n"

// newGoEnv is newCodeEnv with the build cache of this host: an empty one takes
// half a minute to fill.
func newGoEnv(t *testing.T) *env {
	t.Helper()
	e := newCodeEnv(t)
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	e.s.guest().env["TMPDIR"] = t.TempDir() // in which nobody else builds
	e.s.guest().env["GOCACHE"] = cmp.Or(os.Getenv("GOCACHE"), cache+"/go-build")
	return e
}

func TestCodeGo(t *testing.T) {
	e := newGoEnv(t)
	c := e.context("go")
	e.inOrder(c, []cellCase{
		{hello, "stdout \"hello\\n\"\ncomplete"},
		{"import \"fmt\"\nfunc main() { fmt.Println(\"no clause\") }", "stdout \"no clause\\n\"\ncomplete"},
		{"// a comment\npackage main\nfunc main() {}", "complete"},
		{"import \"os\"\nfunc main() { os.Stderr.WriteString(\"ü\\n\"); os.Exit(3) }", "stderr \"ü\\n\"\nerror CommandExecError \"3\""},
		{
			"import (\"fmt\"; \"io\"; \"os\")\nfunc main() { b, err := io.ReadAll(os.Stdin); fmt.Println(len(b), err) }",
			"stdout \"0 <nil>\\n\"\ncomplete",
		},
		{"import (\"fmt\"; \"os\")\nfunc main() { d, _ := os.Getwd(); l, _ := os.Readlink(\"/proc/self/fd/3\"); fmt.Println(d, len(l) > " +
			"7 && l[:7] == \"socket:\") }", "stdout \"" + e.dir + " false\\n\"\ncomplete"},
		{"import (\"fmt\"; \"os\")\nfunc main() { f, _ := os.ReadDir(os.TempDir()); for _, x := range f { if len(x.Name()) > 11 && " +
			"x.Name()[:11] == \"sandboxd-go\" { fmt.Println(\"left:\", x) } } }", "complete"},
		{"func main() { println(1 +) }", "error CompileError \"main.go:1:26: syntax error: unexpected ), expected expression\""},
		{"x := 1", "error CompileError \"main.go:1:1: syntax error: non-declaration statement outside function body\""},
		{"package foo\nfunc main() {}", "error CompileError \"main.go:1: package foo is not a program: use package main\""},
		{"import \"syscall\"\nfunc main() { syscall.Kill(syscall.Getpid(), 9) }", "error CommandExecError \"signal: killed\""},
	})
	err := e.lastError(c, "package main\n\nimport \"os\"\n\nfunc main() {\n\tnope()\n\talso()\n}\n")
	if got := strings.Join(err.Traceback, "\n"); got != "main.go:3:8: \"os\" imported and not used\nmain.go:6:2: undefined: "+
		"nope\nmain.go:7:2: undefined: also" {
		t.Errorf("%s: %s", err.Name, got)
	}
	if got := e.cell(c, "import \"example.com/nope\"\nfunc main() {}"); !strings.HasPrefix(got, "error CompileError \"main.go:1:8: ") ||
		!strings.Contains(got, "example.com/nope") {
		t.Error(got)
	}
	if got := e.cell(c, "func main() {\n\tvar m map[int]int\n\tm[1] = 2\n}"); !strings.Contains(got,
		"panic: assignment to entry in nil map") || !strings.Contains(got, "main.go:3 ") ||
		!strings.HasSuffix(got, "error CommandExecError \"2\"") {
		t.Error(got)
	}
	// What a program leaves behind does not end the call late.
	mark := fmt.Sprintf("77.%09d", time.Now().UnixNano()%1e9)
	if got := e.cell(c, "import (\"os/exec\"; \"os\")\nfunc main() { c := exec.Command(\"sleep\", \""+mark+
		"\"); c.Stdout = os.Stdout; c.Start() }"); got != "complete" {
		t.Error(got)
	}
	if len(sleepers(mark)) != 1 {
		t.Error("the background process is gone")
	}
	e.call(200, "DELETE", "/code/contexts/"+c.ID, nil)
	if left := sleepers(mark); len(left) > 0 {
		t.Errorf("survived its context: %v", left)
	}
}

// An interrupt ends the program, be it one that minds it or not, and compiling.
func TestCodeGoInterrupt(t *testing.T) {
	e := newGoEnv(t)
	e.s.code.contexts.Grace = 20 * time.Second
	c := e.context("go")
	for _, body := range []string{"for {}", "time.Sleep(time.Hour)", "signal.Ignore(os.Interrupt); for {}"} {
		rest := e.started(c, "import (\"fmt\"; \"os\"; \"os/signal\"; \"time\")\nvar _, _, _ = os.Args, signal.Ignore, time.Now\nfunc "+
			"main() { fmt.Println(\"go\"); "+body+" }")
		e.call(500, "POST", "/code", agent.CodeRequest{Code: "1", Context: c}) // busy
		e.call(200, "DELETE", "/code?id="+c.ID, nil)
		if got := rest(); got != "stdout \"go\\n\"\nerror KeyboardInterrupt \"the program was interrupted\"" {
			t.Errorf("%s: %s", body, got)
		}
	}
	e.inOrder(c, []cellCase{{hello, "stdout \"hello\\n\"\ncomplete"}})
	e.call(200, "DELETE", "/code?id="+c.ID, nil) // nothing runs
	e.inOrder(c, []cellCase{{hello, "stdout \"hello\\n\"\ncomplete"}})

	// One that is chosen by its version, and never ends.
	fifo := e.dir + "/fifo"
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	e.program("go1.99", "echo begun > "+fifo+"; sleep 100; exit 0")
	e.s.guest().env["PATH"] += ":" + e.dir
	e.s.guest().env["GO_VERSION"] = "1.99.3"
	c = e.context("go")
	end := make(chan string)
	go func() { end <- e.cell(c, hello) }()
	if b, err := os.ReadFile(fifo); err != nil || string(b) != "begun\n" {
		t.Fatalf("%q %v", b, err)
	}
	e.call(200, "DELETE", "/code?id="+c.ID, nil)
	if got := <-end; got != "error KeyboardInterrupt \"the program was interrupted\"" {
		t.Error(got)
	}
}

// program makes a program of the shell in the working directory.
func (e *env) program(name, script string) {
	e.Helper()
	if err := os.WriteFile(e.dir+"/"+name, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil { //nolint:gosec // a program
		e.Fatal(err)
	}
}

// Where an image has several of a language, the sandbox's environment chooses.
func TestCodeVersions(t *testing.T) {
	for language, x := range map[string]struct{ name, variable, version, program, code string }{
		"python":     {"python3.99", "PYTHON_VERSION", "3.99.1", "python3", "import os; print(os.environ['CHOSEN'])"},
		"javascript": {"node-99", "NODE_VERSION", "v99.1.0", "node", "console.log(process.env.CHOSEN)"},
		"java":       {"java99", "JAVA_VERSION", "99", "java", "System.out.println(System.getenv(\"CHOSEN\"))"},
		"go": {"go1.99", "GO_VERSION", "1.99", "go", "import \"os\"\nfunc main() { os.Stdout.WriteString(os.Getenv(\"CHOSEN\") " +
			"+ \"\\n\") }"},
	} {
		e := newGoEnv(t)
		e.program(x.name, "CHOSEN="+x.name+"; export CHOSEN; exec "+x.program+" \"$@\"")
		e.s.guest().env["PATH"] += ":" + e.dir
		e.s.guest().env[x.variable] = x.version
		want := "stdout \"" + x.name + "\\n\"\ncomplete"
		if language == "go" { // it compiles, and the program runs without it
			e.program(x.name, "echo "+x.name+" >&2; exit 1")
			want = "error CompileError \"" + x.name + "\""
		}
		e.inOrder(e.context(language), []cellCase{{x.code, want}})
		e.s.guest().env[x.variable] = "../../99"
		e.s.guest().env["CHOSEN"] = "default"
		e.inOrder(e.context(language), []cellCase{{x.code, "stdout \"default\\n\"\ncomplete"}})
	}
}

// What code of a language does to descriptors and output disturbs no more than
// the call that did it, or, in node, its context.
func TestCodeMischiefOfAll(t *testing.T) {
	junk := `garbage\n\n{\"type\":\"done\"}\n0 5\n`
	for language, x := range map[string]struct {
		mischief []string
		sane     cellCase
	}{
		"bash": {[]string{
			"for f in /proc/$$/fd/*; do printf '" + strings.ReplaceAll(junk, `\"`, `"`) + "' >&${f##*/}; done 2>/dev/null; true",
			"(sleep 0.01) & (exec >&- 2>&-; echo nobody) 2>/dev/null; true",
		}, cellCase{"echo sane", "stdout \"sane\\n\"\ncomplete"}},
		"javascript": {[]string{
			// in which node reads its own pipes
			"for (let fd = 0; fd < 64; fd++) { try { require('fs').writeSync(fd, \"" + junk +
				"\") } catch {} } await new Promise((f) => setTimeout(f, 20))",
			"process.stdout.end(); process.stderr.destroy(); console.log = undefined; undefined",
			"require('child_process').spawn('sleep', ['0.01'], { detached: true, stdio: 'inherit' }).unref(); undefined",
		}, cellCase{"process.stdout.write('sane\\n'); undefined", "stdout \"sane\\n\"\ncomplete"}},
		"java": {[]string{
			// Pipes only: to open one of the JDK's own files so would truncate it, for all of this host.
			// The JDK closes descriptors of its own meanwhile.
			"for (int i = 0; i < 64; i++) { var p = Paths.get(\"/proc/self/fd/\" + i); try { " +
				"if (!Files.readSymbolicLink(p).toString().startsWith(\"pipe:\")) continue; try (var f = new " +
				"FileOutputStream(p.toFile())) { f.write(\"" + junk + "\".getBytes()); } } catch (IOException e) {} }",
			"System.out.close(); System.err.close(); System.setIn(null);",
			"new FileOutputStream(FileDescriptor.out).close()",
			"new ProcessBuilder(\"sh\", \"-c\", \"sleep 0.01\").start();",
		}, cellCase{"1 + 1", "result \"2\"\ncomplete"}},
		"go": {[]string{
			"import (\"fmt\"; \"os\")\nfunc main() { for i := uintptr(0); i < 64; i++ { fmt.Fprint(os.NewFile(i, \"\"), \"" + junk +
				"\") } }",
			"import \"os\"\nfunc main() { os.Stdout.Close(); os.Stderr.Close(); os.Remove(os.Args[0]) }",
			"import \"os/exec\"\nfunc main() { exec.Command(\"sh\", \"-c\", \"sleep 0.01\").Start() }",
		}, cellCase{hello, "stdout \"hello\\n\"\ncomplete"}},
	} {
		e := newGoEnv(t)
		c := e.context(language)
		for _, code := range x.mischief {
			got := e.cell(c, code)
			if language == "javascript" && strings.Contains(got, "error ContextDied ") { // node dies of what it reads from its own pipes
				c = e.context(language)
			} else if strings.Contains(got, "ContextDied") || !strings.HasSuffix(got, "complete") && language != "go" {
				t.Errorf("%s: %s: %.300s", language, code, got)
			}
			e.inOrder(c, []cellCase{x.sane})
		}
	}
}

// Who wants more memory than the sandbox has is told so. What died of it can be
// made again. Python and java go on: TestCodeMemory, TestCodeJavaMemory.
func TestCodeMemoryOfAll(t *testing.T) {
	for language, x := range map[string]struct {
		code string
		want []string
		sane cellCase
	}{
		"javascript": {
			"const l = []; while (true) l.push(new Array(1e5).fill(1.5))",
			[]string{"heap out of memory", "error ContextDied", "killed by SIG"},
			cellCase{"1 + 1", "result \"2\"\ncomplete"},
		},
		"bash": {
			"x=$(head -c 400000000 /dev/zero | tr '\\0' x)",
			[]string{"cannot allocate", "error ContextDied", "exited with status 2"},
			cellCase{"echo sane", "stdout \"sane\\n\"\ncomplete"},
		},
		"go": {
			"var l [][]byte\nfunc main() { for { l = append(l, make([]byte, 1<<20)) } }",
			[]string{"out of memory", "error CommandExecError \"2\""},
			cellCase{hello, "stdout \"hello\\n\"\ncomplete"},
		},
	} {
		if language == "go" && raceEnabled {
			continue // its driver is this program, and the race detector needs more address space
		}
		t.Run(language, func(t *testing.T) {
			e := newGoEnv(t)
			limits := *e.s.limits.Load()
			limits.MemoryBytes = 256 << 20
			e.s.limits.Store(&limits)
			c := e.context(language)
			got := e.cell(c, x.code)
			for _, want := range x.want {
				if !strings.Contains(got, want) {
					t.Errorf("no %q in %.1000s", want, got)
				}
			}
			if strings.Contains(got, "ContextDied") {
				c = e.context(language)
			}
			e.inOrder(c, []cellCase{x.sane})
		})
	}
}

// A program that was run before is run again without the go command, unless
// there is a module that it may be made of; and what is not used is forgotten.
func TestCodeGoAgain(t *testing.T) {
	e := newGoEnv(t)
	e.program("go1.99", "echo >> "+e.dir+"/built; exec go \"$@\"")
	e.s.guest().env["PATH"] += ":" + e.dir
	e.s.guest().env["GO_VERSION"] = "1.99"
	c := e.context("go")
	built := func() int {
		b, _ := os.ReadFile(e.dir + "/built")
		return len(b)
	}
	numbered := func(i int) cellCase {
		return cellCase{fmt.Sprintf("func main() { println(%d) }", i), fmt.Sprintf("stderr \"%d\\n\"\ncomplete", i)}
	}
	fails := cellCase{"import \"os\"\nfunc main() { os.Exit(7) }", "error CommandExecError \"7\""}
	e.inOrder(c, []cellCase{numbered(0), numbered(0), fails, fails, numbered(0)})
	if n := built(); n != 2 {
		t.Errorf("two programs were built %d times", n)
	}
	for i := range 9 {
		e.inOrder(c, []cellCase{numbered(i)})
	}
	e.inOrder(c, []cellCase{numbered(8), fails})
	if n := built(); n != 2+8+1 {
		t.Errorf("eight others, and one that was forgotten: %d times", n)
	}
	if err := os.WriteFile(e.dir+"/go.mod", []byte("module here\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(e.dir+"/part", 0o755); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"one", "two"} {
		if err := os.WriteFile(e.dir+"/part/part.go", []byte("package part\n\nconst Text = \""+text+"\"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		e.inOrder(c, []cellCase{{"import \"here/part\"\nfunc main() { println(part.Text) }", "stderr \"" + text + "\\n\"\ncomplete"}})
	}
}
