package interpreter

import (
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

var buffers = sync.Pool{New: func() any { b := make([]byte, 64<<10); return &b }}

// A pump carries what a context prints on one of its streams to the listener. The
// context waits while the listener does not take it.
type pump struct {
	f      *os.File
	stream byte // 1 or 2

	mu sync.Mutex // held from a read to its delivery: so that drain overtakes nothing
	to func(stream byte, b []byte)
}

func (p *pump) run() {
	defer p.f.Close()
	rc, err := p.f.SyscallConn()
	if err != nil {
		return
	}
	for more := true; more; {
		// No buffer is held while waiting.
		err := rc.Read(func(fd uintptr) bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			n, again := p.carry(int(fd))
			more = n > 0
			return !again
		})
		more = more && err == nil
	}
}

// drain delivers what was printed before the call, and no more: a process in the
// background may print for ever.
func (p *pump) drain() {
	rc, err := p.f.SyscallConn()
	if err != nil {
		return // it has met the end
	}
	rc.Control(func(fd uintptr) { //nolint:errcheck // closed: it has met the end
		p.mu.Lock()
		defer p.mu.Unlock()
		n, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
		if err != nil {
			n = 1 << 20 // the most a pipe may hold by default
		}
		for n > 0 {
			m, _ := p.carry(int(fd))
			if m <= 0 {
				return
			}
			n -= m
		}
	})
}

// carry reads once and delivers. again says that the pipe is empty. The caller
// holds mu.
func (p *pump) carry(fd int) (n int, again bool) {
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
		if p.to != nil {
			p.to(p.stream, (*bp)[:n])
		}
		return n, false
	}
}

// listen changes the listener; nil: none.
func (p *pump) listen(to func(stream byte, b []byte)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.to = to
}
