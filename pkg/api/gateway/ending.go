package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A before is what the host knew of a sandbox before a request to its agent.
type before struct {
	kills, denials int64
}

// lookBefore looks at what a request may change.
func (g *Gateway) lookBefore(method, path string, rec *record.Record) before {
	return before{g.kills(method, path, rec), g.denials(method, path, rec)}
}

// explain returns a function that changes the answer to a command, or to code. If that
// failed, its stream then says that the kernel killed it for its memory, and what the
// network refused the sandbox meanwhile. If the sandbox ends under it, the stream says
// that, as its last event. ctx is that of the request. explain is nil for other requests.
//
// Only this code reads the bytes that pass, and only the end of each piece: the event
// that says how a command ended is the last of its stream, and the agent writes it at
// once.
func (g *Gateway) explain(ctx context.Context, method, path string, rec *record.Record, b before) func(*http.Response) {
	if method != http.MethodPost || !runs(path) {
		return nil
	}
	return func(resp *http.Response) {
		if resp.Header.Get("Content-Type") == "text/event-stream" {
			resp.Body = &told{
				ReadCloser: resp.Body, killed: g.killed(path, rec, b.kills), denied: g.denied(rec, b.denials),
				lost: g.lost(ctx, path, rec), begins: true,
			}
		}
	}
}

// runs reports whether a request to the agent's path has a command or code run.
func runs(path string) bool {
	id, ok := strings.CutPrefix(path, "/session/")
	return path == "/command" || path == "/code" || ok && strings.HasSuffix(id, "/run")
}

// told is a stream of events. Its last event, if that is about an error, gets lines more:
// what the host knows and the agent does not. A stream that ends without its last event
// gets one, if the host knows why.
type told struct {
	io.ReadCloser
	killed func() string            // why the kernel killed it; empty: it did not
	denied func() string            // what was refused to the sandbox meanwhile; empty: nothing
	lost   func() *agent.EventError // why the stream was cut; nil: it is left so. It may be nil
	rest   []byte                   // what did not fit into the reader's buffer
	line   []byte                   // how the last line begins that is not empty
	begins bool                     // the next byte begins a line
	over   bool                     // nothing comes behind rest
}

func (t *told) Read(p []byte) (int, error) {
	if len(t.rest) > 0 {
		n := copy(p, t.rest)
		t.rest = t.rest[n:]
		return n, nil
	}
	if t.over {
		return 0, io.EOF
	}
	n, err := t.ReadCloser.Read(p)
	t.note(p[:n])
	if from, line := lastEvent(p[:n]); line != nil {
		if more := t.explain(line); more != nil {
			m := copy(p[from:], more)
			t.rest = more[m:]
			n = from + m
		}
	}
	if err != nil && err != io.EOF && !t.concluded() && t.conclude() {
		return n, nil
	}
	if len(t.rest) > 0 {
		err = nil // it comes again
	}
	return n, err
}

// maxLast is longer than how the last event of a stream begins.
const maxLast = 32

// note remembers how the last line begins, of a stream that comes in pieces of any size.
func (t *told) note(piece []byte) {
	line := bytes.TrimRight(piece, "\n")
	if at := bytes.LastIndexByte(line, '\n'); at >= 0 || t.begins && len(line) > 0 {
		t.line, line = t.line[:0], line[at+1:]
	}
	t.line = append(t.line, line[:min(len(line), maxLast-len(t.line))]...)
	t.begins = len(piece) > 0 && piece[len(piece)-1] == '\n' || len(piece) == 0 && t.begins
}

// concluded reports whether the stream has had its last event.
func (t *told) concluded() bool {
	return bytes.HasPrefix(t.line, errorEvent) || bytes.HasPrefix(t.line, []byte(`{"type":"execution_complete"`))
}

// conclude ends a stream that was cut with an event that says why, if the host knows.
func (t *told) conclude() bool {
	if t.lost == nil {
		return false
	}
	why := t.lost()
	if why == nil {
		return false
	}
	b, err := json.Marshal(agent.Event{Type: "error", Error: why, Timestamp: time.Now().UnixMilli()})
	if err != nil {
		return false
	}
	if !t.begins {
		t.rest = append(t.rest, eventEnd...) // behind half an event
	}
	t.rest = append(append(t.rest, bytes.ReplaceAll(b, nextLine, []byte(`\u0085`))...), eventEnd...)
	t.over = true
	return true
}

// maxEvent is longer than any event about the end of a command.
const maxEvent = 16 << 10

var (
	eventEnd   = []byte("\n\n")
	errorEvent = []byte(`{"type":"error"`)
	// nextLine is U+0085, which ends a line to some readers of streams. The agent escapes
	// it, and encoding/json does not.
	nextLine = []byte("\u0085")
)

// lastEvent returns the event about an error that b ends with, and where it
// begins; nil if b ends with something else.
func lastEvent(b []byte) (from int, line []byte) {
	if !bytes.HasSuffix(b, eventEnd) {
		return 0, nil
	}
	line = b[:len(b)-len(eventEnd)]
	from = bytes.LastIndexByte(line, '\n') + 1
	if line = line[from:]; len(line) > maxEvent || !bytes.HasPrefix(line, errorEvent) {
		return 0, nil
	}
	return from, line
}

// explain returns an event with what the host knows added, or nil if it is another event or
// there is nothing to add.
func (t *told) explain(line []byte) []byte {
	var ev agent.Event
	if json.Unmarshal(line, &ev) != nil || ev.Error == nil {
		return nil
	}
	killed := ""
	if wasKilled(ev.Error) {
		killed = t.killed()
	}
	if killed != "" {
		ev.Error.Traceback = append(ev.Error.Traceback, killed)
		if ev.Error.Name == agent.ContextDied {
			ev.Error.Value = killed // SDKs show this; it is no exit code
		}
	}
	denied := t.denied()
	if denied != "" {
		ev.Error.Traceback = append(ev.Error.Traceback, denied)
	}
	if killed == "" && denied == "" {
		return nil
	}
	b, err := json.Marshal(ev)
	if err != nil {
		return nil
	}
	b = bytes.ReplaceAll(b, nextLine, []byte(`\u0085`))
	return append(b, eventEnd...)
}

// wasKilled reports whether a signal ended a command or a context, and nobody says why: a
// timeout says so itself.
func wasKilled(e *agent.EventError) bool {
	return (e.Value == "-1" || e.Name == agent.ContextDied) && len(e.Traceback) == 1 && e.Traceback[0] == "signal: killed"
}
