package server

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/shell"
)

// start is what the entrypoint is made of.
type start struct {
	guest   *guest     // as whom, where, with what environment
	argv    []string   // as the daemon sent it; once it is prepared, as it is executed
	literal bool       // one element is never split into words
	split   string     // the one element that was; empty: none was
	ends    []int      // its ends of the pipes for its output
	script  *preScript // nil: none is read first
	command *command.Command
}

// startOf is the entrypoint that b asks for.
func startOf(b *agent.Bootstrap, g *guest) start {
	return start{guest: g, argv: b.Entrypoint, literal: b.Literal}
}

// prepareEntrypoint resolves the entrypoint and makes its working directory. On failure
// it returns what startEntrypoint does.
func (s *Server) prepareEntrypoint(st *start) (code int, err error) {
	g := st.guest
	if err := os.MkdirAll(g.workdir, 0o755); err != nil {
		return 1, fmt.Errorf("create the working directory of the image: %w", err)
	}
	argv, err := g.entrypointArgs(st.argv)
	if err != nil {
		return 127, err
	}
	if len(argv) == 0 {
		return 0, nil
	}
	text := strings.Join(argv, " ")
	if !st.literal && g.isLine(argv) {
		if argv, err = shell.Split(text); err != nil {
			return 127, fmt.Errorf("%s %.100q: no program has this name, and it cannot be split into words: %w", agent.EntrypointID, text,
				err)
		}
		st.split = text
	}
	if st.command, st.ends, err = s.commands.New(agent.EntrypointID, text, 1); err != nil {
		return 1, fmt.Errorf("make a pipe for the entrypoint: %w", err)
	}
	if st.argv, st.script, err = g.withPreScript(argv); err != nil {
		return 127, err
	}
	return 0, nil
}

// isLine reports whether an entrypoint is one element with white space in it that names
// no program: the words of a command, which some clients send as one.
func (g *guest) isLine(argv []string) bool {
	if len(argv) != 1 || !strings.ContainsAny(argv[0], " \t\n") {
		return false
	}
	name := argv[0]
	if !strings.Contains(name, "/") {
		return shell.LookPath(name, g.env["PATH"]) == ""
	}
	if !filepath.IsAbs(name) {
		name = filepath.Join(g.workdir, name)
	}
	_, err := os.Stat(name)
	return err != nil
}

// startEntrypoint starts it as the image's user. On failure it returns the exit code
// that a shell would have, and an error that says what to correct.
func (s *Server) startEntrypoint(st *start) (code int, err error) {
	if code, err = s.prepareEntrypoint(st); err != nil || st.command == nil {
		return code, err
	}
	c, argv, g := st.command, st.argv, st.guest
	l := &command.Launch{
		Way: command.Way{Path: argv[0], Argv: argv, Env: shell.Environ(g.envOf(g.user))},
		Dir: g.workdir, Cred: g.cred,
	}
	if !strings.Contains(l.Path, "/") {
		l.Path = shell.LookPath(l.Path, g.env["PATH"])
	}
	if script := st.script; script != nil {
		l.More = []uintptr{uintptr(script.end)}
		defer syscall.Close(script.end)
	}
	if err := s.commands.Start(c, l, 0, false, st.ends); err != nil {
		if st.split != "" {
			err = fmt.Errorf("%w; it is the first word of %.100q, which names no program either", err, st.split)
		}
		return c.End().Code, err
	}
	c.Begin()
	s.entrypoint.Store(c)
	return 0, nil
}

// awaitStart waits until the entrypoint has read its pre-script and waits for something
// itself. It reports false if the entrypoint has ended before.
func (s *Server) awaitStart(st *start) bool {
	if st.script != nil && !st.script.take(st.guest, st.command) {
		return false
	}
	return s.settle(settleLimit)
}

// settleLimit bounds how long the first answer waits for the entrypoint. A program that
// computes for longer as it starts delays its sandbox by that. An interpreter that does
// not find its script takes 20 ms to say so on runc, and 50 ms on gVisor
// (docs/benchmarks.md, code_context_new_python), on a busy host several times as long.
const settleLimit = 250 * time.Millisecond

// settleLook is the shortest time between two looks at the entrypoint.
const settleLook = 500 * time.Microsecond

// settle waits until the entrypoint has come as far as to wait for something, at most
// for limit, and reports false if it has ended. So a sandbox whose entrypoint fails at
// once does not run for a moment: it fails. There is no event for a process that begins
// to wait. Most do within a few milliseconds. Two looks must agree: a look takes time, and
// the last child may end after its parent was looked at.
func (s *Server) settle(limit time.Duration) bool {
	c := s.entrypoint.Load()
	if c == nil {
		return true
	}
	late, waited := time.After(limit), false
	for pause := settleLook; ; {
		select {
		case <-c.Died():
			return false
		case <-late:
			return true
		case <-time.After(pause):
		}
		switch {
		case !c.Process.Waits():
			waited = false
			pause += pause / 2
		case waited:
			return true
		default:
			waited, pause = true, settleLook
		}
	}
}
