package reply

import (
	"bytes"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

const (
	pingEvery = 3 * time.Second
	// keepStream is the buffer that a stream keeps between writes.
	keepStream = 64 << 10
)

// A Stream is the reply to a foreground command, or to code: events or frames. Output,
// the keep-alive and the end write to it; when the client leaves, the stream is
// detached and the command goes on.
type Stream struct {
	Raw bool // output is passed on as it comes, not by lines

	frames bool
	left   chan struct{} // closed by Detach
	leave  sync.Once

	mu    sync.Mutex
	w     http.ResponseWriter
	rc    *http.ResponseController
	gone  bool
	buf   []byte
	lines [2]splitter
}

// NewStream makes the reply to r.
func NewStream(w http.ResponseWriter, r *http.Request) *Stream {
	s := &Stream{
		w: w, rc: http.NewResponseController(w), left: make(chan struct{}),
		frames: strings.Contains(r.Header.Get("Accept"), agent.FramesType),
	}
	for i := range s.lines {
		s.lines[i].bare = wantsBareLines(r)
	}
	return s
}

// firstWithEndings is the first release of the protocol in which the text of an
// event has the line's ending, so that the texts together are the output. The
// first SDK of that number takes both; programs on older ones expect none.
var firstWithEndings = []int{1, 1, 1}

// wantsBareLines reports whether r is from one of OpenSandbox's SDKs older than that.
func wantsBareLines(r *http.Request) bool {
	version, ok := agent.SDK(r.UserAgent())
	if !ok {
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

// Frames reports whether the client asked for frames.
func (s *Stream) Frames() bool { return s.frames }

// Begin writes what comes first: the id, and for events a ping.
func (s *Stream) Begin(id string) { s.BeginWith(agent.FrameInit{ID: id}) }

// BeginWith is Begin with more in the first frame; events have the id alone.
func (s *Stream) BeginWith(first agent.FrameInit) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.w.Header()
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no")
	if s.frames {
		h.Set("Content-Type", agent.FramesType)
		s.buf = appendFrameJSON(s.buf, agent.FrameControl, first)
	} else {
		h.Set("Content-Type", "text/event-stream")
		h.Set("Connection", "keep-alive")
		now := time.Now().UnixMilli()
		s.buf = appendText(s.buf, "init", []byte(first.ID), now)
		s.buf = appendText(s.buf, "ping", []byte("pong"), now)
	}
	s.write()
}

// beginDelay is how long the first event waits to be sent together with the last, or
// with output. So a command that ends by then costs one packet instead of two, and each
// packet passes two programs and gVisor's network.
const beginDelay = time.Millisecond

// Follow sends output until over is closed, and then calls finish; or until the client is
// gone.
func (s *Stream) Follow(r *http.Request, over <-chan struct{}, finish func()) {
	defer s.release() // also after a panic: the pumps must not write to a reply that is over
	soon := time.NewTimer(beginDelay)
	defer soon.Stop()
	t := time.NewTicker(pingEvery)
	defer t.Stop()
	for {
		select {
		case <-over:
			finish()
			return
		case <-soon.C:
			s.Flush()
		case <-t.C:
			s.ping()
		case <-r.Context().Done():
			s.Detach()
			return
		case <-s.left:
			return
		}
	}
}

// Flush sends what was written. Output flushes by itself.
func (s *Stream) Flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flushLocked()
}

func (s *Stream) flushLocked() {
	if !s.gone && s.rc.Flush() != nil {
		s.gone = true
	}
}

func (s *Stream) write() {
	if !s.gone {
		if _, err := s.w.Write(s.buf); err != nil {
			s.gone = true
		}
	}
	s.buf = s.buf[:0]
	s.spare()
}

// largeBuffers are for streams with much output, while they write. Each has room for
// what a pump reads at once (output.widePipe), as events.
var largeBuffers = sync.Pool{New: func() any { b := make([]byte, 0, 320<<10); return &b }}

// spare gives up a buffer that is too large to be kept.
func (s *Stream) spare() {
	if cap(s.buf) > keepStream {
		b := s.buf
		s.buf = nil
		largeBuffers.Put(&b)
	}
}

// Output passes on what a command wrote. It blocks while the client is slow:
// then the command waits too, and nothing is lost.
func (s *Stream) Output(from byte, b []byte) {
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
	case s.Raw:
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

// Framed is Output of b, which has room for a frame's header before the first byte, so
// that frames need no copy.
func (s *Stream) Framed(from byte, b []byte) {
	if !s.frames {
		s.Output(from, b[agent.FrameHeader:])
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

func (s *Stream) ping() {
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

// Finish writes unterminated lines and the last event, or the exit frame. x says how
// the command ended, and failed says the same in the words that SDKs know; nil: it
// ended well. The bytes are sent at the end of the reply, which saves a packet.
func (s *Stream) Finish(x agent.FrameExit, failed *agent.EventError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.frames {
		s.buf = appendFrameJSON(s.buf, agent.FrameEnd, x)
		s.write()
		return
	}
	s.complete(x.ExecutionTime, failed)
}

// FinishCode is Finish for code; took is in ms.
func (s *Stream) FinishCode(took int64, failed *agent.EventError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.complete(took, failed)
}

// complete writes what is left of the output, and the last event. The caller holds mu.
func (s *Stream) complete(took int64, failed *agent.EventError) {
	now := time.Now().UnixMilli()
	s.endLines(now)
	ev := agent.Event{Type: "execution_complete", ExecutionTime: took, Timestamp: now}
	if failed != nil {
		ev = agent.Event{Type: "error", Timestamp: now, Error: failed}
	}
	s.appendEvent(ev)
	s.write()
}

// Result passes on a value. Some SDKs look for its text by the MIME type, some
// by "text".
func (s *Stream) Result(formats map[string]string) {
	formats = maps.Clone(formats)
	text, found := formats["text"]
	if !found {
		text = formats["text/plain"]
	}
	formats["text"], formats["text/plain"] = text, text
	s.Event(agent.Event{Type: "result", Results: formats})
}

// Event sends ev, now.
func (s *Stream) Event(ev agent.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return
	}
	ev.Timestamp = time.Now().UnixMilli()
	s.appendEvent(ev)
	s.write()
	s.flushLocked()
}

// endLines writes unterminated lines. The caller holds mu.
func (s *Stream) endLines(now int64) {
	for i := range s.lines {
		s.lines[i].end(func(line []byte) {
			s.buf = appendText(s.buf, streamName[i], line, now)
		})
	}
}

// Background ends the reply to a command that goes on without it.
func (s *Stream) Background() {
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

func (s *Stream) appendEvent(ev agent.Event) {
	b, err := json.Marshal(ev)
	if err != nil {
		return // strings and numbers always encode
	}
	b = bytes.ReplaceAll(b, nextLine, []byte(`\u0085`)) // encoding/json escapes the others itself
	s.buf = append(append(s.buf, b...), "\n\n"...)
}

// Detach leaves the client: afterwards nothing touches the reply. A write that hangs is
// cut off. It may be called more than once.
func (s *Stream) Detach() {
	s.rc.SetWriteDeadline(time.Unix(1, 0)) //nolint:errcheck // the connection is lost anyway
	s.leave.Do(func() { close(s.left) })
	s.release()
}

// release is Detach for a reply that ended well.
func (s *Stream) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = true
	s.buf, s.lines = nil, [2]splitter{}
}

func appendFrameJSON(dst []byte, stream byte, v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		return dst // strings and numbers always encode
	}
	return agent.AppendFrame(dst, stream, b)
}
