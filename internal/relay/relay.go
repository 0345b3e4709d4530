// Package relay copies bytes from one connection to another with little memory: most
// connections are quiet most of the time.
package relay

import (
	"io"
	"sync"
)

// Quiet is the buffer of a connection with little traffic, in bytes: key strokes, or
// nothing at all. io.Copy would hold 32 KiB for each direction of each connection.
const Quiet = 1 << 10

// Buffers are the buffers of connections with much traffic, 32 KiB each. It is a
// httputil.BufferPool.
type Buffers struct{}

var pool = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// Get returns a buffer that has no other user.
func (Buffers) Get() []byte { return pool.Get().(*[32 << 10]byte)[:] }

// Put takes back what Get returned.
func (Buffers) Put(b []byte) { pool.Put((*[32 << 10]byte)(b)) }

// Copy copies src to dst until the end of src. It has a large buffer only while data
// fills it.
func Copy(dst io.Writer, src io.Reader) (n int64, err error) {
	small := make([]byte, Quiet)
	b := small
	for {
		m, rerr := src.Read(b)
		if m > 0 {
			written, err := dst.Write(b[:m])
			if n += int64(written); err != nil {
				rerr = err
			}
		}
		if len(b) > Quiet && (m <= Quiet || rerr != nil) {
			Buffers{}.Put(b)
			b = small
		} else if m == Quiet && rerr == nil {
			b = Buffers{}.Get()
		}
		if rerr == io.EOF {
			return n, nil
		}
		if rerr != nil {
			return n, rerr
		}
	}
}
