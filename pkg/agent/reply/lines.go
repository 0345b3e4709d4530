package reply

import (
	"bytes"
	"unicode/utf8"
)

// maxLine is where a longer line is cut into two events: some SDKs take lines of 4 MiB
// at most, and JSON may need six bytes for one.
const maxLine = 512 << 10

// A splitter makes lines of chunks. A line ends at \n, \r or \r\n, and an unterminated
// line waits for its end. A \r does not wait for a \n, so the two may be sent apart. A
// line has its ending unless bare; then an empty one is "\n", as in execd up to 1.1.0.
type splitter struct {
	bare bool
	held []byte
	cr   bool // the last byte was \r: a \n now belongs to it
}

var emptyLine = []byte("\n")

// feed passes on the lines that b completes; they are valid during the call.
func (l *splitter) feed(b []byte, emit func(line []byte)) {
	for len(b) > 0 {
		if l.cr && b[0] == '\n' {
			l.cr = false
			if !l.bare {
				emit(b[:1])
			}
			b = b[1:]
			continue
		}
		l.cr = false
		i := bytes.IndexByte(b, '\n')
		if j := bytes.IndexByte(b[:orLen(i, b)], '\r'); j >= 0 {
			i, l.cr = j, true
		}
		if i < 0 {
			l.hold(b, emit)
			return
		}
		end := i + 1
		if l.cr && end < len(b) && b[end] == '\n' {
			l.cr = false
			end++
		}
		line := b[:end]
		if l.bare {
			line = b[:i]
		}
		b = b[end:]
		if len(l.held) > 0 || len(line) > maxLine {
			l.hold(line, emit)
			line = l.held
		}
		if len(line) == 0 {
			line = emptyLine
		}
		emit(line)
		l.clear()
	}
}

func orLen(i int, b []byte) int {
	if i < 0 {
		return len(b)
	}
	return i
}

// hold keeps the beginning of a line, and passes on what is too long to keep,
// cut between characters.
func (l *splitter) hold(b []byte, emit func(line []byte)) {
	l.held = append(l.held, b...)
	for len(l.held) > maxLine {
		cut := maxLine
		for cut > maxLine-utf8.UTFMax && !utf8.RuneStart(l.held[cut]) {
			cut--
		}
		emit(l.held[:cut])
		l.held = append(l.held[:0], l.held[cut:]...)
	}
}

// end passes on a line that nothing terminated.
func (l *splitter) end(emit func(line []byte)) {
	if len(l.held) > 0 {
		emit(l.held)
	}
	l.clear()
}

func (l *splitter) clear() {
	if cap(l.held) > keepStream {
		l.held = nil
	}
	l.held = l.held[:0]
}

// chunk passes on b as it is, except an incomplete character, which waits for its rest.
func (l *splitter) chunk(b []byte, emit func(chunk []byte)) {
	if len(l.held) > 0 {
		b = append(bytes.Clone(l.held), b...)
		l.clear()
	}
	cut := len(b)
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(b[len(b)-i:]) {
				cut -= i
			}
			break
		}
	}
	l.held = append(l.held, b[cut:]...)
	if cut > 0 {
		emit(b[:cut])
	}
}
