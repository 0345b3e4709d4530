package interpreter

import (
	_ "embed"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// A language says how a context is started and how it gets code.
type language struct {
	name string
	// programs are tried in this order: names in PATH, and patterns of paths.
	programs func(env map[string]string) []string
	argv     func(program string, p Place) []string // without the program
	env      map[string]string                      // in place of what the sandbox has
	stdin    bool                                   // the channel is also standard input
	// terminal: standard error is a terminal until the driver has got hello; then it
	// becomes descriptor 4.
	terminal bool
	source   string // if not "": in a file that is standard input, at its end
	self     bool   // the driver is the agent's own program: see Drive
	// again, if not 0, is the time after which an interrupt is repeated, until the code
	// stops. A shell loses an interrupt that comes while it forks (the child takes it,
	// and executes). node loses one that comes while it goes from running code to
	// waiting, and python one that comes just before a system call that waits. In
	// python a second interrupt could hit code that cleans up after the first, so it
	// comes later.
	again time.Duration
	// urge: an interrupt is a SIGURG, followed by a SIGINT only if the driver sleeps.
	// See bashUrged.
	urge bool
	// hello is the first message to a driver. It answers with a frame "ready".
	hello func(secret string, p Place) []byte
	// request makes the message that runs code. The driver answers with a frame "done".
	// If begins is set, it sends a frame "begin" before, and an interrupt waits for
	// that.
	request func(secret, code string, count int) []byte
	begins  bool
	// interrupt, if not nil, makes the message that stops a call.
	interrupt func(secret string, count int) []byte
	// settle, if not nil, makes a message that the driver gets before the next call,
	// and means that an interrupt is also a SIGINT. The driver answers with a frame
	// "settled" and n as its status once no earlier SIGINT can have an effect.
	settle func(secret string, n int) []byte
	// reseed, if not nil, makes a message after which code draws other random numbers. The
	// driver does not answer.
	reseed func(secret string, seed []byte) []byte
	// move, if not nil, makes a message by which a driver that has run nothing gets another
	// environment and limit of memory. It does not answer, and ends if it cannot. reads begins the names of variables
	// that its program reads when it starts; fixed: it cannot be told another limit of memory.
	move  func(from, to Place) []byte
	reads string
	fixed bool
}

//go:embed drivers/python_start.py
var pythonStart string

//go:embed drivers/python.py
var pythonDriver string

//go:embed drivers/node.js
var nodeDriver string

//go:embed drivers/Driver.java
var javaDriver string

// languages are the languages of contexts.
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
		reseed:  jsonReseed,
		move:    jsonMove,
		reads:   "PYTHON",
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
		reseed: func(_ string, seed []byte) []byte { return fmt.Appendf(nil, "0 -2 %x\n", seed[:8]) },
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
		// An interactive shell, because only that one goes on after an interrupt, an
		// unset variable or a syntax error. It has no job control and no prompts. Its
		// terminal is one that nobody sees: whenever a child dies by a signal, bash
		// resets the terminal that standard error was at its start, and prints an error
		// if it was none.
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
		// The command that answers is on a line of its own, which bash reads even after
		// an interrupt. The code and its children do not have the channel. Their
		// standard input is the null device from the beginning: see bashUrged.
		request: func(secret, code string, _ int) []byte {
			return fmt.Appendf(nil, "{ builtin printf '\\n%s{\"type\":\"begin\"}\\n' >&3; eval %s 3>&-; } </dev/null\n%s",
				secret, bashQuote(code), bashSays(secret, "done", "$?"))
		},
		begins: true,
		// An interrupt that comes while bash reads that line discards the part that was
		// read, so interrupt sends the line once more.
		interrupt: func(secret string, _ int) []byte { return bashSays(secret, "done", "$?") },
		settle:    func(secret string, n int) []byte { return bashSays(secret, "settled", strconv.Itoa(n)) },
		// A RANDOM that somebody has unset is a variable like any other.
		reseed: func(_ string, seed []byte) []byte {
			return fmt.Appendf(nil, "{ [[ ${RANDOM@a} == *i* ]] && RANDOM=$((16#%x)); } 2>/dev/null\n", seed[:4])
		},
	},
}

// bashUrged has bash interrupt itself when it gets a SIGURG.
//
// A SIGINT may not stop bash, and may hang it (5.2, jobs.c). While bash waits for a
// child, a SIGINT counts only if the child dies of it. It is lost if the child has
// ended, handles it, or is a fork of bash that has not yet reset its handlers and then
// exits with status 130. A loop of short children on a busy host is in that state
// nearly all the time. A SIGINT hangs bash if it comes while wait_for exchanges the
// handler of SIGINT and has not yet noted the old one: then the new handler sends it to
// bash again, for ever. Bash is at that point if it is preempted at the end of that
// system call.
//
// A trap waits until bash has no child to wait for. This trap does nothing when
// standard input is the channel: then no code runs, and the signal came late. Children
// do not inherit it, and a SIGURG without a trap has no effect. The child that bash
// waits for has to end, so it gets a SIGINT while bash sleeps; bash is not in that
// exchange then. The whole group gets it at once, because a subshell that waits for a
// child of its own obeys a SIGINT only if that child dies of it too.
const bashUrged = `trap 'builtin test -S /dev/fd/0 || builtin kill -INT $$' URG; `

// bashSays makes bash send a frame. If the beginning of the line is lost, the rest does
// no harm: it has no quotes, and nobody sees its errors.
func bashSays(secret, kind, status string) []byte {
	return []byte(`builtin printf \\n` + secret + `\\173\\42type\\42:\\42` + kind +
		`\\42,\\42status\\42:%d\\175\\n ` + status + " >&3 2>&- #\n")
}

// node makes the languages javascript and typescript, which is javascript once its
// types are erased.
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
		// A SIGINT ends a busy loop; this message ends code that awaits.
		interrupt: func(_ string, count int) []byte { return fmt.Appendf(nil, "{\"interrupt\":%d}\n", count) },
		settle:    jsonSettle,
		reseed:    jsonReseed,
		move:      jsonMove,
		reads:     "NODE",
		fixed:     true, // see nodeHeap
	}
}

// versions lists where a program of version v may be: each format with v, then with v
// less its last part, and so on. An image calls "3.11.9" a python that it has as
// python3.11.
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

// nodeHeap bounds the heap by the sandbox's memory less what node holds beside it: 45
// MB, the young generation, and room for buffers. So V8 reports that memory is short. A
// limit of the address space would break WebAssembly, which reserves 10 GB, and with it
// fetch.
func nodeHeap(p Place) []string {
	if p.Memory <= 0 {
		return nil
	}
	return []string{fmt.Sprintf("--max-old-space-size=%d", max(p.Memory/2, p.Memory-p.Memory/8-128<<20)>>20)}
}

// javaArguments bounds the heap by half of the sandbox's memory, because a JVM holds as
// much again beside the heap. On runc a JVM sees the memory of the host, and an
// out-of-memory kill would end the context. The other arguments make it start faster:
// in 1.1 s of CPU, where all compilers and Java's own choice of a collector take 1.9 s
// (JDK 17).
func javaArguments(_ string, p Place) []string {
	argv := []string{"-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"}
	if p.Memory > 0 {
		argv = append(argv, fmt.Sprintf("-Xmx%dm", max(p.Memory>>21, 16)))
	}
	for _, name := range []string{"java.io", "java.lang", "java.util", "java.util.concurrent"} { // see the driver
		argv = append(argv, "--add-opens", "java.base/"+name+"=ALL-UNNAMED")
	}
	return append(argv, "--source", "11", "/dev/stdin")
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

func jsonReseed(_ string, seed []byte) []byte { return fmt.Appendf(nil, "{\"reseed\":\"%x\"}\n", seed) }

// jsonMove has what differs between two places. A program of the image may have started the
// driver with other variables than those it got: if it changed one of these, the driver ends.
func jsonMove(from, to Place) []byte {
	env := map[string][2]*string{} // before and after; nil: not set
	for _, e := range []map[string]string{from.Env, to.Env} {
		for k := range e {
			before, was := from.Env[k]
			after, is := to.Env[k]
			if was && is && before == after {
				continue
			}
			var both [2]*string
			if was {
				both[0] = &before
			}
			if is {
				both[1] = &after
			}
			env[k] = both
		}
	}
	return append(appendJSON(nil, map[string]any{"move": map[string]any{"env": env, "memory": to.Memory}}), '\n')
}

// sizedRequest is a call for drivers that read no JSON: a line with the count and the
// size in bytes, and the code.
func sizedRequest(_, code string, count int) []byte {
	return fmt.Appendf(nil, "%d %d\n%s", count, len(code), code)
}

// sizedInterrupt stops a call that sizedRequest made.
func sizedInterrupt(_ string, count int) []byte { return fmt.Appendf(nil, "%d -1\n", count) }

func secretOnly(secret string, _ Place) []byte { return []byte(secret + "\n") }
