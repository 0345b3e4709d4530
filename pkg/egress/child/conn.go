// Package child is the ground of the children that read bytes of guests: the line between
// the daemon and a child, and who starts the child again.
//
//	daemon ── Start ──▶ Supervisor ── internal/confine ──▶ child: Serve
//	             Conn ◀── one pair of SOCK_SEQPACKET ──▶ Conn
//	                  messages: kind, number, body; to the child a descriptor too
//
// Either side calls (Call) and answers (Answer), or tells (Tell). Run reads a line and hands
// on what arrives.
//
// The daemon trusts no child. It takes no descriptor from one, and it ends a child that
// sends a message of a wrong form, or one longer than it may be.
package child

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A Message has a kind below 128, which the two sides agree on. Its number joins an answer
// to its call.
type Message struct {
	Kind   uint8
	Number uint32 // 0: nobody waits for an answer
	Body   []byte
	File   *os.File // nil, or the receiver's to close
}

const (
	header  = 5    // kind and number
	answers = 0x80 // bit of a kind
	hello   = 0x7f // the kind by which a child says that it runs
)

// readLimit is how long the daemon waits for a child to read, if the line is full of what it has
// not read: some 200 KiB. That is much for a host that is starved, and a child that does not read
// any more holds up no change of rules for longer.
const readLimit = 10 * time.Second

// MaxKind is the last kind that the two sides may use.
const MaxKind = hello - 1

var (
	// ErrGone is the error of calls whose peer is gone.
	ErrGone = errors.New("the other process is gone")
	errForm = errors.New("a message of a wrong form")
)

// A Conn is one end of a line. Its methods may be called at the same time.
type Conn struct {
	f    *os.File
	raw  syscall.RawConn
	max  int  // bytes of a body that is received
	take bool // descriptors are received
	// patience is how long a write may wait for the other side to read; 0: for ever.
	patience time.Duration

	mu     sync.Mutex
	last   uint32
	calls  map[uint32]chan<- Message // nil: the line is dead
	closed chan struct{}
}

// NewConn makes a Conn of a socket, which is its own from then on. It receives bodies of at
// most max bytes, and descriptors only with take, as a child does. If the other side of one
// without take does not read for readLimit, the line is closed.
func NewConn(f *os.File, max int, take bool) (*Conn, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	c := &Conn{f: f, raw: raw, max: max, take: take, calls: map[uint32]chan<- Message{}, closed: make(chan struct{})}
	if !take {
		c.patience = readLimit
	}
	return c, nil
}

// Pair makes the two ends of a line, as files.
func Pair() (a, b *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	return os.NewFile(uintptr(fds[0]), "line to a child"), os.NewFile(uintptr(fds[1]), "line to the daemon"), nil
}

// Tell sends a message that has no answer. The file, or socket, stays the caller's.
func (c *Conn) Tell(kind uint8, body []byte, file syscall.Conn) error {
	return c.send(kind, 0, body, file)
}

// Answer answers m. The file stays the caller's.
func (c *Conn) Answer(m Message, body []byte, file syscall.Conn) error {
	return c.send(m.Kind|answers, m.Number, body, file)
}

// Call sends a message and waits for its answer, until ctx ends or the line is dead. The
// file stays the caller's.
func (c *Conn) Call(ctx context.Context, kind uint8, body []byte, file syscall.Conn) (Message, error) {
	done := make(chan Message, 1)
	c.mu.Lock()
	if c.calls == nil {
		c.mu.Unlock()
		return Message{}, ErrGone
	}
	for c.last++; c.last == 0 || c.calls[c.last] != nil; {
		c.last++
	}
	number := c.last
	c.calls[number] = done
	c.mu.Unlock()
	err := c.send(kind, number, body, file)
	if err == nil {
		select {
		case m := <-done:
			return m, nil
		case <-c.closed:
			err = ErrGone
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	c.mu.Lock()
	delete(c.calls, number)
	c.mu.Unlock()
	select {
	case m := <-done: // it came meanwhile
		return m, nil
	default:
		return Message{}, err
	}
}

// Done is closed when the line is dead.
func (c *Conn) Done() <-chan struct{} { return c.closed }

// isClosed reports whether this side has closed the line. The error of a call says so only in
// words.
func (c *Conn) isClosed() bool {
	select {
	case <-c.closed:
		return true
	default:
		return false
	}
}

// Close ends the line: Run returns. It may be called twice.
func (c *Conn) Close() error {
	c.mu.Lock()
	first := c.calls != nil
	c.calls = nil
	c.mu.Unlock()
	if !first {
		return nil
	}
	close(c.closed)
	return c.f.Close()
}

// Run receives until the other side is gone, which is no error, or sends what it must not.
// It gives answers to their calls and all else to handle, in order: what takes time there
// holds up the line. The line is closed then.
func (c *Conn) Run(handle func(Message)) error {
	defer c.Close()
	buf := make([]byte, header+c.max+1)
	for {
		m, err := c.receive(buf)
		switch {
		case err == nil:
		case errors.Is(err, ErrGone), c.isClosed():
			return nil
		default:
			return err
		}
		if m.Kind&answers == 0 {
			handle(m)
			continue
		}
		m.Kind &^= answers
		c.mu.Lock()
		call := c.calls[m.Number]
		if call != nil {
			delete(c.calls, m.Number)
			call <- m
		}
		c.mu.Unlock()
		if call == nil && m.File != nil {
			m.File.Close() // nobody waits any more
		}
	}
}

// receive receives one message. Its body is a copy.
func (c *Conn) receive(buf []byte) (m Message, err error) {
	var n, oobn, flags int
	oob := make([]byte, unix.CmsgSpace(8*4))
	rerr := c.raw.Read(func(fd uintptr) bool {
		for {
			n, oobn, flags, _, err = unix.Recvmsg(int(fd), buf, oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
			// The kernel says once that the other side ended with messages unread. What that
			// has sent before comes then, and the end after it.
			if err != unix.EINTR && err != unix.ECONNRESET {
				return err != unix.EAGAIN
			}
		}
	})
	if rerr != nil {
		return m, rerr
	}
	if err != nil {
		return m, os.NewSyscallError("recvmsg", err)
	}
	files, err := received(oob[:oobn])
	if err == nil {
		switch {
		case n == 0 && len(files) == 0:
			err = ErrGone
		case n < header, n > header+c.max, flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
			err = errForm
		case len(files) > 1, len(files) == 1 && !c.take:
			err = errForm
		}
	}
	if err != nil {
		for _, f := range files {
			f.Close()
		}
		return m, err
	}
	m = Message{Kind: buf[0], Number: binary.LittleEndian.Uint32(buf[1:]), Body: append([]byte(nil), buf[header:n]...)}
	if len(files) == 1 {
		m.File = files[0]
	}
	return m, nil
}

// received are the descriptors that came along.
func received(oob []byte) (files []*os.File, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, os.NewSyscallError("recvmsg", err)
	}
	for _, m := range msgs {
		fds, perr := unix.ParseUnixRights(&m)
		if perr != nil {
			err = perr
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, err
}

func (c *Conn) send(kind uint8, number uint32, body []byte, file syscall.Conn) error {
	msg := make([]byte, header, header+len(body))
	msg[0] = kind
	binary.LittleEndian.PutUint32(msg[1:], number)
	msg = append(msg, body...)
	if f, ok := file.(*os.File); file == nil || ok && f == nil {
		return c.sendmsg(msg, nil)
	}
	// Not with Fd, which would make the file blocking.
	raw, err := file.SyscallConn()
	if err != nil {
		return fmt.Errorf("send a descriptor: %w", err)
	}
	var serr error
	if err := raw.Control(func(fd uintptr) { serr = c.sendmsg(msg, unix.UnixRights(int(fd))) }); err != nil {
		return fmt.Errorf("send a descriptor: %w", err)
	}
	return serr
}

func (c *Conn) sendmsg(msg, oob []byte) error {
	var err error
	waits := false
	werr := c.raw.Write(func(fd uintptr) bool { // one at a time, so the deadline is this message's
		for err = unix.EINTR; err == unix.EINTR; {
			if oob == nil {
				_, err = unix.Write(int(fd), msg) // a child has no other call
			} else {
				err = unix.Sendmsg(int(fd), msg, oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			}
		}
		var derr error
		switch full := err == unix.EAGAIN; {
		case c.patience == 0:
		case full && !waits:
			waits = true
			derr = c.f.SetWriteDeadline(time.Now().Add(c.patience))
		case !full && waits:
			derr = c.f.SetWriteDeadline(time.Time{})
		}
		if derr != nil {
			err = derr
		}
		return err != unix.EAGAIN
	})
	switch {
	case errors.Is(werr, os.ErrDeadlineExceeded):
		err := fmt.Errorf("the other process has read nothing for %v, so this one closes the line", c.patience)
		return errors.Join(err, c.Close())
	case werr != nil && c.isClosed(), errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET):
		return ErrGone
	case werr != nil:
		return werr
	}
	return os.NewSyscallError("sendmsg", err)
}
