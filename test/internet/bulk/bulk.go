// Package bulk makes and checks bodies of any length, of which no piece can be lost, doubled or
// moved unseen: each eight bytes count those before them.
package bulk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Reader reads n bytes.
func Reader(n int64) io.Reader { return io.LimitReader(&counter{}, n) }

// A counter is such a body without an end.
type counter struct{ at int64 }

// Read never fails.
func (c *counter) Read(p []byte) (int, error) {
	n := len(p)
	if odd := int(c.at % 8); odd > 0 || len(p) < 8 { // the rest of a word, or its beginning
		n = copy(p, binary.BigEndian.AppendUint64(nil, uint64(c.at/8))[odd:])
	} else {
		n -= n % 8
		for i := 0; i < n; i += 8 {
			binary.BigEndian.PutUint64(p[i:], uint64(c.at/8)+uint64(i/8))
		}
	}
	c.at += int64(n)
	return n, nil
}

// Check reads such a body to its end, and returns its length. Other bytes are an error.
func Check(r io.Reader) (n int64, err error) {
	got, want := make([]byte, 64<<10), make([]byte, 64<<10)
	body := &counter{}
	for {
		k, err := r.Read(got)
		if _, failed := io.ReadFull(body, want[:k]); failed != nil || !bytes.Equal(got[:k], want[:k]) {
			return n, fmt.Errorf("the body is another one within %d bytes from %d on", k, n)
		}
		n += int64(k)
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, fmt.Errorf("after %d bytes: %w", n, err)
		}
	}
}
