package command

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/output"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// Times of commands.
const (
	InterruptGrace = 3 * time.Second // between SIGTERM and SIGKILL, as execd has it
	// A command counts as ended this long after its death even if its client
	// has not taken the output yet.
	DrainLimit = 2 * time.Second
)

// A Command is one process that a client asked for, and how it ended.
//
//	Start ── pumps: pipe → ring, client ── process dies ── pumps take the rest ── finish
//
// It ends when its process does, not when its pipes close: processes that it left in
// the background go on, and so does their output, into the ring.
type Command struct {
	ID      string
	Content string // the text of it, for status
	Started time.Time
	Output  *output.Ring
	Process *proc.Process // nil: could not be started; see Died
	Pumps   []*output.Pump
	Stdin   *os.File // our end; nil: /dev/null
	Forget  bool     // at its end

	forgotten bool // by Registry.ForgetEnded; guarded by its mu

	// Owner takes the output of a command that is part of something longer, instead of
	// ring and client. More output may come after the command's death, from processes
	// that it left behind. Nil for POST /command.
	Owner func(stream byte, b []byte)

	// These say whether the kernel killed a background command for its memory.
	OOMKills int64        // of the sandbox before it began; -1: not known
	byHand   atomic.Bool  // a client had it killed
	blamed   atomic.Int32 // 0: not decided yet, else blamedYes or blamedNo

	watch     watch
	input     input
	stdinBusy atomic.Bool
	timedOut  atomic.Bool

	done    chan struct{} // closed when end is valid
	end     Ending
	flushed chan struct{}
}

// Done returns a channel that is closed when the command has ended.
func (c *Command) Done() <-chan struct{} { return c.done }

// End says how the command ended, once Done is closed.
func (c *Command) End() Ending { return c.end }

// Flushed returns a channel that is closed when all output went to the ring and to the client
// that watches.
func (c *Command) Flushed() <-chan struct{} { return c.flushed }

// NewID draws the id of a command, session or terminal.
func NewID() string {
	var b [16]byte
	rand.Read(b[:]) //nolint:errcheck // never fails since Go 1.24
	return hex.EncodeToString(b[:])
}

// New makes the output and the pipes of a command that is to start, and returns the
// other ends of the pipes. One pipe is for both streams.
func (g *Registry) New(id, content string, pipes int) (*Command, []int, error) {
	c := &Command{
		ID: id, Content: content, Started: time.Now(),
		Output:   g.books.NewRing(id),
		input:    input{turn: make(chan struct{}, 1)},
		OOMKills: -1,
		done:     make(chan struct{}),
		flushed:  make(chan struct{}),
	}
	var ends []int
	for range pipes {
		var p [2]int
		err := syscall.Pipe2(p[:], syscall.O_CLOEXEC)
		if err == nil {
			err = syscall.SetNonblock(p[0], true) // this end only: so that reads can wait in the poller
		}
		if err != nil {
			CloseAll(ends)
			c.ClosePumps()
			return nil, nil, err
		}
		ends = append(ends, p[1])
		c.Pumps = append(c.Pumps, output.NewPump(os.NewFile(uintptr(p[0]), "pipe"), byte(len(ends))))
	}
	return c, ends, nil
}

// OnTerminal makes c, which has no pipes, read and write a terminal. ours is the
// agent's end of it.
func (c *Command) OnTerminal(ours *os.File) {
	c.Pumps = []*output.Pump{output.NewTerminal(ours, agent.PtyStdout)}
}

// Milliseconds is a time that a client has given, cut to what a Duration holds.
func Milliseconds(n int64) time.Duration {
	return time.Duration(min(n, 1<<62/int64(time.Millisecond))) * time.Millisecond
}

// CloseAll closes file descriptors.
func CloseAll(fds []int) {
	for _, fd := range fds {
		syscall.Close(fd)
	}
}

// ClosePumps is for a command that does not begin.
func (c *Command) ClosePumps() {
	for _, p := range c.Pumps {
		p.Close()
	}
}

// Start starts c by l. It closes ends. An error means that nothing runs; c has ended then.
func (g *Registry) Start(c *Command, l *Launch, timeout time.Duration, withStdin bool, ends []int) error {
	defer CloseAll(ends)
	files := [3]uintptr{g.DevNull.Fd(), uintptr(ends[0]), uintptr(ends[len(ends)-1])}
	switch {
	case l.TTY:
		files[0] = files[1]
	case l.Stdin != nil:
		files[0] = l.Stdin.Fd()
	}
	if withStdin {
		var p [2]int
		if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
			return g.notStarted(c, err.Error(), 126, agent.ReasonExited)
		}
		defer syscall.Close(p[0])
		syscall.SetNonblock(p[1], true) //nolint:errcheck // cannot fail on a pipe
		c.Stdin = os.NewFile(uintptr(p[1]), "stdin")
		files[0] = uintptr(p[0])
	}
	c.Started = time.Now()
	var err error
	if l.Path == "" {
		err = syscall.ENOENT
	} else {
		c.Process, err = l.start(files)
	}
	if err != nil {
		what := "start"
		if c.ID == agent.EntrypointID {
			what = agent.EntrypointID
		}
		msg, code := whyNot(what, l.Argv[0], l.Path, l.Dir, pathOf(l.Env), l.Cred, err)
		reason := agent.ReasonExited
		if n := g.Limits().Pids; n > 0 && errors.Is(err, syscall.EAGAIN) {
			reason = agent.ReasonPidsLimit
			msg += fmt.Sprintf(": %d processes and threads", n)
		}
		return g.notStarted(c, msg, code, reason)
	}
	g.Started(c, timeout)
	return nil
}

// Started registers c, whose process runs: from then on c can be found, ended and
// waited for.
func (g *Registry) Started(c *Command, timeout time.Duration) {
	g.add(c)
	var timer *time.Timer
	if timeout > 0 {
		timer = time.AfterFunc(timeout, func() {
			proc.Guarded(func() {
				c.timedOut.Store(true)
				c.Process.KillTree()
			})
		})
	}
	go proc.Guarded(func() { g.supervise(c, timer, timeout) })
}

// notStarted ends a command that never ran.
func (g *Registry) notStarted(c *Command, msg string, code int, reason string) error {
	c.ClosePumps()
	if c.Stdin != nil {
		c.Stdin.Close()
		c.Stdin = nil
	}
	g.add(c)
	c.end = Ending{Code: code, Err: msg, At: time.Now(), Reason: reason}
	close(c.done)
	close(c.flushed)
	g.finished(c)
	return errors.New(msg)
}

// Begin starts to read output. Before it nothing is read, so that what must come first
// can be written to the client.
func (c *Command) Begin() {
	for _, p := range c.Pumps {
		go proc.Guarded(func() { p.Run(c.Died(), c.take) })
	}
}

// take keeps the output of c and passes it on.
func (c *Command) take(stream byte, framed []byte, last bool) {
	if c.Owner != nil {
		c.Owner(stream, framed[agent.FrameHeader:])
		return
	}
	c.keep(stream, framed, last)
}

// supervise waits for c's end and publishes it.
func (g *Registry) supervise(c *Command, timer *time.Timer, timeout time.Duration) {
	<-c.Process.Done()
	if timer != nil {
		timer.Stop()
	}
	if c.Stdin != nil {
		c.Stdin.Close() // a writer then gets os.ErrClosed
	}
	for _, p := range c.Pumps {
		p.Hurry()
	}
	limit := time.NewTimer(DrainLimit)
	drained := c.waitDrained(limit.C)
	limit.Stop()
	ws := c.Process.Status
	e := Ending{Code: ws.ExitStatus(), At: c.Process.Ended, Timeout: timeout}
	if ws.Signaled() {
		e.Signal = ws.Signal()
		e.Code = 128 + int(e.Signal)
		e.TimedOut = c.timedOut.Load() && e.Signal == syscall.SIGKILL
	}
	g.Explain(c, &e)
	c.end = e
	close(c.done)
	if !drained {
		c.waitDrained(nil)
	}
	if c.Forget { // before its client knows that it has ended
		g.remove(c)
	}
	close(c.flushed)
	g.finished(c)
}

func (c *Command) waitDrained(limit <-chan time.Time) bool {
	for _, p := range c.Pumps {
		select {
		case <-p.Drained():
		case <-limit:
			return false
		}
	}
	return true
}

// Died returns a channel that is closed when no process of c's own is left: at
// once if there never was one.
func (c *Command) Died() <-chan struct{} {
	if c.Process == nil {
		return c.done
	}
	return c.Process.Done()
}

// Alive reports whether a process of c's own is left.
func (c *Command) Alive() bool {
	select {
	case <-c.Died():
		return false
	default:
		return true
	}
}

// Running reports whether c has not ended. Its process may die a little before c ends,
// because the rest of the output is read in between.
func (c *Command) Running() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

// Interrupt ends c: sig to its group, SIGKILL to its whole tree after the grace.
func (g *Registry) Interrupt(ctx context.Context, c *Command, sig syscall.Signal) error {
	if err := c.Process.Signal(sig, true); err != nil {
		return err
	}
	t := time.NewTimer(g.Grace)
	defer t.Stop()
	select {
	case <-c.Died():
		return nil
	case <-t.C:
	}
	c.byHand.Store(true)
	c.Process.KillTree()
	select {
	case <-c.Died():
	case <-ctx.Done():
	}
	return nil
}

// Status describes c as execd does.
func (c *Command) Status() agent.CommandStatus {
	st := agent.CommandStatus{ID: c.ID, Content: c.Content, Running: true, StartedAt: c.Started.Format(time.RFC3339Nano)}
	if c.Running() {
		return st
	}
	st.Running = false
	st.FinishedAt = c.end.At.Format(time.RFC3339Nano)
	code := c.end.Code
	switch {
	case c.end.Err != "":
		st.Error = c.end.Err
	case c.end.Signal != 0:
		code = -1
		st.Error = strings.Join(c.end.traceback(), "; ")
	case code != 0:
		st.Error = strings.Join(c.end.traceback(), "; ")
	}
	st.Reason = c.end.Reason
	if c.blamed.Load() == blamedYes {
		st.Reason = agent.ReasonOOM
		st.Error += "; " + agent.ReasonOOM + ": command was killed: out of memory"
	}
	st.ExitCode = &code
	return st
}
