package inject

import (
	"bytes"
	"io"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// A needle is a text that is searched for. It is not empty.
type needle struct {
	text       []byte
	credential string
}

// A searcher finds needles, and placeholders that sandboxd draws, in a text: of those that begin
// first the longest, and then the next behind its end.
type searcher struct {
	needles []needle
	drawn   bool // placeholders too
}

const drawnLen = len(vault.PlaceholderPrefix) + 26

// isDrawn reports whether b is a placeholder, or may become one when more of it comes.
func isDrawn(b []byte) bool {
	n := len(vault.PlaceholderPrefix)
	if len(b) <= n {
		return strings.HasPrefix(vault.PlaceholderPrefix, string(b))
	}
	return len(b) <= drawnLen && string(b[:n]) == vault.PlaceholderPrefix &&
		len(bytes.Trim(b[n:], "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567")) == 0
}

// A cursor goes through one text. It searches for each needle by itself, and keeps where it stands
// next: that is linear in the text for each needle, whatever the text.
type cursor struct {
	*searcher
	b    []byte
	next []int // of each needle, and of placeholders; -1: nowhere
}

func (s *searcher) in(b []byte) *cursor { return &cursor{searcher: s, b: b} }

func (c *cursor) index(i, from int) int {
	if i < len(c.needles) {
		if at := bytes.Index(c.b[from:], c.needles[i].text); at >= 0 {
			return from + at
		}
		return -1
	}
	for c.drawn {
		at := bytes.Index(c.b[from:], []byte(vault.PlaceholderPrefix))
		if at < 0 {
			break
		}
		if from += at; len(c.b)-from >= drawnLen && isDrawn(c.b[from:from+drawnLen]) {
			return from
		}
		from++
	}
	return -1
}

// find returns the first text at or behind from: where it begins and ends, and its needle, or nil
// for a placeholder. at is -1 if there is none.
func (c *cursor) find(from int) (at, end int, n *needle) {
	if c.next == nil {
		c.next = make([]int, len(c.needles)+1)
		for i := range c.next {
			c.next[i] = c.index(i, from)
		}
	}
	at = -1
	for i := range c.next {
		if c.next[i] >= 0 && c.next[i] < from {
			c.next[i] = c.index(i, from)
		}
		size, this := drawnLen, (*needle)(nil)
		if i < len(c.needles) {
			this = &c.needles[i]
			size = len(this.text)
		}
		if p := c.next[i]; p >= 0 && (at < 0 || p < at || p == at && p+size > end) {
			at, end, n = p, p+size, this
		}
	}
	return at, end, n
}

// open returns where in b, at or behind from, the first text begins that may be complete when
// more bytes come. It is len(b) if there is none. A needle of n bytes costs at most n²/2 comparisons
// of a byte, and does so only if it repeats its own beginning.
func (s *searcher) open(b []byte, from int) int {
	first := len(b)
	try := func(size int, begin byte, could func(tail []byte) bool) {
		for at := max(from, len(b)-size+1); at < first; at++ {
			skip := bytes.IndexByte(b[at:first], begin)
			if skip < 0 {
				return
			}
			if at += skip; could(b[at:]) {
				first = at
			}
		}
	}
	for _, n := range s.needles {
		try(len(n.text), n.text[0], func(tail []byte) bool { return bytes.HasPrefix(n.text, tail) })
	}
	if s.drawn {
		try(drawnLen, vault.PlaceholderPrefix[0], isDrawn)
	}
	return first
}

// A swap is what a text is replaced by. An error ends the search.
type swap func(text []byte, n *needle) ([]byte, error)

// replace replaces all texts in s. limit bounds the result; beyond it tooLong is returned.
func (s *searcher) replace(text string, limit int, to swap) (string, error) {
	c := s.in([]byte(text))
	at, end, n := c.find(0)
	if at < 0 {
		return text, nil
	}
	var out []byte
	from := 0
	for ; at >= 0; at, end, n = c.find(from) {
		with, err := to(c.b[at:end], n)
		if err != nil {
			return "", err
		}
		out = append(append(out, c.b[from:at]...), with...)
		if from = end; len(out) > limit {
			return "", errTooLong
		}
	}
	return string(append(out, c.b[from:]...)), nil
}

// chunk is how many bytes a stream reads at once at most, and after how many it stops replacing
// until they are read.
const chunk = 32 << 10

// A stream is a reader that replaces texts while it is read, also across the borders of what its
// source returns. It holds back only the bytes that may begin a text. So who reads it sees what is
// searched for: it is for placeholders in requests, which are no secrets, and a watch is for values
// in answers. It needs memory for a chunk, the longest needle and the longest replacement, whatever
// the length of the source.
type stream struct {
	*searcher
	src io.ReadCloser
	to  swap
	// end is called at the end of src, and its error returned in place of io.EOF.
	end func() error

	buf  []byte // has come, and is not looked at or held back
	out  []byte // may be read
	used int    // of out
	room int    // how much is read at once: more of a source that has more
	eof  bool   // of src
	wait bool   // for more of src
	err  error
}

func newStream(src io.ReadCloser, s *searcher, to swap, end func() error) *stream {
	return &stream{searcher: s, src: src, to: to, end: end, wait: true, room: chunk / 8}
}

// Read returns what may be sent on.
func (s *stream) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for s.used == len(s.out) {
		s.out, s.used = s.out[:0], 0
		switch {
		case s.err != nil:
			return 0, s.err
		case s.wait && s.eof:
			s.err = io.EOF
			if err := s.end(); err != nil {
				s.err = err
			}
		case s.wait:
			s.fill()
		default:
			if s.err = s.work(); s.err != nil {
				s.out = s.out[:0]
			}
		}
	}
	n := copy(p, s.out[s.used:])
	s.used += n
	return n, nil
}

// fill reads once from the source.
func (s *stream) fill() {
	had := len(s.buf)
	if cap(s.buf)-had < s.room {
		s.buf = append(make([]byte, 0, had+s.room), s.buf...)
	}
	n, err := s.src.Read(s.buf[had : had+s.room])
	s.buf = s.buf[:had+n]
	if n == s.room {
		s.room = min(2*s.room, chunk)
	}
	switch {
	case err == io.EOF:
		s.eof = true
	case err != nil:
		s.err = err // what is held back is not sent
	}
	s.wait = n == 0 && !s.eof
}

// work replaces what is complete in buf, and moves it to out.
func (s *stream) work() error {
	from, open := 0, len(s.buf)
	if !s.eof {
		open = s.open(s.buf, 0)
	}
	s.wait = true
	for c := s.in(s.buf); ; {
		at, end, n := c.find(from)
		if at < 0 || at >= open {
			break
		}
		with, err := s.to(s.buf[at:end], n)
		if err != nil {
			return err
		}
		s.out = append(append(s.out, s.buf[from:at]...), with...)
		if from = end; from > open {
			open = s.open(s.buf, from)
		}
		if len(s.out) >= chunk {
			s.wait, open = false, from // the rest when this is read
			break
		}
	}
	s.out = append(s.out, s.buf[from:max(from, open)]...)
	s.buf = s.buf[:copy(s.buf, s.buf[max(from, open):])]
	return nil
}

// Close closes the source.
func (s *stream) Close() error { return s.src.Close() }
