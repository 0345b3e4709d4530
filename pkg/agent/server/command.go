package server

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
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// Times of commands.
const (
	interruptGrace = 3 * time.Second // between SIGTERM and SIGKILL, as execd has it
	// A command counts as ended this long after its death even if its client
	// has not taken the output yet.
	drainLimit = 2 * time.Second
)

// A command is one process a client asked for, and the end of it.
//
//	spawn ── pumps: pipe → ring, sink ── process dies ── pumps take the rest ── finish
//
// It ends when its process does, not when its pipes close: what it left in the
// background goes on, and goes on into the ring.
type command struct {
	id      string
	content string
	started time.Time
	out     *output.Ring
	proc    *proc.Process // nil: could not be started; see died
	pumps   []*output.Pump
	sink    *reply.Stream // nil: in the background
	forget  bool          // at its end

	owner owner // the terminal or session it is of; nil for POST /command

	// Of a command in the background: whether the kernel killed it for its memory.
	ooms   int64        // OOM kills of the sandbox before it began; -1: not known
	byHand atomic.Bool  // a client had it killed
	blamed atomic.Int32 // 0: nobody has asked yet, else blamedYes or blamedNo

	stdin     *os.File // nil: /dev/null
	stdinBusy atomic.Bool
	timedOut  atomic.Bool

	done    chan struct{} // closed when end is valid
	end     ending
	flushed chan struct{} // closed when all its output went to the ring and the sink
}

// An owner takes the output of a command that is part of something longer. More
// of it may come after the command's death, from what it left behind.
type owner interface{ output(stream byte, b []byte) }

func newID() string {
	var b [16]byte
	rand.Read(b[:]) //nolint:errcheck // never fails since Go 1.24
	return hex.EncodeToString(b[:])
}

// newCommand makes what a command needs before it starts: pipes, and its output.
func (s *Server) newCommand(id, content string, pipes int) (*command, []int, error) {
	c := &command{
		id: id, content: content, started: time.Now(),
		out:     s.commands.books.NewRing(id),
		ooms:    -1,
		done:    make(chan struct{}),
		flushed: make(chan struct{}),
	}
	var ends []int
	for range pipes {
		var p [2]int
		err := syscall.Pipe2(p[:], syscall.O_CLOEXEC)
		if err == nil {
			err = syscall.SetNonblock(p[0], true) // this end only: so that reads can wait in the poller
		}
		if err != nil {
			closeAll(ends)
			for _, q := range c.pumps {
				q.Close()
			}
			return nil, nil, err
		}
		ends = append(ends, p[1])
		c.pumps = append(c.pumps, output.NewPump(os.NewFile(uintptr(p[0]), "pipe"), byte(len(ends))))
	}
	return c, ends, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		syscall.Close(fd)
	}
}

// launch starts c by l. An error means that nothing runs; c has ended then.
func (s *Server) launch(c *command, l *launch, timeout time.Duration, withStdin bool, ends []int) error {
	defer closeAll(ends)
	files := [3]uintptr{s.devNull.Fd(), uintptr(ends[0]), uintptr(ends[len(ends)-1])}
	switch {
	case l.tty:
		files[0] = files[1]
	case l.stdin != nil:
		files[0] = l.stdin.Fd()
	}
	if withStdin {
		var p [2]int
		if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
			return s.notStarted(c, err.Error(), 126, agent.ReasonExited)
		}
		defer syscall.Close(p[0])
		syscall.SetNonblock(p[1], true) //nolint:errcheck // can not fail on a pipe
		c.stdin = os.NewFile(uintptr(p[1]), "stdin")
		files[0] = uintptr(p[0])
	}
	c.started = time.Now()
	var err error
	if l.path == "" {
		err = syscall.ENOENT
	} else {
		c.proc, err = l.start(files)
	}
	if err != nil {
		what := "start"
		if c.id == agent.EntrypointID {
			what = agent.EntrypointID
		}
		msg, code := whyNot(what, l.argv[0], l.path, l.dir, pathOf(l.env), err)
		reason := agent.ReasonExited
		if n := s.limits.Load().Pids; n > 0 && errors.Is(err, syscall.EAGAIN) {
			reason = agent.ReasonPidsLimit
			msg += fmt.Sprintf(": %d processes and threads", n)
		}
		return s.notStarted(c, msg, code, reason)
	}
	s.launched(c, timeout)
	return nil
}

// launched lets c, whose process runs, be known, ended and waited for.
func (s *Server) launched(c *command, timeout time.Duration) {
	s.commands.add(c)
	var timer *time.Timer
	if timeout > 0 {
		timer = time.AfterFunc(timeout, func() {
			proc.Guarded(func() {
				c.timedOut.Store(true)
				c.proc.KillTree()
			})
		})
	}
	go proc.Guarded(func() { s.supervise(c, timer, timeout) })
}

func pathOf(env []string) string {
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			return v
		}
	}
	return ""
}

// notStarted ends a command that never ran.
func (s *Server) notStarted(c *command, msg string, code int, reason string) error {
	for _, p := range c.pumps {
		p.Close()
	}
	if c.stdin != nil {
		c.stdin.Close()
		c.stdin = nil
	}
	s.commands.add(c)
	c.end = ending{code: code, err: msg, at: time.Now(), reason: reason}
	close(c.done)
	close(c.flushed)
	s.commands.finished(c)
	return errors.New(msg)
}

// begin lets output flow. Before it nothing is read, so that a sink can say
// first what must be said first.
func (c *command) begin() {
	for _, p := range c.pumps {
		go proc.Guarded(func() { p.Run(c.died(), c.take) })
	}
}

// take keeps what c wrote and passes it on.
func (c *command) take(stream byte, framed []byte, last bool) {
	b := framed[agent.FrameHeader:]
	if c.owner != nil {
		c.owner.output(stream, b)
		return
	}
	c.out.Write(b) //nolint:errcheck // never fails
	if !last && c.sink != nil {
		c.sink.Framed(stream, framed)
	}
}

// supervise waits for c's end and publishes it.
func (s *Server) supervise(c *command, timer *time.Timer, timeout time.Duration) {
	<-c.proc.Done()
	if timer != nil {
		timer.Stop()
	}
	if c.stdin != nil {
		c.stdin.Close() // whoever writes to it sees os.ErrClosed
	}
	for _, p := range c.pumps {
		p.Hurry()
	}
	limit := time.NewTimer(drainLimit)
	drained := c.waitDrained(limit.C)
	limit.Stop()
	ws := c.proc.Status
	e := ending{code: ws.ExitStatus(), at: c.proc.Ended, timeout: timeout}
	if ws.Signaled() {
		e.signal = ws.Signal()
		e.code = 128 + int(e.signal)
		e.timedOut = c.timedOut.Load() && e.signal == syscall.SIGKILL
	}
	s.explain(c, &e)
	c.end = e
	close(c.done)
	if !drained {
		c.waitDrained(nil)
	}
	close(c.flushed)
	s.commands.finished(c)
}

func (c *command) waitDrained(limit <-chan time.Time) bool {
	for _, p := range c.pumps {
		select {
		case <-p.Drained():
		case <-limit:
			return false
		}
	}
	return true
}

// died returns a channel that is closed when no process of c's own is left: at
// once if there never was one.
func (c *command) died() <-chan struct{} {
	if c.proc == nil {
		return c.done
	}
	return c.proc.Done()
}

// running reports whether c has not ended.
func (c *command) running() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

// interrupt ends c: sig to its group, SIGKILL to its whole tree 3 s later.
func (s *Server) interrupt(ctx context.Context, c *command, sig syscall.Signal) error {
	if err := c.proc.Signal(sig, true); err != nil {
		return err
	}
	t := time.NewTimer(s.grace)
	defer t.Stop()
	select {
	case <-c.died():
		return nil
	case <-t.C:
	}
	c.byHand.Store(true)
	c.proc.KillTree()
	select {
	case <-c.died():
	case <-ctx.Done():
	}
	return nil
}

// status describes c as execd does.
func (c *command) status() agent.CommandStatus {
	st := agent.CommandStatus{ID: c.id, Content: c.content, Running: true, StartedAt: c.started.Format(time.RFC3339Nano)}
	if c.running() {
		return st
	}
	st.Running = false
	st.FinishedAt = c.end.at.Format(time.RFC3339Nano)
	code := c.end.code
	switch {
	case c.end.err != "":
		st.Error = c.end.err
	case c.end.signal != 0:
		code = -1
		st.Error = strings.Join(c.end.traceback(), "; ")
	case code != 0:
		st.Error = strings.Join(c.end.traceback(), "; ")
	}
	st.Reason = c.end.reason
	if c.blamed.Load() == blamedYes {
		st.Reason = agent.ReasonOOM
		st.Error += "; " + agent.ReasonOOM + ": command was killed: out of memory"
	}
	st.ExitCode = &code
	return st
}
