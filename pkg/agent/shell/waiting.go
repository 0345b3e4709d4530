package shell

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// Waiting is a shell that waits. Its Command has everything except a text.
type Waiting struct {
	Command *command.Command
	Used    time.Time // when somebody last could have used it

	talk  *os.File // to its descriptor 3
	path  string
	env   map[string]string
	dir   string      // without symbolic links
	place os.FileInfo // of dir
	ready bool
}

// isReady reports whether the shell waits and nothing was written to its pipes: a
// warning at its start would be the first output of the command, and so would bytes
// that another process has written there.
func (w *Waiting) isReady() bool {
	if !w.Command.Alive() {
		return false
	}
	if !w.ready {
		w.ready = w.said() == "r"
	}
	return w.ready && w.quiet()
}

// quiet reports whether nothing was written to the pipes that will carry its command's
// output.
func (w *Waiting) quiet() bool {
	for _, p := range w.Command.Pumps {
		if n, err := p.Unread(); err != nil || n > 0 {
			return false
		}
	}
	return true
}

// said returns what the shell has written to the agent, without waiting.
func (w *Waiting) said() string {
	b := make([]byte, 8)
	n := 0
	proc.Control(w.talk, func(fd int) (err error) { //nolint:errcheck // then it has said nothing
		n, err = unix.Read(fd, b)
		return err
	})
	return string(b[:max(n, 0)])
}

// awaitWord waits until the shell has written to the agent or is gone, for d at most. It
// reads nothing.
func (w *Waiting) awaitWord(d time.Duration) {
	conn, err := w.talk.SyscallConn()
	if err != nil {
		return
	}
	w.talk.SetReadDeadline(time.Now().Add(d))   //nolint:errcheck // a socket has deadlines
	defer w.talk.SetReadDeadline(time.Time{})   //nolint:errcheck // as above
	conn.Read(func(fd uintptr) (stopped bool) { //nolint:errcheck // the caller looks itself
		_, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK)
		return !errors.Is(err, unix.EAGAIN)
	})
}

// dismiss ends a shell that nobody uses.
func (w *Waiting) dismiss() {
	w.Command.Process.Signal(syscall.SIGKILL, true) //nolint:errcheck // gone is what is wanted
	w.talk.Close()
	w.Command.ClosePumps()
}

// script returns the text that makes w run a command, or reports false if w cannot run
// it.
//
// The text stands on the first line of the command, so that the command's lines keep
// their numbers. If the shell cannot parse that line, it runs nothing of it. "k" says
// that the command follows.
func (w *Waiting) script(req *agent.CommandRequest, o *Offer) (string, bool) {
	text, ok := o.Fit.complete(o.Env)
	if !ok || o.Env["PATH"] != w.env["PATH"] && FindShell(o.Env["PATH"]) != w.path {
		return "", false
	}
	exported, ok := exports(w.env, o.Env)
	if !ok {
		return "", false
	}
	var b strings.Builder
	b.WriteString("unset -v _sandboxd")
	if fi, err := os.Stat(o.Dir); err != nil {
		return "", false
	} else if o.Dir != w.dir || !os.SameFile(fi, w.place) {
		fmt.Fprintf(&b, " && cd -P -- %s && unset -v OLDPWD && declare -x OLDPWD", quoteLine(o.Dir))
	}
	if exported != "" {
		b.WriteString(" && export" + exported)
	}
	merge := ""
	if req.Background {
		merge = " 2>&1"
	}
	fmt.Fprintf(&b, " && printf k >&3 || exit; exec 3>&-%s; : bash; %s", merge, text)
	if b.Len() > aheadScript || !readable(b.String()) {
		return "", false
	}
	return b.String(), true
}
