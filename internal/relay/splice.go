package relay

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A Conn is a socket from which Copy may divert bytes, also through readers above it.
// Each of its methods that a net.Conn lacks serves net/http.
type Conn struct {
	net.Conn // a *net.TCPConn or a *net.UnixConn
	div      atomic.Pointer[diversion]
}

// New makes a Conn of a socket. Other connections, such as those of TLS, stay what they
// are.
func New(c net.Conn) net.Conn {
	switch c.(type) {
	case *net.TCPConn, *net.UnixConn:
		return &Conn{Conn: c}
	}
	return c
}

// Listener makes the sockets that l accepts Conns.
func Listener(l net.Listener) net.Listener { return listener{l} }

type listener struct{ net.Listener }

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return New(c), nil
}

// Read reads into p. If p is the buffer of a diversion, Read moves the bytes to another
// socket and leaves p as it is.
func (c *Conn) Read(p []byte) (int, error) {
	if d := c.div.Load(); d != nil && unsafe.SliceData(p) == unsafe.SliceData(d.b) {
		return d.move(len(p))
	}
	return c.Conn.Read(p)
}

// ReadFrom is how net/http sends a body.
func (c *Conn) ReadFrom(r io.Reader) (int64, error) {
	if below(r) == nil {
		return io.Copy(c.Conn, r)
	}
	return Copy(c, r)
}

// CloseWrite closes the half of the connection that is written to.
func (c *Conn) CloseWrite() error {
	if h, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return errors.ErrUnsupported
}

// NetConn is the socket.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// below is the Conn whose bytes x reads or writes unchanged; nil: there is none.
func below(x any) *Conn {
	for {
		switch over := x.(type) {
		case *Conn:
			return over
		case *tls.Conn:
			return nil
		case *io.LimitedReader:
			x = over.R
		case interface{ NetConn() net.Conn }:
			x = over.NetConn()
		default:
			return nil
		}
	}
}

// Diverts reports whether Copy can divert bytes between two connections, or what lies above
// them.
func Diverts(a, b net.Conn) bool { return below(a) != nil && below(b) != nil }

// A diversion moves bytes from the Conn below the source of a Copy to the socket of its
// destination. The Conn knows by the buffer that a Read is for this Copy; so a reader in
// between that reads into a buffer of its own gets its bytes as ever.
//
// One goroutine uses it: the one that runs Copy, and below it the Read of the Conn.
type diversion struct {
	b        []byte // stays empty unless a reader in between fills it
	conn     *Conn
	from, to syscall.RawConn
	pipe     [2]int
	meter    Meter // may be nil

	took, gave int // bytes, since moved was called
	err        error
}

// wide is how much one splice may move. Pages of a buffer that nobody fills are not
// backed by memory.
const wide = 256 << 10

var widePool = sync.Pool{New: func() any { return new([wide]byte) }}

// divert begins a diversion; nil: the two ends are no sockets, or there is no pipe to be
// had. Then the bytes are copied.
func divert(dst io.Writer, src io.Reader, m Meter) *diversion {
	from, to := below(src), below(dst)
	if from == nil || to == nil {
		return nil
	}
	d := &diversion{conn: from, meter: m}
	var err error
	if d.from, err = raw(from); err != nil {
		return nil
	}
	if d.to, err = raw(to); err != nil {
		return nil
	}
	if unix.Pipe2(d.pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
		return nil
	}
	unix.FcntlInt(uintptr(d.pipe[0]), unix.F_SETPIPE_SZ, wide*4) //nolint:errcheck // then it moves less at a time
	d.b = widePool.Get().(*[wide]byte)[:]
	from.div.Store(d)
	return d
}

func raw(c *Conn) (syscall.RawConn, error) {
	s, ok := c.Conn.(syscall.Conn)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	return s.SyscallConn()
}

// end ends a diversion. Bytes that are left in the pipe are lost; then moved has returned
// an error.
func (d *diversion) end() {
	d.conn.div.CompareAndSwap(d, nil) // a kept connection may serve the next request already
	unix.Close(d.pipe[0])
	unix.Close(d.pipe[1])
	widePool.Put((*[wide]byte)(d.b))
}

// moved is how many bytes were taken from the source since it was called last, and how
// many of them the destination was given.
func (d *diversion) moved() (took, gave int, err error) {
	took, gave, err = d.took, d.gave, d.err
	d.took, d.gave, d.err = 0, 0, nil
	return took, gave, err
}

// move waits for bytes and moves most of them at most. An error is the source's: readers
// above would take another for that. The destination's is for moved.
func (d *diversion) move(most int) (int, error) {
	n, err := splice(d.from.Read, func(socket int) (int64, error) {
		return unix.Splice(socket, nil, d.pipe[1], nil, most, unix.SPLICE_F_NONBLOCK)
	})
	if err != nil {
		return 0, err
	}
	if n == 0 {
		return 0, io.EOF
	}
	if d.meter != nil {
		d.meter.Passing(n)
	}
	d.took += n
	for left := n; left > 0 && d.err == nil; {
		var m int
		m, d.err = splice(d.to.Write, func(socket int) (int64, error) {
			return unix.Splice(d.pipe[0], nil, socket, nil, left, unix.SPLICE_F_NONBLOCK)
		})
		left -= m
		d.gave += m
	}
	return n, nil
}

// splice calls once when the socket is ready, until it does not block.
func splice(ready func(func(fd uintptr) bool) error, once func(socket int) (int64, error)) (int, error) {
	var n int64
	var err error
	if gone := ready(func(fd uintptr) bool {
		for {
			if n, err = once(int(fd)); err != unix.EINTR {
				return err != unix.EAGAIN
			}
		}
	}); gone != nil {
		return 0, gone
	}
	return int(max(0, n)), os.NewSyscallError("splice", err)
}
