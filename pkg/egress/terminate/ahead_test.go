package terminate

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
	"testing/iotest"
	"time"
)

// TestAhead: a body is read to its end, or its error, whatever the sizes of reads are.
func TestAhead(t *testing.T) {
	body := bytes.Repeat([]byte("0123456789abcde"), 100<<10)
	broken := errors.New("it broke off")
	for what, src := range map[string]io.Reader{
		"all":        bytes.NewReader(body),
		"halves":     iotest.HalfReader(bytes.NewReader(body)),
		"end at all": iotest.DataErrReader(bytes.NewReader(body)),
		"broken":     io.MultiReader(bytes.NewReader(body), iotest.ErrReader(broken)),
	} {
		for _, size := range []int{1 << 10, 32 << 10, 100 << 10} {
			a := newAhead(io.NopCloser(src), make(chan struct{}, 1))
			var got bytes.Buffer
			buf := make([]byte, size)
			var err error
			for err == nil {
				var n int
				n, err = a.Read(buf)
				got.Write(buf[:n])
			}
			if want := map[bool]error{true: broken, false: io.EOF}[what == "broken"]; err != want || !bytes.Equal(got.Bytes(), body) {
				t.Errorf("%s in %d: %d bytes of %d, %v", what, size, got.Len(), len(body), err)
			}
			if _, again := a.Read(buf); again != err {
				t.Errorf("%s: %v after the end", what, again)
			}
			if s, ok := src.(io.Seeker); !ok {
				break
			} else if _, err := s.Seek(0, io.SeekStart); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestAheadClosed: to close a body ends a Read that waits.
func TestAheadClosed(t *testing.T) {
	out, in := io.Pipe()
	a := newAhead(out, make(chan struct{}, 1))
	go in.Write(make([]byte, aheadFrom)) //nolint:errcheck // the reads say
	if _, err := io.ReadFull(a, make([]byte, aheadFrom)); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(time.Millisecond, func() { a.Close() })
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.ErrClosedPipe) {
		t.Error(err)
	}
}

// TestAheadTurns: while as many bodies are read ahead as may be, others are read as they are, until
// one of those has ended.
func TestAheadTurns(t *testing.T) {
	turns := make(chan struct{}, 1)
	begun := func() *ahead {
		a := newAhead(io.NopCloser(io.LimitReader(zeros{}, 4*aheadFrom)), turns)
		if _, err := io.CopyN(io.Discard, a, 2*aheadFrom); err != nil {
			t.Fatal(err)
		}
		return a
	}
	first, second := begun(), begun()
	if first.chunks == nil || second.chunks != nil {
		t.Errorf("read ahead: the first %v, the second %v", first.chunks != nil, second.chunks != nil)
	}
	for _, a := range []*ahead{second, first} {
		if n, err := io.Copy(io.Discard, a); n != 2*aheadFrom || err != nil {
			t.Errorf("the rest has %d bytes, %v", n, err)
		}
		a.Close()
	}
	turns <- struct{}{} // the first has given its turn back
	<-turns
	if third := begun(); third.chunks == nil {
		t.Error("a third one is not read ahead")
	} else {
		third.Close()
	}
}
