package server

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
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
	out     *ring
	proc    *proc.Process // nil: could not be started; see died
	pumps   []*pump
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
		out:     s.commands.newRing(id),
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
				q.f.Close()
			}
			return nil, nil, err
		}
		ends = append(ends, p[1])
		c.pumps = append(c.pumps, newPump(os.NewFile(uintptr(p[0]), "pipe"), byte(len(ends))))
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
		p.f.Close()
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
		go proc.Guarded(func() { p.run(c) })
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
		p.hurry()
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
		case <-p.drained:
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

// A pump carries one pipe of a command, or its terminal, into its ring and sink.
type pump struct {
	f       *os.File
	stream  byte          // 1 or 2
	tty     bool          // f is a terminal's end
	drained chan struct{} // closed when all that was written before the process died was carried
	asked   chan chan struct{}
	flood   bool // much came at once: the pipe and what is read of it are larger since
}

func newPump(f *os.File, stream byte) *pump {
	return &pump{f: f, stream: stream, drained: make(chan struct{}), asked: make(chan chan struct{}, 1)}
}

// widePipe is the size of the pipe of a command that has filled a usual one, in
// bytes: on gVisor each switch between command and agent is dear. What it brings,
// with buffers that are used again, is in docs/benchmarks.md.
const widePipe = 256 << 10

var (
	buffers     = sync.Pool{New: func() any { b := make([]byte, agent.FrameHeader+64<<10); return &b }}
	wideBuffers = sync.Pool{New: func() any { b := make([]byte, agent.FrameHeader+widePipe); return &b }}
	// A terminal gives 4 KiB at a time, and slow clients hold a buffer each.
	ttyBuffers = sync.Pool{New: func() any { b := make([]byte, agent.FrameHeader+4<<10); return &b }}
)

// hurry tells a pump that the process is dead: it takes what is in the pipe and
// waits for more in the background only.
func (p *pump) hurry() {
	select {
	case <-p.drained:
	default:
		p.f.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // closed: it met the end of the pipe
	}
}

// settle waits until what is in the pipe now was carried, or until limit. One
// may ask at a time.
func (p *pump) settle(limit <-chan time.Time) {
	carried := make(chan struct{})
	select {
	case p.asked <- carried:
	case <-p.drained:
		return
	}
	p.f.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // closed: it met the end of the pipe
	select {
	case <-carried:
	case <-p.drained:
	case <-limit:
	}
}

// settled answers who asked by settle, and reports whether somebody did.
func (p *pump) settled(c *command, rc syscall.RawConn) bool {
	select {
	case carried := <-p.asked:
		p.f.SetReadDeadline(time.Time{})                    //nolint:errcheck // open until run returns
		rc.Control(func(fd uintptr) { p.rest(c, int(fd)) }) //nolint:errcheck // as above
		close(carried)
	default:
		return false
	}
	if !c.alive() {
		p.hurry() // whoever said so was undone above
	}
	return true
}

func (p *pump) run(c *command) {
	defer p.f.Close()
	rc, err := p.f.SyscallConn()
	if err != nil {
		close(p.drained)
		return
	}
	last := false
	for {
		more := false
		// No buffer is held while waiting: a silent server costs none.
		err := rc.Read(func(fd uintptr) bool {
			n, again := p.carry(c, int(fd), !last)
			more = n > 0
			return !again
		})
		if err == nil && more {
			continue
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || last {
			break
		}
		if p.settled(c, rc) {
			continue
		}
		rc.Control(func(fd uintptr) { p.rest(c, int(fd)) }) //nolint:errcheck // open until this function returns
		last = true
		close(p.drained)
		p.f.SetReadDeadline(time.Time{}) //nolint:errcheck // as above
	}
	if last {
		return
	}
	if p.tty {
		// All have closed the terminal. Closing our end, too, would hang up on a
		// process that is about to end well, as cat does, or opens it again.
		<-c.died()
		rc.Control(func(fd uintptr) { p.rest(c, int(fd)) }) //nolint:errcheck // as above
	}
	close(p.drained)
}

// rest carries what is in the pipe now, and no more: others may write forever.
func (p *pump) rest(c *command, fd int) {
	n, err := unix.IoctlGetInt(fd, unix.TIOCINQ)
	if err != nil || p.tty { // of a terminal it says only what has come to the near end
		n = 1 << 20 // the most a pipe may hold by default
	}
	for n > 0 {
		m, _ := p.carry(c, fd, true)
		if m <= 0 {
			return
		}
		n -= m
	}
}

// carry reads once and passes it on. again says that the pipe is empty.
func (p *pump) carry(c *command, fd int, toSink bool) (n int, again bool) {
	pool := &buffers
	switch {
	case p.tty:
		pool = &ttyBuffers
	case p.flood:
		pool = &wideBuffers
	}
	bp := pool.Get().(*[]byte)
	defer pool.Put(bp)
	whole := (*bp)[agent.FrameHeader:] // a frame's header goes before it
	for {
		n, err := syscall.Read(fd, whole)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return 0, true
		case err != nil || n <= 0:
			return 0, false
		}
		b := whole[:n]
		if n == len(whole) && !p.tty && !p.flood {
			p.flood = true
			unix.FcntlInt(uintptr(fd), unix.F_SETPIPE_SZ, widePipe) //nolint:errcheck // where the kernel gives no more it stays as it is
		}
		if c.owner != nil {
			c.owner.output(p.stream, b)
			return n, false
		}
		c.out.Write(b) //nolint:errcheck // never fails
		if toSink && c.sink != nil {
			c.sink.Framed(p.stream, (*bp)[:agent.FrameHeader+n])
		}
		return n, false
	}
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
