package relay

import (
	"bytes"
	"errors"
	"io"
	"testing"
)

// All arrives, in order, whether it comes by the byte or by the megabyte.
func TestCopy(t *testing.T) {
	var want []byte
	for i := range 200 {
		want = append(want, bytes.Repeat([]byte{byte(i)}, 1<<(i%18))...)
	}
	for _, chunk := range []int{1, Quiet - 1, Quiet, Quiet + 1, 32 << 10, len(want)} {
		var got bytes.Buffer
		n, err := Copy(&got, &chunked{bytes.NewReader(want), chunk})
		if err != nil || n != int64(len(want)) || !bytes.Equal(got.Bytes(), want) {
			t.Errorf("by %d: %d of %d bytes, %v", chunk, n, len(want), err)
		}
	}
	if _, err := Copy(failing{}, bytes.NewReader(want)); !errors.Is(err, io.ErrShortWrite) {
		t.Error(err)
	}
}

type chunked struct {
	io.Reader
	n int
}

func (c *chunked) Read(p []byte) (int, error) { return c.Reader.Read(p[:min(len(p), c.n)]) }

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrShortWrite }
