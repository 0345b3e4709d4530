package output

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// A Take receives output: the stream, 1 or 2, and the bytes with room for a frame's
// header before them. last is set once the process is dead: then processes that it left
// behind write.
type Take func(stream byte, framed []byte, last bool)

// A Pump carries one pipe of a command, or its terminal, to a Take.
type Pump struct {
	f       *os.File
	stream  byte          // 1 or 2
	tty     bool          // f is a terminal's end
	drained chan struct{} // closed when all that was written before the process died was carried
	asked   chan chan struct{}
	flood   bool // much came at once: pipe and reads are larger since

	take Take            // of Run
	died <-chan struct{} // of Run
}

// NewPump makes a pump for the agent's end of a pipe, which must not block, and its
// stream, 1 or 2.
func NewPump(f *os.File, stream byte) *Pump {
	return &Pump{f: f, stream: stream, drained: make(chan struct{}), asked: make(chan chan struct{}, 1)}
}

// NewTerminal is NewPump of a terminal.
func NewTerminal(f *os.File, stream byte) *Pump {
	p := NewPump(f, stream)
	p.tty = true
	return p
}

// Close closes a pump on which Run is not called.
func (p *Pump) Close() error { return p.f.Close() }

// Drained returns a channel that is closed when all output from before the process died
// was carried.
func (p *Pump) Drained() <-chan struct{} { return p.drained }

// Unread returns how many bytes are in the pipe now.
func (p *Pump) Unread() (n int, err error) {
	err = proc.Control(p.f, func(fd int) (err error) {
		n, err = unix.IoctlGetInt(fd, unix.TIOCINQ)
		return err
	})
	return n, err
}

// widePipe is the size of the pipe of a command that has filled a usual one, in bytes:
// on gVisor each switch between command and agent is expensive. Its effect, with
// buffers that are used again, is in docs/benchmarks.md.
const widePipe = 256 << 10

var (
	buffers     = sync.Pool{New: func() any { b := make([]byte, agent.FrameHeader+64<<10); return &b }}
	wideBuffers = sync.Pool{New: func() any { b := make([]byte, agent.FrameHeader+widePipe); return &b }}
	// A terminal gives 4 KiB at a time, and slow clients hold a buffer each.
	ttyBuffers = sync.Pool{New: func() any { b := make([]byte, agent.FrameHeader+4<<10); return &b }}
)

// Hurry tells a pump that the process is dead: it takes what is in the pipe and
// waits for more in the background only.
func (p *Pump) Hurry() {
	select {
	case <-p.drained:
	default:
		p.f.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // closed: it met the end of the pipe
	}
}

// Settle waits until what is in the pipe now was carried, or until limit. One
// may ask at a time.
func (p *Pump) Settle(limit <-chan time.Time) {
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

// settled ends a call of Settle, and reports whether there was one.
func (p *Pump) settled(rc syscall.RawConn) bool {
	select {
	case carried := <-p.asked:
		p.f.SetReadDeadline(time.Time{})                 //nolint:errcheck // open until run returns
		rc.Control(func(fd uintptr) { p.rest(int(fd)) }) //nolint:errcheck // as above
		close(carried)
	default:
		return false
	}
	select {
	case <-p.died:
		p.Hurry() // whoever said so was undone above
	default:
	}
	return true
}

// Run carries until nobody has the other end any more. It closes the pipe. died is closed
// when the process is dead.
func (p *Pump) Run(died <-chan struct{}, take Take) {
	p.died, p.take = died, take
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
			n, again := p.carry(int(fd), last)
			more = n > 0
			return !again
		})
		if err == nil && more {
			continue
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || last {
			break
		}
		if p.settled(rc) {
			continue
		}
		rc.Control(func(fd uintptr) { p.rest(int(fd)) }) //nolint:errcheck // open until this function returns
		last = true
		close(p.drained)
		p.f.SetReadDeadline(time.Time{}) //nolint:errcheck // as above
	}
	if last {
		return
	}
	if p.tty {
		// All have closed the terminal. Closing the agent's end too would hang up on a
		// process that is about to end well, as cat does, or that opens the terminal
		// again.
		<-p.died
		rc.Control(func(fd uintptr) { p.rest(int(fd)) }) //nolint:errcheck // as above
	}
	close(p.drained)
}

// rest carries what is in the pipe now, and no more: others may write forever.
func (p *Pump) rest(fd int) {
	n, err := unix.IoctlGetInt(fd, unix.TIOCINQ)
	if err != nil || p.tty { // of a terminal it counts only what has come to the near end
		n = 1 << 20 // the most a pipe may hold by default
	}
	for n > 0 {
		m, _ := p.carry(fd, false)
		if m <= 0 {
			return
		}
		n -= m
	}
}

// carry reads once and passes it on. again says that the pipe is empty.
func (p *Pump) carry(fd int, last bool) (n int, again bool) {
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
		if n == len(whole) && !p.tty && !p.flood {
			p.flood = true
			unix.FcntlInt(uintptr(fd), unix.F_SETPIPE_SZ, widePipe) //nolint:errcheck // where the kernel gives no more it stays as it is
		}
		p.take(p.stream, (*bp)[:agent.FrameHeader+n], last)
		return n, false
	}
}
