// Package relay copies bytes from one connection to another with little memory: most
// connections are quiet most of the time.
//
//	socket ─▶ Conn ─▶ readers that only count, as those of a body ─▶ Copy ─▶ socket
//
// While much arrives, the bytes do not pass through the daemon's memory. The kernel moves
// them from one socket to the other (splice(2)), if both ends of a Copy are sockets.
//
// The surprise: readers may lie between the socket and Copy, such as those of net/http that
// know where a body ends. They run as ever: the Conn below them answers "n bytes read", but
// has moved these bytes already. See diversion.
package relay

import (
	"errors"
	"io"
	"sync"
)

// Quiet is the buffer of a connection with little traffic, in bytes: key strokes, or
// nothing at all. io.Copy would hold 32 KiB for each direction of each connection.
const Quiet = 1 << 10

// Buffers are the buffers of connections with much traffic, 32 KiB each. It is a
// httputil.BufferPool.
type Buffers struct{}

const large = 32 << 10

var pool = sync.Pool{New: func() any { return new([large]byte) }}

// Get returns a buffer that has no other user.
func (Buffers) Get() []byte { return pool.Get().(*[large]byte)[:] }

// Put takes back what Get returned.
func (Buffers) Put(b []byte) { pool.Put((*[large]byte)(b)) }

// A Meter is told how many bytes are about to be written.
type Meter interface{ Passing(n int) }

// Copy copies src to dst until the end of src. It has a large buffer, or a pipe in the
// kernel, only while data fills it. If src is a Meter, it is told of each piece.
func Copy(dst io.Writer, src io.Reader) (n int64, err error) {
	c := copier{dst: dst, src: src, b: make([]byte, Quiet)}
	c.meter, _ = src.(Meter)
	c.small = c.b
	defer c.shrink()
	for {
		m, rerr := c.src.Read(c.b)
		written, err := c.write(m)
		if n += int64(written); err != nil {
			return n, err
		}
		switch {
		case rerr == io.EOF:
			return n, nil
		case rerr != nil:
			return n, rerr
		case m <= Quiet && len(c.b) > Quiet:
			c.shrink()
		case m == len(c.b):
			c.grow()
		}
	}
}

// A copier has a small buffer, then a large one, then a diversion.
type copier struct {
	dst      io.Writer
	src      io.Reader
	meter    Meter // may be nil
	b, small []byte
	div      *diversion
}

// write passes on m bytes that were read into b, or that were diverted instead.
func (c *copier) write(m int) (int, error) {
	if c.div != nil {
		if took, gave, err := c.div.moved(); took > 0 {
			if took != m && err == nil {
				err = errMixed
			}
			return gave, err
		}
	}
	if m == 0 {
		return 0, nil
	}
	if c.meter != nil {
		c.meter.Passing(m)
	}
	return c.dst.Write(c.b[:m])
}

// errMixed: a reader read twice for one Read, which those of a body with a length do not.
var errMixed = errors.New("relay: bytes were read beside those that were diverted")

func (c *copier) grow() {
	switch {
	case c.div != nil:
	case len(c.b) == Quiet:
		c.b = Buffers{}.Get()
	default:
		if c.div = divert(c.dst, c.src, c.meter); c.div != nil {
			Buffers{}.Put(c.b)
			c.b = c.div.b
		}
	}
}

func (c *copier) shrink() {
	switch {
	case c.div != nil:
		c.div.end()
		c.div = nil
	case len(c.b) > Quiet:
		Buffers{}.Put(c.b)
	}
	c.b = c.small
}
