package terminate

import (
	"io"
	"net"
	"sync"

	"github.com/sandboxd/sandboxd/internal/relay"
)

const (
	aheadFrom   = 256 << 10 // bytes: a body that is shorter has no goroutine
	aheadChunks = 2
)

// An ahead is a body of HTTP/1.1 of which more is read, and decrypted, while what was read is
// encrypted and written: on two processors instead of one. HTTP/2 does that by itself. It holds
// four buffers of 32 KiB at most.
type ahead struct {
	src    io.ReadCloser
	passed int
	chunks chan chunk // nil until aheadFrom bytes have passed
	this   chunk
	rest   []byte // of this
	closed chan struct{}
	once   sync.Once
}

type chunk struct {
	b   []byte
	n   int
	err error
}

func newAhead(src io.ReadCloser) *ahead { return &ahead{src: src, closed: make(chan struct{})} }

// Read reads the body.
func (a *ahead) Read(p []byte) (int, error) {
	switch {
	case a.chunks == nil && a.passed < aheadFrom:
		n, err := a.src.Read(p)
		a.passed += n
		return n, err
	case a.chunks == nil:
		a.chunks = make(chan chunk, aheadChunks)
		go a.fill(a.chunks)
	}
	for len(a.rest) == 0 {
		if a.this.err != nil {
			return 0, a.this.err
		}
		if a.this.b != nil {
			relay.Buffers{}.Put(a.this.b)
			a.this = chunk{}
		}
		select {
		case a.this = <-a.chunks:
			a.rest = a.this.b[:a.this.n]
		case <-a.closed:
			return 0, net.ErrClosed
		}
	}
	n := copy(p, a.rest)
	a.rest = a.rest[n:]
	return n, nil
}

func (a *ahead) fill(to chan<- chunk) {
	for {
		c := chunk{b: relay.Buffers{}.Get()}
		c.n, c.err = a.src.Read(c.b)
		select {
		case to <- c:
		case <-a.closed:
			return
		}
		if c.err != nil {
			return
		}
	}
}

// Close closes the body. It may be called during a Read.
func (a *ahead) Close() error {
	a.once.Do(func() { close(a.closed) })
	return a.src.Close()
}
