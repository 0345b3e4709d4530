package interpreter

import (
	_ "embed"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// A language is how a context of it is started and given code.
type language struct {
	name string
	// programs are looked for in this order: names in PATH, and patterns of paths.
	programs func(env map[string]string) []string
	argv     func(program string, p Place) []string // without the program
	env      map[string]string                      // in place of what the sandbox has
	stdin    bool                                   // the channel is standard input, too
	// terminal: standard error is a terminal until the driver was greeted, and
	// descriptor 4 is what it becomes.
	terminal bool
	source   string // if not "": standard input, and at its end
	self     bool   // the driver is the agent's own program: see Drive
	// again, if not 0, is after what time an interrupt is repeated, until the code
	// stops. A shell loses one that comes while it forks (the child takes it, and
	// executes), node one that comes while it goes from running code to waiting,
	// python one that comes just before a system call that waits. There a second
	// would interrupt what cleans up after the first, so it comes later.
	again time.Duration
	// urge: an interrupt is a SIGURG, and a SIGINT only if the driver sleeps. See
	// bashUrged.
	urge bool
	// hello is what a driver is sent first. It answers with a frame "ready".
	hello func(secret string, p Place) []byte
	// request makes a call of code. The driver answers with a frame "done", and
	// before it with "begin" if begins is set: an interrupt waits for that.
	request func(secret, code string, count int) []byte
	begins  bool
	// interrupt, if not nil, is what a driver is sent to stop a call.
	interrupt func(secret string, count int) []byte
	// settle, if not nil, says that an interrupt is a SIGINT, too, and is what a
	// driver is sent before the next call. It answers with a frame "settled", and
	// n as its status, when no SIGINT that came before has any effect any more.
	settle func(secret string, n int) []byte
}

//go:embed drivers/python_start.py
var pythonStart string

//go:embed drivers/python.py
var pythonDriver string

//go:embed drivers/node.js
var nodeDriver string

//go:embed drivers/Driver.java
var javaDriver string

// languages that contexts can be made of.
var languages = []*language{
	{
		name: "python",
		programs: func(env map[string]string) []string {
			return append(versions(env["PYTHON_VERSION"], "python%s",
				"/opt/python/versions/*-%s-*/bin/python3", "/opt/python/versions/*-%s.*/bin/python3"), "python3", "python")
		},
		argv:  always("-c", pythonStart),
		again: time.Second,
		hello: func(secret string, p Place) []byte {
			return fmt.Appendf(nil, "%s\n%d\n%d\n%s", secret, p.Memory, len(pythonDriver), pythonDriver)
		},
		request: jsonRequest,
		settle:  jsonSettle,
	},
	node("javascript"),
	node("typescript"),
	{
		name: "java",
		programs: func(env map[string]string) []string {
			all := versions(env["JAVA_VERSION"], "java%s", "java-%s",
				"/usr/lib/jvm/*-%s/bin/java", "/usr/lib/jvm/*-%s-*/bin/java", "/usr/lib/jvm/*-%s.*/bin/java")
			if home := env["JAVA_HOME"]; filepath.IsAbs(home) {
				all = append(all, home+"/bin/java")
			}
			return append(all, "java")
		},
		argv:    javaArguments,
		source:  javaDriver,
		hello:   secretOnly,
		request: sizedRequest, interrupt: sizedInterrupt,
	},
	{
		name: "go",
		programs: func(env map[string]string) []string {
			return append(versions(env["GO_VERSION"], "go%s", "go-%s",
				"/usr/lib/go-%s/bin/go", "/usr/local/go%s/bin/go", "/usr/local/go-%s/bin/go"), "go", "/usr/local/go/bin/go")
		},
		argv:    func(program string, _ Place) []string { return []string{driveGo, program} },
		self:    true,
		hello:   func(secret string, p Place) []byte { return fmt.Appendf(nil, "%s\n%d\n", secret, p.Memory) },
		request: sizedRequest, interrupt: sizedInterrupt,
	},
	{
		// An interactive shell, because only that one goes on after an interrupt,
		// an unset variable or a syntax error. It has no job control, no prompts,
		// and no terminal but one that nobody sees: whenever a child dies by a
		// signal, it resets the terminal that standard error was at its start, and
		// says so if that was none.
		name:     "bash",
		programs: func(map[string]string) []string { return []string{"bash"} },
		argv:     always("--noprofile", "--norc", "--noediting", "-i"),
		env:      map[string]string{"PS1": "", "PS2": "", "PROMPT_COMMAND": ""},
		stdin:    true,
		terminal: true,
		again:    interruptAgain,
		urge:     true,
		hello: func(secret string, p Place) []byte {
			limit := ""
			if p.Memory > 0 {
				limit = fmt.Sprintf("ulimit -S -d %d; ", (p.Memory-p.Memory/8)>>10)
			}
			return fmt.Appendf(nil, "exec 2>&4 4>&-; set +o history +H; unset HISTFILE PROMPT_COMMAND; export -n PS1 PS2; "+
				"%s%sprintf '\\n%s{\"type\":\"ready\"}\\n' >&3\n", bashUrged, limit, secret)
		},
		// What answers is in its own line, which is read also after an interrupt. The
		// code and its children have neither the channel nor its end. Standard input is
		// none from the beginning on: see bashUrged.
		request: func(secret, code string, _ int) []byte {
			return fmt.Appendf(nil, "{ builtin printf '\\n%s{\"type\":\"begin\"}\\n' >&3; eval %s 3>&-; } </dev/null\n%s",
				secret, bashQuote(code), bashSays(secret, "done", "$?"))
		},
		begins: true,
		// One that comes while that line is read takes the part that was read with it,
		// so the line comes once more.
		interrupt: func(secret string, _ int) []byte { return bashSays(secret, "done", "$?") },
		settle:    func(secret string, n int) []byte { return bashSays(secret, "settled", strconv.Itoa(n)) },
	},
}

// bashUrged has bash interrupt itself when it gets a SIGURG.
//
// A SIGINT is not sure to stop it, and may hang it (5.2, jobs.c). While bash waits
// for a child, one counts only if the child dies of it: it is lost if the child
// has ended, handles it, or is a fork of bash's own that has not yet reset its
// handlers and then exits with status 130. A loop of short children on a busy host
// is so nearly all the time. And one that comes while wait_for exchanges the
// handler of SIGINT, before it has noted the old one, has the new handler send it
// to bash again, for ever. That is where bash is when it is preempted at the end
// of that system call.
//
// A trap waits until bash has no child to wait for. This one does nothing when
// standard input is the channel: then no code runs, and the signal came late.
// Children do not inherit it, and a SIGURG without a trap has no effect. What bash
// waits for is to end, so it gets a SIGINT while bash sleeps, which is outside of
// that exchange; all of the group at once, since a subshell of bash's that waits
// for a child of its own minds one only if that child dies of it, too.
const bashUrged = `trap 'builtin test -S /dev/fd/0 || builtin kill -INT $$' URG; `

// bashSays has bash send a frame. What is left of the line when its beginning is
// lost does no harm: it has no quotes, and its errors are not seen.
func bashSays(secret, kind, status string) []byte {
	return []byte(`builtin printf \\n` + secret + `\\173\\42type\\42:\\42` + kind +
		`\\42,\\42status\\42:%d\\175\\n ` + status + " >&3 2>&- #\n")
}

// node makes javascript, and typescript, which is javascript after its types
// were erased.
func node(name string) *language {
	return &language{
		name: name,
		programs: func(env map[string]string) []string {
			return append(versions(env["NODE_VERSION"], "node%s", "node-%s",
				"/opt/node/v%s/bin/node", "/opt/node/v%s.*/bin/node"), "node", "nodejs")
		},
		argv:    func(_ string, p Place) []string { return append(nodeHeap(p), "-e", nodeDriver, "--", name) },
		again:   interruptAgain,
		hello:   secretOnly,
		request: jsonRequest,
		// A SIGINT ends code that spins, and this what awaits.
		interrupt: func(_ string, count int) []byte { return fmt.Appendf(nil, "{\"interrupt\":%d}\n", count) },
		settle:    jsonSettle,
	}
}

// versions lists where a program of version v may be: each format with v, then
// with v less its last part, and so on. "3.11.9" is what an image calls the
// python that it has as python3.11.
func versions(v string, formats ...string) (all []string) {
	v = strings.TrimPrefix(v, "v")
	if strings.ContainsAny(v, `/*?[\`) {
		return nil
	}
	for v != "" {
		for _, f := range formats {
			all = append(all, fmt.Sprintf(f, v))
		}
		v = v[:max(strings.LastIndexByte(v, '.'), 0)]
	}
	return all
}

func always(argv ...string) func(string, Place) []string {
	return func(string, Place) []string { return argv }
}

// nodeHeap bounds the heap by what the sandbox has less what node holds beside
// it: 45 MB, what is young, and room for buffers. Then V8 says what is wrong. A
// limit of the address space would end WebAssembly, which reserves 10 GB, and by
// that fetch.
func nodeHeap(p Place) []string {
	if p.Memory <= 0 {
		return nil
	}
	return []string{fmt.Sprintf("--max-old-space-size=%d", max(p.Memory/2, p.Memory-p.Memory/8-128<<20)>>20)}
}

// javaArguments bounds the heap by half of what the sandbox has, because a JVM
// holds as much again beside it: on runc it sees the memory of the host, and an
// out-of-memory kill would take the context. The rest is for its start, which
// costs 1.1 s of CPU so, and 1.9 s with all compilers and Java's own choice of
// a collector (JDK 17).
func javaArguments(_ string, p Place) []string {
	argv := []string{"-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"}
	if p.Memory > 0 {
		argv = append(argv, fmt.Sprintf("-Xmx%dm", max(p.Memory>>21, 16)))
	}
	return append(argv, "--add-opens", "java.base/java.io=ALL-UNNAMED", "--source", "11", "/dev/stdin")
}

// bashQuote writes text as one word and one line of bash.
func bashQuote(text string) string {
	var b strings.Builder
	b.WriteString("$'")
	for i := range len(text) {
		switch c := text[i]; {
		case c == '\\' || c == '\'':
			b.WriteByte('\\')
			b.WriteByte(c)
		case c < ' ' || c == 0x7f:
			fmt.Fprintf(&b, `\x%02x`, c)
		default:
			b.WriteByte(c)
		}
	}
	return b.String() + "'"
}

// jsonRequest is a call in one line of JSON.
func jsonRequest(_, code string, count int) []byte {
	return append(strconv.AppendInt(append(appendJSON([]byte(`{"code":`), code), `,"count":`...), int64(count), 10), "}\n"...)
}

func jsonSettle(_ string, n int) []byte { return fmt.Appendf(nil, "{\"settle\":%d}\n", n) }

// sizedRequest is a call for those who read no JSON: a line with the count and
// the size in bytes, and the code.
func sizedRequest(_, code string, count int) []byte {
	return fmt.Appendf(nil, "%d %d\n%s", count, len(code), code)
}

// sizedInterrupt stops a call that sizedRequest made.
func sizedInterrupt(_ string, count int) []byte { return fmt.Appendf(nil, "%d -1\n", count) }

func secretOnly(secret string, _ Place) []byte { return []byte(secret + "\n") }
