package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

const (
	pingEvery = 3 * time.Second
	// maxLine is where a longer line is cut in two events: some SDKs take lines
	// of 4 MiB at most, and JSON may need six bytes for one.
	maxLine = 512 << 10
	// keepStream is the buffer that a stream keeps between writes.
	keepStream = 64 << 10
)

// A stream is the reply to a foreground command: events or frames. Pumps, the
// keep-alive and the end of the command write to it; a client that went away
// detaches it, and the command goes on.
type stream struct {
	frames bool
	raw    bool // output is passed on as it comes, not by lines

	mu    sync.Mutex
	w     http.ResponseWriter
	rc    *http.ResponseController
	gone  bool
	buf   []byte
	lines [2]splitter
}

// newStream makes the reply to r.
func newStream(w http.ResponseWriter, r *http.Request) *stream {
	s := &stream{w: w, rc: http.NewResponseController(w), frames: strings.Contains(r.Header.Get("Accept"), agent.FramesType)}
	for i := range s.lines {
		s.lines[i].bare = wantsBareLines(r)
	}
	return s
}

// firstWithEndings is the first release of the protocol in which the text of an
// event has the line's ending, so that the texts together are the output. The
// first SDK of that number takes both; programs on older ones expect none.
var firstWithEndings = []int{1, 1, 1}

// wantsBareLines reports whether r is of one of OpenSandbox's SDKs older than
// that, as all of them say: OpenSandbox-Python-SDK/1.1.0.
func wantsBareLines(r *http.Request) bool {
	sdk, version, ok := strings.Cut(r.Header.Get("User-Agent"), "/")
	if !ok || !strings.HasPrefix(sdk, "OpenSandbox-") || !strings.HasSuffix(sdk, "-SDK") {
		return false
	}
	var is []int
	for part := range strings.SplitSeq(version, ".") {
		n, err := strconv.Atoi(part)
		if err != nil {
			break // 1.1.1.dev1, 1.1.0-rc.1
		}
		is = append(is, n)
	}
	return len(is) > 0 && slices.Compare(is, firstWithEndings) < 0
}

// begin writes what comes first: the id, and for events a ping.
func (s *stream) begin(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.w.Header()
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no")
	if s.frames {
		h.Set("Content-Type", agent.FramesType)
		s.buf = appendFrameJSON(s.buf, agent.FrameControl, agent.FrameInit{ID: id})
	} else {
		h.Set("Content-Type", "text/event-stream")
		h.Set("Connection", "keep-alive")
		now := time.Now().UnixMilli()
		s.buf = appendText(s.buf, "init", []byte(id), now)
		s.buf = appendText(s.buf, "ping", []byte("pong"), now)
	}
	s.write()
}

// flush sends what was written. Output flushes by itself.
func (s *stream) flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flushLocked()
}

func (s *stream) flushLocked() {
	if !s.gone && s.rc.Flush() != nil {
		s.gone = true
	}
}

func (s *stream) write() {
	if !s.gone {
		if _, err := s.w.Write(s.buf); err != nil {
			s.gone = true
		}
	}
	s.buf = s.buf[:0]
	s.spare()
}

// largeBuffers are those of streams on which much flows, while they write.
var largeBuffers = sync.Pool{New: func() any { b := make([]byte, 0, widePipe*5/4); return &b }}

// spare gives up a buffer that is too large to be kept.
func (s *stream) spare() {
	if cap(s.buf) > keepStream {
		b := s.buf
		s.buf = nil
		largeBuffers.Put(&b)
	}
}

// output passes on what a command wrote. It blocks while the client is slow:
// then the command waits too, and nothing is lost.
func (s *stream) output(from byte, b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return
	}
	if len(b) > keepStream/4 && len(s.buf) == 0 && cap(s.buf) <= keepStream {
		s.buf = *largeBuffers.Get().(*[]byte)
	}
	switch now := time.Now().UnixMilli(); {
	case s.frames:
		s.buf = agent.AppendFrame(s.buf, from, b)
	case s.raw:
		s.lines[from-1].chunk(b, func(chunk []byte) {
			s.buf = appendText(s.buf, streamName[from-1], chunk, now)
		})
	default:
		s.lines[from-1].feed(b, func(line []byte) {
			s.buf = appendText(s.buf, streamName[from-1], line, now)
		})
	}
	if len(s.buf) == 0 {
		s.spare()
		return
	}
	s.write()
	s.flushLocked()
}

// framed is output of b, in which there is room for a frame's header before the
// first byte: so what is sent in frames is not copied.
func (s *stream) framed(from byte, b []byte) {
	if !s.frames {
		s.output(from, b[agent.FrameHeader:])
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return
	}
	agent.AppendFrameHeader(b[:0], from, len(b)-agent.FrameHeader)
	if _, err := s.w.Write(b); err != nil {
		s.gone = true
	}
	s.flushLocked()
}

var streamName = [2]string{"stdout", "stderr"}

func (s *stream) ping() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.frames {
		s.buf = agent.AppendFrame(s.buf, agent.FrameControl, nil)
	} else {
		s.buf = appendText(s.buf, "ping", []byte("pong"), time.Now().UnixMilli())
	}
	s.write()
	s.flushLocked()
}

// finish writes unterminated lines and the terminal event. It leaves sending to
// the end of the reply, which saves a packet.
func (s *stream) finish(started time.Time, e ending) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	elapsed := max(e.at.Sub(started).Milliseconds(), 0)
	if s.frames {
		x := agent.FrameExit{ExitCode: e.code, TimedOut: e.timedOut, Error: e.err, ExecutionTime: elapsed, Reason: e.reason, Hint: e.hint}
		if e.signal != 0 {
			x.Signal = proc.SignalName(e.signal)
		}
		s.buf = appendFrameJSON(s.buf, agent.FrameEnd, x)
		s.write()
		return
	}
	s.endLines(now.UnixMilli())
	ev := agent.Event{Type: "execution_complete", ExecutionTime: elapsed, Timestamp: now.UnixMilli()}
	if e.code != 0 || e.err != "" {
		ev = agent.Event{Type: "error", Timestamp: now.UnixMilli(), Error: e.event()}
	}
	s.appendEvent(ev)
	s.write()
}

// endLines writes what waited for more. The caller holds mu.
func (s *stream) endLines(now int64) {
	for i := range s.lines {
		s.lines[i].end(func(line []byte) {
			s.buf = appendText(s.buf, streamName[i], line, now)
		})
	}
}

// background ends the reply to a command that goes on without it.
func (s *stream) background() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.frames {
		return
	}
	s.appendEvent(agent.Event{Type: "execution_complete", Timestamp: time.Now().UnixMilli()})
	s.write()
}

// nextLine is U+0085, which ends a line to Python and so to some readers of streams.
var nextLine = []byte("\u0085")

func (s *stream) appendEvent(ev agent.Event) {
	b, err := json.Marshal(ev)
	if err != nil {
		return // strings and numbers always encode
	}
	b = bytes.ReplaceAll(b, nextLine, []byte(`\u0085`)) // encoding/json escapes the others itself
	s.buf = append(append(s.buf, b...), "\n\n"...)
}

// detach lets go of the client: after it nothing touches the reply. A write
// that hangs is cut off.
func (s *stream) detach() {
	s.rc.SetWriteDeadline(time.Unix(1, 0)) //nolint:errcheck // the connection is lost anyway
	s.release()
}

// release is detach for a reply that ended well.
func (s *stream) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = true
	s.buf, s.lines = nil, [2]splitter{}
}

// event says how a command failed in the words SDKs know.
func (e ending) event() *agent.EventError {
	if e.err != "" {
		return &agent.EventError{Name: "CommandExecError", Value: e.err, Traceback: []string{e.err}}
	}
	v := strconv.Itoa(e.code)
	if e.signal != 0 {
		v = "-1"
	}
	return &agent.EventError{Name: "CommandExecError", Value: v, Traceback: e.traceback()}
}

func (e ending) traceback() []string {
	if e.signal == 0 {
		t := []string{fmt.Sprintf("exit status %d", e.code)}
		if e.hint != "" {
			t = append(t, e.reason+": "+e.hint)
		}
		return t
	}
	t := []string{"signal: " + e.signal.String()}
	if e.timedOut {
		t = append(t, fmt.Sprintf("command timed out after %v", e.timeout))
	}
	return t
}

func appendFrameJSON(dst []byte, stream byte, v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		return dst // strings and numbers always encode
	}
	return agent.AppendFrame(dst, stream, b)
}

// appendText appends an event with a text and the blank line after it.
func appendText(dst []byte, typ string, text []byte, now int64) []byte {
	dst = append(dst, `{"type":"`...)
	dst = append(dst, typ...)
	dst = append(dst, `","text":`...)
	dst = appendQuoted(dst, text)
	dst = append(dst, `,"timestamp":`...)
	dst = strconv.AppendInt(dst, now, 10)
	return append(dst, "}\n\n"...)
}

// appendQuoted appends b as a JSON string; what is not UTF-8 becomes U+FFFD.
// encoding/json wants a string, an allocation and a second copy for that, and
// this is where every byte of output passes.
func appendQuoted(dst, b []byte) []byte {
	const hexDigits = "0123456789abcdef"
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(b); {
		c := b[i]
		if c >= ' ' && c < utf8.RuneSelf && c != '"' && c != '\\' {
			i++
			continue
		}
		if c < utf8.RuneSelf {
			dst = append(dst, b[start:i]...)
			switch c {
			case '"', '\\':
				dst = append(dst, '\\', c)
			case '\n':
				dst = append(dst, '\\', 'n')
			case '\r':
				dst = append(dst, '\\', 'r')
			case '\t':
				dst = append(dst, '\\', 't')
			default:
				dst = append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
			}
			i++
			start = i
			continue
		}
		r, n := utf8.DecodeRune(b[i:])
		// U+0085, U+2028 and U+2029 end a line to JavaScript or to line readers, as
		// Python's str.splitlines, by which the SDK for code takes streams apart.
		if r == utf8.RuneError && n == 1 || r == '\u0085' || r == '\u2028' || r == '\u2029' {
			dst = append(dst, b[start:i]...)
			dst = append(dst, '\\', 'u', hexDigits[r>>12], hexDigits[r>>8&15], hexDigits[r>>4&15], hexDigits[r&15])
			i += n
			start = i
			continue
		}
		i += n
	}
	return append(append(dst, b[start:]...), '"')
}

// A splitter makes lines of chunks: a line ends at \n, \r or \r\n, and what is
// unterminated waits for the rest. A \r is not kept waiting for a \n, so the two
// may come apart. A line has its ending unless bare; then an empty one is "\n",
// as in execd up to 1.1.0.
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
