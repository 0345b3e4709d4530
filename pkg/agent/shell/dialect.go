package shell

import (
	"bytes"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
)

// How the agent talks to the shell of a session:
//
// The shell reads its script (`bash -s`) from a socket of the agent's, which is
// its standard input between two runs. A run is one line of that script:
//
//	eval 'what the client sent' </dev/null; eval 'say how it went, and the state' >&0
//
// So the shell never parses the client's text together with the agent's, even if that
// text has open quotes, unended here-documents or syntax errors. While eval runs, bash
// has the socket at a descriptor of its own above 9, which it opens close-on-exec: no
// program of a run inherits it, so none can answer in the shell's place or keep the
// shell from answering. An answer begins with a random word, so code in the shell
// itself cannot write an answer either.
//
// The agent writes its words so that no alias or function of the client replaces them:
// \builtin eval. Reserved words cannot be protected like that, so it uses none, and it
// writes nothing before builtin itself.

// maxState bounds the state of a shell that is kept, in bytes. A larger one
// is lost with the shell.
const maxState = 1 << 20

// dialect is what differs between bash and sh.
type dialect struct {
	argv  []string // after the name
	own   string   // before the name of a builtin, so that no function replaces it
	hello string   // the first line, on one line; %s is what keeps the state at the end
	traps string   // prints a trap that would print into the state
	state string   // prints what makes another shell like this one
}

// bash also reports its state when it exits. After eval, as with set -e, descriptor 0
// is the socket. Within eval the socket is the lowest descriptor above 9, where bash
// keeps it.
var (
	bash = dialect{
		argv:  []string{"--noprofile", "--norc", "-s"},
		own:   `\builtin `,
		hello: `\builtin shopt -s expand_aliases; \builtin trap -- %s EXIT`,
		traps: `\builtin trap -p DEBUG; `,
		// Options and aliases come last, since they change what comes after them.
		state: `\builtin declare -p; \builtin declare -f; \builtin declare -F; \builtin umask -p; ` +
			`\builtin trap -p; \builtin shopt -p; \builtin set +o; \builtin alias -p; `,
	}
	// POSIX has no commands for the rest.
	posix = dialect{
		argv: []string{"-s"}, own: "command ",
		state: "command export -p; command set +o; ",
	}
)

func dialectOf(shell string) dialect {
	if filepath.Base(shell) == "bash" {
		return bash
	}
	return posix
}

// Quote makes s one word of a shell.
func Quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// say is a command with which a shell reports its status and state, marked by word.
// between may be empty; it runs after the status is saved.
func (d dialect) say(word, between string) string {
	p := d.own + "printf"
	return d.own + "eval " + Quote(fmt.Sprintf(
		`%[1]s '%%s\n' "%[2]s $? $-"; %[3]s%[4]s`+
			`%[1]s '%%s\n' %[2]s "${PWD-}" %[2]s "${OLDPWD-}" %[2]s; %[5]s%[1]s '%%s\n' %[2]s.; %[6]sset +x`,
		p, word, between, d.traps, d.state, d.own)) + " "
}

// greeting is the first line of a shell. The state of an earlier shell, if there is
// one, comes first. word marks the report that the shell makes when it exits.
func (d dialect) greeting(word string, state []byte, dir string) []byte {
	var b bytes.Buffer
	if state != nil {
		// Change the directory first: PWD and OLDPWD are among the variables.
		fmt.Fprintf(&b, "%scd -- %s 2>/dev/null; ", d.own, Quote(dir))
		fmt.Fprintf(&b, "%seval %s </dev/null >/dev/null 2>&1; ", d.own, Quote(string(state)))
		fmt.Fprintf(&b, "%sset +x 2>/dev/null; ", d.own)
	}
	if d.hello != "" {
		say := d.say(word, "")
		fmt.Fprintf(&b, d.hello, Quote(`\builtin test -S /dev/fd/0 && `+say+">&0 2>/dev/null || "+say+">&10 2>/dev/null"))
	} else {
		b.WriteByte(':')
	}
	b.WriteByte('\n')
	return b.Bytes()
}

// A runLine is one run, as the shell gets it.
type runLine struct {
	word    string // marks the answer
	command string
	marker  uint64 // of what it starts, in bytes, a multiple of 1024
	cwd     string // "": where the shell is
	back    string // where the shell was before, if cwd is set, and
	older   string // where before that
	trace   bool   // set -x is in effect
}

// line returns r as the shell reads it. The shell reads the empty line at its end after
// it has done all of r: see hasRead.
func (d dialect) line(r runLine) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%[1]sulimit -S -m %[2]d 2>/dev/null || %[1]s:; ", d.own, r.marker/1024)
	between := ""
	if r.cwd != "" {
		fmt.Fprintf(&b, "%scd -- %s && ", d.own, Quote(r.cwd))
		between = fmt.Sprintf("%scd -- %s >/dev/null; OLDPWD=%s; ", d.own, Quote(r.back), Quote(r.older))
	}
	command := r.command
	if r.trace {
		command = d.own + "set -x\n" + command
	}
	fmt.Fprintf(&b, "%seval %s </dev/null; ", d.own, Quote(command))
	fmt.Fprintf(&b, "%s>&0 2>/dev/null\n\n", d.say(r.word, between))
	return b.Bytes()
}

// An answer is what a shell reports about a run, or about itself when it exits.
type answer struct {
	word  string
	code  int
	trace bool   // set -x was in effect
	dir   string // where it is
	older string // where it was before
	state []byte // nil: not known
}

// A scanner finds answers in the bytes from a shell, and ignores all others.
type scanner struct {
	buf   []byte
	large bool // state was let go
}

// scan takes the next bytes, and returns the answer that they complete, if one of words
// marks it.
func (c *scanner) scan(b []byte, words ...string) (a answer, ok bool) {
	c.buf = append(c.buf, b...)
	for _, w := range words {
		if a, ok = c.find(w); ok {
			c.buf, c.large = nil, false
			return a, true
		}
	}
	if keep := 64 << 10; len(c.buf) > maxState+2*keep {
		// The beginning says how it went, the end that it has gone.
		c.buf, c.large = append(c.buf[:keep:keep], c.buf[len(c.buf)-keep:]...), true
	}
	return answer{}, false
}

func (c *scanner) find(word string) (a answer, ok bool) {
	w := []byte(word)
	_, rest, ok := bytes.Cut(c.buf, append(w, ' '))
	if !ok {
		return a, false
	}
	body, _, ok := bytes.Cut(rest, append(w, '.', '\n'))
	if !ok {
		return a, false
	}
	head, body, _ := bytes.Cut(body, []byte("\n"))
	code, flags, _ := strings.Cut(string(head), " ")
	mark := []byte("\n" + word + "\n")
	traps, body, _ := bytes.Cut(body, mark[1:])
	dir, body, _ := bytes.Cut(body, mark)
	older, state, _ := bytes.Cut(body, mark)
	a = answer{word: word, trace: strings.Contains(flags, "x"), dir: string(dir), older: string(older), state: state}
	a.code, _ = strconv.Atoi(code)
	a.code &= 255
	if len(traps) > 0 || c.large || len(state) > maxState {
		a.state = nil // a trap of the client's may have printed into it
	}
	return a, true
}
