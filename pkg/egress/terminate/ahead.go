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
	// maxAheads is how many bodies of a child are read ahead. Of more, those keep the processors
	// busy without.
	maxAheads = 4 * processors
)

// An ahead is a body of HTTP/1.1 of which more is read, and decrypted, while what was read is
// encrypted and written: on two processors instead of one. HTTP/2 does that by itself. It holds
// four buffers of 32 KiB at most.
type ahead struct {
	src    io.ReadCloser
	turns  chan struct{} // has one for each of the child that has a goroutine
	passed int
	chunks chan chunk // nil until aheadFrom bytes have passed, and it is its turn
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

func newAhead(src io.ReadCloser, turns chan struct{}) *ahead {
	return &ahead{src: src, turns: turns, closed: make(chan struct{})}
}

// Read reads the body.
func (a *ahead) Read(p []byte) (int, error) {
	if a.chunks == nil && !a.begin() {
		n, err := a.src.Read(p)
		a.passed += n
		return n, err
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

// begin begins to read ahead, if that is worth it.
func (a *ahead) begin() bool {
	if a.passed < aheadFrom {
		return false
	}
	select {
	case a.turns <- struct{}{}:
		a.chunks = make(chan chunk, aheadChunks)
		go a.fill(a.chunks)
		return true
	default:
		return false
	}
}

func (a *ahead) fill(to chan<- chunk) {
	defer func() { <-a.turns }()
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
