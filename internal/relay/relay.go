// Package relay copies bytes from one connection to another in little memory:
// most connections are quiet most of the time.
package relay

import (
	"io"
	"sync"
)

// Quiet is the buffer of a connection on which little flows, in bytes: keys, or
// nothing at all. io.Copy would hold 32 KiB for each direction of each.
const Quiet = 1 << 10

// Buffers are those of connections on which much flows, 32 KiB each. It serves
// as a httputil.BufferPool.
type Buffers struct{}

var pool = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// Get returns a buffer that nobody else has.
func (Buffers) Get() []byte { return pool.Get().(*[32 << 10]byte)[:] }

// Put takes back what Get returned.
func (Buffers) Put(b []byte) { pool.Put((*[32 << 10]byte)(b)) }

// Copy copies src to dst as it comes, until its end, with a large buffer only while it fills.
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
