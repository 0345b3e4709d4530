package terminal

import (
	"cmp"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// A terminal is a session of POST /pty: a command that starts when the first client
// connects, and goes on when that leaves. One client is connected at a time.
//
//	WebSocket ─ viewer ──────▶ terminal or pipe ─▶ process
//	     ▲        ▲                                   │
//	     │        └─ live: what is written now ◀─ pump
//	     └── replay: what was written since N ◀─ ring ◀┘
//
// Output goes to the ring and then to the client. A client that reads slowly slows the
// process down, as at any terminal; one that is gone does not.
type terminal struct {
	id   string
	req  agent.PtyRequest
	made time.Time

	// feed is held while output goes to ring and viewer, and while a viewer catches up,
	// so that no viewer misses a byte or gets one twice.
	feed sync.Mutex
	live *viewer // has caught up; guarded by feed

	mu      sync.Mutex
	cmd     *command.Command // nil: not started
	tty     *os.File         // nil: pipe mode
	removed bool
	holder  *viewer // the viewer that is connected, or about to be
}

// launch starts the command unless it was started before. An error means
// that nothing runs.
func (ts *Set) launch(t *terminal, tty bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.cmd != nil:
		return nil
	case t.removed:
		return reply.Fail(http.StatusNotFound, reply.NoContext, "terminal %s was removed", t.id)
	case ts.Stopping():
		return reply.ErrStopping
	}
	l, err := ts.Prepare(&t.req)
	if err != nil {
		return err
	}
	if tty {
		l.DefaultEnv("TERM", "xterm-256color")
	}
	pipes := 2
	if tty {
		pipes = 0
	}
	c, ends, err := ts.Commands.New(t.id, contentOf(&t.req), pipes)
	if err != nil {
		return err
	}
	if tty {
		ours, theirs, err := proc.OpenTTY(cmp.Or(t.req.Cols, 80), cmp.Or(t.req.Rows, 24), l.Cred)
		if err != nil {
			return err
		}
		t.tty, l.TTY, ends = ours, true, []int{theirs}
		c.OnTerminal(ours)
	}
	t.cmd, c.Owner = c, t.output
	err = ts.Commands.Start(c, l, command.Milliseconds(t.req.Timeout), !tty, ends)
	if err == nil {
		c.Begin()
	}
	return err
}

// contentOf is what status calls the command of a session.
func contentOf(req *agent.PtyRequest) string {
	switch {
	case req.Command != "":
		return req.Command
	case len(req.Argv) > 0:
		return strings.Join(req.Argv, " ")
	}
	return "shell"
}

// output keeps the process's output, and sends it to the viewer that is connected.
func (t *terminal) output(stream byte, b []byte) {
	t.feed.Lock()
	defer t.feed.Unlock()
	t.cmd.Output.Write(b) //nolint:errcheck // never fails
	if t.live != nil {
		t.live.output(stream, b)
	}
}

// catchUp sends v the output since a byte number and that it is connected; then v is
// live. Output that the ring has forgotten is skipped; the offsets show the gap. Each
// message may take as long as limit, and the process waits meanwhile.
func (t *terminal) catchUp(v *viewer, since int64, limit time.Duration) error {
	t.feed.Lock()
	defer t.feed.Unlock()
	patience := time.AfterFunc(limit, func() { proc.Guarded(v.stop) })
	defer patience.Stop()
	from, end := t.cmd.Output.Range()
	for off := max(since, from); off < end; {
		next := min(end, off+agent.MaxPtyReplay)
		if err := v.replay(t.cmd, off, next); err != nil {
			return err
		}
		off = next
		patience.Reset(limit)
	}
	if err := v.text(agent.PtyFrame{Type: "connected", SessionID: t.id, Mode: t.mode()}); err != nil {
		return err
	}
	t.live = v
	return nil
}

func (t *terminal) mode() string {
	if t.tty != nil {
		return "pty"
	}
	return "pipe"
}

// claim makes v the connected viewer. If another one is connected, claim fails or, with
// takeover, disconnects it and waits for its end.
func (t *terminal) claim(v *viewer, takeover bool) bool {
	t.mu.Lock()
	old := t.holder
	if old != nil && !takeover {
		t.mu.Unlock()
		return false
	}
	t.holder = v
	t.mu.Unlock()
	if old != nil {
		old.evict()
		<-old.left
	}
	return true
}

// release is the end of v.
func (t *terminal) release(v *viewer) {
	v.stop()
	t.feed.Lock()
	if t.live == v {
		t.live = nil
	}
	t.feed.Unlock()
	t.letGo(v)
	close(v.left)
}

// letGo lets another viewer connect.
func (t *terminal) letGo(v *viewer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.holder == v {
		t.holder = nil
	}
}

// input is the file that typed bytes are written to.
func (t *terminal) input() *os.File {
	if t.tty != nil {
		return t.tty
	}
	return t.cmd.Stdin
}

// signal sends sig to the foreground. If the kernel does not say which group that is
// (gVisor), SIGINT and SIGQUIT are typed as keys, and others go to the process group of
// the session's first process, as in execd.
func (t *terminal) signal(sig syscall.Signal) error {
	if t.tty != nil && t.cmd.Alive() {
		if pgrp, err := proc.Foreground(t.tty); err == nil {
			return syscall.Kill(-pgrp, sig)
		}
		if key, ok := proc.SignalKey(t.tty, sig); ok {
			_, err := t.tty.Write([]byte{key})
			return err
		}
	}
	return t.cmd.Process.Signal(sig, true)
}

// status describes t as execd does, and more.
func (t *terminal) status() agent.PtyStatus {
	t.mu.Lock()
	defer t.mu.Unlock()
	st := agent.PtyStatus{
		SessionID: t.id, Command: contentOf(&t.req),
		Connected: t.holder != nil, CreatedAt: t.made.Format(time.RFC3339Nano),
	}
	if t.cmd == nil {
		return st
	}
	st.Mode, st.Running = t.mode(), t.cmd.Running()
	_, st.OutputOffset = t.cmd.Output.Range()
	if !st.Running {
		end := t.cmd.End()
		st.ExitCode = &end.Code
	}
	return st
}
