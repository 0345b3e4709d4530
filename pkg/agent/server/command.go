package server

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
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
	proc    *process // nil: could not be started; see died
	pumps   []*pump
	sink    *stream // nil: in the background

	stdin     *os.File // nil: /dev/null
	stdinBusy atomic.Bool
	timedOut  atomic.Bool

	done    chan struct{} // closed when end is valid
	end     ending
	flushed chan struct{} // closed when all its output went to the ring and the sink
}

// ending says how a command ended.
type ending struct {
	code     int            // 128+n after signal n
	signal   syscall.Signal // 0: it exited
	err      string         // it could not start
	timedOut bool
	timeout  time.Duration
	at       time.Time
}

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
		c.pumps = append(c.pumps, &pump{f: os.NewFile(uintptr(p[0]), "pipe"), stream: byte(len(ends)), drained: make(chan struct{})})
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
	if withStdin {
		var p [2]int
		if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
			return s.notStarted(c, err.Error(), 126)
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
		c.proc, err = s.reaper.start(l, files)
	}
	if err != nil {
		what := "start"
		if c.id == agent.EntrypointID {
			what = agent.EntrypointID
		}
		msg, code := whyNot(what, l.argv[0], l.path, l.dir, pathOf(l.env), err)
		return s.notStarted(c, msg, code)
	}
	s.commands.add(c)
	var timer *time.Timer
	if timeout > 0 {
		timer = time.AfterFunc(timeout, func() {
			guarded(func() {
				c.timedOut.Store(true)
				s.reaper.killTree(c.proc)
			})
		})
	}
	go guarded(func() { s.supervise(c, timer, timeout) })
	return nil
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
func (s *Server) notStarted(c *command, msg string, code int) error {
	for _, p := range c.pumps {
		p.f.Close()
	}
	if c.stdin != nil {
		c.stdin.Close()
		c.stdin = nil
	}
	s.commands.add(c)
	c.end = ending{code: code, err: msg, at: time.Now()}
	close(c.done)
	close(c.flushed)
	s.commands.finished(c)
	return errors.New(msg)
}

// begin lets output flow. Before it nothing is read, so that a sink can say
// first what must be said first.
func (c *command) begin() {
	for _, p := range c.pumps {
		go guarded(func() { p.run(c) })
	}
}

// supervise waits for c's end and publishes it.
func (s *Server) supervise(c *command, timer *time.Timer, timeout time.Duration) {
	<-c.proc.done
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
	ws := c.proc.status
	e := ending{code: ws.ExitStatus(), at: c.proc.ended, timeout: timeout}
	if ws.Signaled() {
		e.signal = ws.Signal()
		e.code = 128 + int(e.signal)
		e.timedOut = c.timedOut.Load() && e.signal == syscall.SIGKILL
	}
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
	return c.proc.done
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

// interrupt ends c: SIGTERM to its group, SIGKILL to its whole tree 3 s later.
func (s *Server) interrupt(ctx context.Context, c *command) error {
	if err := s.reaper.signal(c.proc, syscall.SIGTERM, true); err != nil {
		return err
	}
	t := time.NewTimer(s.grace)
	defer t.Stop()
	select {
	case <-c.died():
		return nil
	case <-t.C:
	}
	s.reaper.killTree(c.proc)
	select {
	case <-c.died():
	case <-ctx.Done():
	}
	return nil
}

// A pump carries one pipe of a command into its ring and sink.
type pump struct {
	f       *os.File
	stream  byte          // 1 or 2
	drained chan struct{} // closed when all that was written before the process died was carried
}

var buffers = sync.Pool{New: func() any { b := make([]byte, 64<<10); return &b }}

// hurry tells a pump that the process is dead: it takes what is in the pipe and
// waits for more in the background only.
func (p *pump) hurry() {
	select {
	case <-p.drained:
	default:
		p.f.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // closed: it met the end of the pipe
	}
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
		rc.Control(func(fd uintptr) { p.rest(c, int(fd)) }) //nolint:errcheck // open until this function returns
		last = true
		close(p.drained)
		p.f.SetReadDeadline(time.Time{}) //nolint:errcheck // as above
	}
	if !last {
		close(p.drained)
	}
}

// rest carries what is in the pipe now, and no more: others may write forever.
func (p *pump) rest(c *command, fd int) {
	n, err := unix.IoctlGetInt(fd, unix.TIOCINQ)
	if err != nil {
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
	bp := buffers.Get().(*[]byte)
	defer buffers.Put(bp)
	for {
		n, err := syscall.Read(fd, *bp)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return 0, true
		case err != nil || n <= 0:
			return 0, false
		}
		b := (*bp)[:n]
		c.out.Write(b) //nolint:errcheck // never fails
		if toSink && c.sink != nil {
			c.sink.output(p.stream, b)
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
		st.Error = c.end.traceback()[0]
	}
	st.ExitCode = &code
	return st
}
