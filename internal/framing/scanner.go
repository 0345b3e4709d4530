package framing

import (
	"bytes"
	"strconv"
	"strings"
)

// maxHead bounds what is kept of a head, in bytes. It is above the bound of all servers
// here (http.Server.MaxHeaderBytes), which refuse a longer one.
const maxHead = 128 << 10

// maxLine bounds a line between chunks: 16 hex digits, as in net/http, and the line's
// end. net/http also takes extensions and trailers. It skips them by rules of its own,
// and no client here sends them. So a Conn does not follow them.
const maxLine = 16 + len("\r\n")

type state int

const (
	head  state = iota // of a request, from its first line to the empty one
	body               // of a known length
	size               // line before a chunk
	chunk              // data of a chunk
	after              // empty line after a chunk
	last               // empty line after the last chunk, which has no data
	lost               // no request after this is clear
)

// A scanner follows the requests of one connection, by the rules of net/http.
type scanner struct {
	state state
	kept  []byte // of the head or line that is being read
	left  int64  // bytes of the body, or of the chunk, to come
}

// see reads on and returns how many heads that are clear have ended in b.
func (s *scanner) see(b []byte) (clear int64) {
	for len(b) > 0 && s.state != lost {
		switch s.state {
		case head:
			var ended bool
			if b, ended = s.head(b); ended && s.state != lost {
				clear++
			}
		case body, chunk:
			n := min(int64(len(b)), s.left)
			b, s.left = b[n:], s.left-n
			switch {
			case s.left > 0:
			case s.state == body:
				s.state = head
			default:
				s.state = after
			}
		default:
			b = s.line(b)
		}
	}
	return clear
}

// head reads on in a head and returns what follows its end.
func (s *scanner) head(b []byte) (rest []byte, ended bool) {
	if len(s.kept) == 0 {
		b = bytes.TrimLeft(b, "\r\n") // net/http ignores these, or fails
	}
	seen := max(0, len(s.kept)-2)
	s.kept = append(s.kept, b...)
	end := endOfHead(s.kept, seen)
	switch {
	case max(end, len(s.kept)-len(b)) > maxHead:
		*s = scanner{state: lost}
		return nil, false
	case end < 0:
		return nil, false
	}
	rest = b[len(b)-(len(s.kept)-end):]
	*s = parse(s.kept[:end])
	return rest, true
}

// endOfHead is where the first empty line of b ends. It follows a line whose end is not
// before from. If there is none, endOfHead is -1.
func endOfHead(b []byte, from int) int {
	for i := from; ; i++ {
		n := bytes.IndexByte(b[i:], '\n')
		if n < 0 {
			return -1
		}
		i += n
		switch rest := b[i+1:]; {
		case bytes.HasPrefix(rest, []byte("\n")):
			return i + 2
		case bytes.HasPrefix(rest, []byte("\r\n")):
			return i + 3
		}
	}
}

// parse reads a head and returns what follows it: lost if the head is not clear.
func parse(b []byte) scanner {
	first, rest, _ := strings.Cut(string(b), "\n")
	var lengths, encodings []string
	folded := (*[]string)(nil) // what a line that begins with a space continues
	for line := range strings.Lines(rest) {
		if line[0] == ' ' || line[0] == '\t' {
			if folded != nil { // which programs read differently
				return scanner{state: lost}
			}
			continue
		}
		name, value, _ := strings.Cut(line, ":")
		folded = nil
		switch {
		case strings.EqualFold(name, "Content-Length"):
			folded = &lengths
		case strings.EqualFold(name, "Transfer-Encoding"):
			folded = &encodings
		}
		if folded != nil {
			*folded = append(*folded, strings.Trim(value, " \t\r\n"))
		}
	}
	switch {
	case len(encodings) > 0 && (len(lengths) > 0 || !strings.HasSuffix(strings.TrimRight(first, "\r"), " HTTP/1.1")):
		return scanner{state: lost}
	case len(encodings) > 0: // net/http refuses all but "chunked"
		return scanner{state: size}
	case len(lengths) == 0:
		return scanner{}
	}
	n, err := strconv.ParseUint(lengths[0], 10, 63)
	for _, l := range lengths[1:] {
		if l != lengths[0] {
			return scanner{state: lost}
		}
	}
	switch {
	case err != nil:
		return scanner{state: lost}
	case n == 0:
		return scanner{}
	}
	return scanner{state: body, left: int64(n)}
}

// line reads on in a line between chunks and returns what follows it.
func (s *scanner) line(b []byte) (rest []byte) {
	n := bytes.IndexByte(b, '\n') + 1
	ended := n > 0
	if !ended {
		n = len(b)
	}
	s.kept = append(s.kept, b[:min(n, maxLine)]...)
	switch {
	case n > maxLine, len(s.kept) > maxLine:
		*s = scanner{state: lost}
		return nil
	case !ended:
		return nil
	}
	text, ended := strings.CutSuffix(string(s.kept), "\r\n")
	s.kept = s.kept[:0]
	length, err := strconv.ParseUint(text, 16, 63)
	switch {
	case !ended, s.state == size && err != nil, s.state != size && text != "":
		*s = scanner{state: lost}
	case s.state == last:
		*s = scanner{}
	case s.state == after:
		s.state = size
	case length == 0:
		s.state = last
	default:
		s.state, s.left = chunk, int64(length)
	}
	return b[n:]
}
