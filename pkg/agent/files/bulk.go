package files

import (
	"io"
	"net"
	"time"
)

// On gVisor a system call that blocks costs some 100 µs, whatever it carries,
// and net/http asks for 4 KiB of a chunked body at a time. 100 MB into a sandbox
// took 1.7 s without these and 0.9 s with them, on the same busy host.
const (
	bulkAfter  = 256 << 10              // bytes of a connection before it is one that carries much
	bulkBuffer = 256 << 10              // what is asked of it at once then
	bulkPause  = 300 * time.Microsecond // between two reads that each find little: SO_RCVLOWAT, which gVisor has not
)

// A BulkListener makes connections that read in large pieces once they carry much.
type BulkListener struct {
	net.Listener
	Closed func(net.Conn) // called when one of them is closed, perhaps more than once; nil: nothing is
}

// Accept returns a *bulkConn.
func (l BulkListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if tcp, ok := c.(*net.TCPConn); ok && err == nil {
		return &bulkConn{TCPConn: tcp, closed: l.Closed}, nil
	}
	return c, err
}

// bulkConn is a TCP connection that has a buffer only while it receives much. One
// reader at a time, as net/http does it.
type bulkConn struct {
	*net.TCPConn
	seen   int    // bytes read before the buffer
	buf    []byte // nil: reads go straight through
	unread []byte // part of buf
	closed func(net.Conn)
}

// Close closes the connection.
func (c *bulkConn) Close() error {
	if c.closed != nil {
		c.closed(c)
	}
	return c.TCPConn.Close()
}

// Read reads what is there, from the buffer first.
func (c *bulkConn) Read(p []byte) (int, error) {
	if len(c.unread) > 0 || c.buf != nil && len(p) < len(c.buf) {
		if len(c.unread) == 0 {
			if err := c.fill(); err != nil {
				return 0, err
			}
		}
		n := copy(p, c.unread)
		c.unread = c.unread[n:]
		return n, nil
	}
	n, err := c.TCPConn.Read(p)
	if c.seen += n; c.seen >= bulkAfter && c.buf == nil {
		c.buf = make([]byte, bulkBuffer)
	}
	return n, err
}

// fill waits for bytes. If they are few it waits a little for more of them; if they
// stay few, it gives up the buffer.
func (c *bulkConn) fill() error {
	n, err := c.TCPConn.Read(c.buf)
	if err != nil {
		return err
	}
	c.unread = c.buf[:n]
	switch {
	case n <= 4<<10:
		c.seen, c.buf = 0, nil
	case n < len(c.buf)/2:
		time.Sleep(bulkPause)
	}
	return nil
}

// WriteTo is for code that takes the connection over: net.TCPConn's own would bypass
// the buffer.
func (c *bulkConn) WriteTo(w io.Writer) (int64, error) {
	n, err := w.Write(c.unread)
	c.unread, c.buf = nil, nil
	if err != nil {
		return int64(n), err
	}
	m, err := c.TCPConn.WriteTo(w)
	return int64(n) + m, err
}
