package agent

import (
	"bytes"
	"io"
)

// MaxLines bounds how many lines LastLines looks for: eight bytes of memory each.
const MaxLines = 100_000

// LastLines finds where the last lines of an output begin: the output is
// written to it, and Bytes tells. The zero value looks for none.
type LastLines struct {
	Lines int // at most MaxLines

	starts []int64 // of the lines so far; the older ones are forgotten now and then
	n      int64   // bytes so far
	within bool    // the last line has not ended
}

func (l *LastLines) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		if !l.within {
			l.begin()
		}
		line := len(rest)
		i := bytes.IndexByte(rest, '\n')
		if l.within = i < 0; !l.within {
			line = i + 1
		}
		l.n += int64(line)
		rest = rest[line:]
	}
	return len(b), nil
}

func (l *LastLines) begin() {
	if l.Lines == 0 {
		return
	}
	if len(l.starts) == 2*l.Lines {
		l.starts = append(l.starts[:0], l.starts[l.Lines:]...)
	}
	l.starts = append(l.starts, l.n)
}

// Bytes returns how many bytes the last lines have; a last line that has not ended
// is one.
func (l *LastLines) Bytes() int64 {
	if k := min(l.Lines, len(l.starts)); k > 0 {
		return l.n - l.starts[len(l.starts)-k]
	}
	return 0
}

// FirstBytes passes the first n bytes on to w and takes the rest.
func FirstBytes(w io.Writer, n int64) io.Writer { return &firstBytes{w, n} }

type firstBytes struct {
	w    io.Writer
	left int64
}

func (f *firstBytes) Write(b []byte) (int, error) {
	if m := min(f.left, int64(len(b))); m > 0 {
		f.left -= m
		if n, err := f.w.Write(b[:m]); err != nil {
			return n, err
		}
	}
	return len(b), nil
}

// A Tail remembers the end of an output that is written to it: as much as the record of an
// ended sandbox has, MaxLastOutput.
type Tail struct{ last []byte }

func (t *Tail) Write(b []byte) (int, error) {
	t.last = append(t.last, b...)
	if n := len(t.last) - MaxLastOutput; n > 0 {
		t.last = append(t.last[:0], t.last[n:]...)
	}
	return len(b), nil
}

// Cut forgets the last n bytes.
func (t *Tail) Cut(n int64) { t.last = t.last[:max(0, int64(len(t.last))-n)] }

// Inside reports whether the output that was written to t ends inside a line.
func (t *Tail) Inside() bool { return len(t.last) > 0 && t.last[len(t.last)-1] != '\n' }

// Missing is the part of final, the last bytes of the output, that was not written to t.
func (t *Tail) Missing(final string) string {
	for n := min(len(final), len(t.last)); n > 0; n-- {
		if string(t.last[len(t.last)-n:]) == final[:n] {
			return final[n:]
		}
	}
	return final
}
