package api

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/sandboxd/sandboxd/internal/fields"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/gateway"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// writeStall is how long a client may take no byte of an answer before it is
// dropped. It is long because a person may stop the output of a command with
// Ctrl-S or a pager; a dead peer is noticed earlier, by TCP keep-alive.
const writeStall = 15 * time.Minute

// info is what is known about a request while it is served, for the one log
// line at its end. Only its own goroutine touches it.
type info struct {
	start     time.Time
	requestID string
	actor     string      // "uid=0 pid=4711", "key", "anonymous"
	role      record.Role // what it may do; empty: it has no key
	route     string
	sandbox   string
	status    int
	bytes     int64
	wrote     bool
	hungUp    bool
	err       error
	first     time.Duration // from start until the answer began; 0: it has not
	op        string        // the operation this is, if the API alone sees all of it
	image     string        // of op
	visit     gateway.Visit // to a port, if it is one
	follows   bool          // it asks for output as it comes
	bodies    *semaphore.Weighted
}

// begun notes that the answer begins.
func (in *info) begun(status int) {
	in.status, in.wrote = status, true
	if in.first == 0 {
		in.first = time.Since(in.start)
	}
}

type infoKey struct{}

func infoOf(r *http.Request) *info {
	if in, ok := r.Context().Value(infoKey{}).(*info); ok {
		return in
	}
	return &info{start: time.Now(), bodies: semaphore.NewWeighted(bodyBudget)}
}

// requestID is the trimmed incoming one if it is fit for a log, else a fresh
// UUID, as OpenSandbox's documents declare the header.
func requestID(r *http.Request) string {
	id := strings.TrimSpace(r.Header.Get(wire.HeaderRequestID))
	if id != "" && len(id) <= 128 && strings.IndexFunc(id, func(c rune) bool { return c <= ' ' || c > '~' }) < 0 {
		return id
	}
	var b [16]byte
	rand.Read(b[:])                             //nolint:errcheck // never fails since Go 1.24
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80 // version 4, RFC 9562 §5.4
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// cors lets pages of any origin call the API, as OpenSandbox does. The key is a header
// that no browser sends by itself, so this gives nothing away; where no key is asked
// for, cors lets no page call.
func (s *Server) cors(w http.ResponseWriter, r *http.Request) {
	origin := r.Header.Get("Origin")
	if origin == "" || s.guard.Keyless() {
		return
	}
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", origin)
	h.Add("Vary", "Origin")
	h.Set("Access-Control-Allow-Credentials", "true")
	h.Set("Access-Control-Expose-Headers", "X-Request-ID, Server-Timing, Retry-After, EXECD-COMMANDS-TAIL-CURSOR, "+
		wire.HeaderSandbox+", "+fields.Header)
	if r.Method == http.MethodOptions {
		h.Set("Access-Control-Allow-Methods", "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS")
		if req := r.Header.Get("Access-Control-Request-Headers"); req != "" {
			h.Set("Access-Control-Allow-Headers", req)
		}
		h.Set("Access-Control-Max-Age", "600")
	}
}

// tracked notes what is written, and lets no stalled client hold a goroutine.
type tracked struct {
	http.ResponseWriter
	in       *info
	rc       *http.ResponseController
	peer     *auth.Peer
	streams  *streams
	deadline time.Time
	ctx      context.Context // of the request, for as long as it is admitted; nil: it always is
	goesOn   bool            // it is a stream
	over     atomic.Bool     // nothing more is written
	answered atomic.Bool     // the head of an answer that is no stream was written
}

// revokedTime is how long a handler may take to end when its client is no longer admitted.
const revokedTime = 5 * time.Second

// during ends what waits for bytes of the client when it is no longer admitted, and then what
// waits for it to take some. What else waits hangs on ctx, the context of the request.
func (t *tracked) during(ctx, life context.Context) (leave func()) {
	if life.Done() == nil {
		return func() {}
	}
	t.ctx = ctx
	var mu sync.Mutex
	var late *time.Timer
	left := false // then the connection may serve another request
	once := func(f func()) {
		mu.Lock()
		defer mu.Unlock()
		if !left {
			f()
		}
	}
	stop := context.AfterFunc(ctx, func() {
		if httperr.Revoked(ctx) == nil {
			return
		}
		once(func() {
			if !t.answered.Load() {
				t.rc.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // a recorder in a test has none
			}
			late = time.AfterFunc(revokedTime, func() {
				once(func() {
					t.over.Store(true)
					t.rc.SetWriteDeadline(time.Unix(1, 0)) //nolint:errcheck // likewise
				})
			})
		})
	})
	return func() {
		stop()
		once(func() {
			if left = true; late != nil {
				late.Stop()
			}
		})
	}
}

func (t *tracked) touch() {
	if t.over.Load() {
		return
	}
	if now := time.Now(); t.deadline.Sub(now) < writeStall-time.Second {
		t.deadline = now.Add(writeStall)
		t.rc.SetWriteDeadline(t.deadline) //nolint:errcheck // a recorder in a test has none
	}
}

func (t *tracked) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		t.in.begun(status)
		t.Header().Set(wire.HeaderRequestID, t.in.requestID) // ReverseProxy clears all after an interim answer
	}
	t.begun(status)
	t.answer(status)
	t.touch()
	t.ResponseWriter.WriteHeader(status)
}

// answer notes that an answer which is no stream begins. If the client is no longer admitted by then, nothing more is
// read from its connection (during), so the connection serves no other request.
func (t *tracked) answer(status int) {
	if status < 200 || t.goesOn {
		return
	}
	t.answered.Store(true)
	if t.ctx != nil && httperr.Revoked(t.ctx) != nil {
		t.Header().Set("Connection", "close")
	}
}

// begun notes that an answer goes on, if it does.
func (t *tracked) begun(status int) {
	if status == http.StatusOK && !t.goesOn && (t.in.follows || goesOn(t.Header().Get("Content-Type"))) {
		t.goesOn = true
		t.streams.add(t)
	}
}

func (t *tracked) Write(b []byte) (int, error) {
	if !t.in.wrote {
		t.in.begun(http.StatusOK)
		t.begun(http.StatusOK)
		t.answer(http.StatusOK)
	}
	t.touch()
	n, err := t.ResponseWriter.Write(b)
	t.in.bytes += int64(n)
	return n, err
}

// Passing notes bytes of the body that are about to be written below t (relay.Meter).
func (t *tracked) Passing(n int) {
	t.touch()
	t.in.bytes += int64(n)
}

// Unwrap serves http.ResponseController.
func (t *tracked) Unwrap() http.ResponseWriter { return t.ResponseWriter }

// Flush serves what asks for an http.Flusher.
func (t *tracked) Flush() {
	if !t.in.visit.Hold || t.in.bytes > 0 {
		if !t.in.wrote { // a flush sends the head
			t.in.begun(http.StatusOK)
			t.begun(http.StatusOK)
		}
		t.rc.Flush() //nolint:errcheck // a writer that cannot flush does not need to
	}
}

// Hijack gives the connection to a protocol other than HTTP.
func (t *tracked) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	t.in.begun(http.StatusSwitchingProtocols)
	c, rw, err := t.rc.Hijack()
	if err == nil {
		c = t.peer.Keep(c)
	}
	return c, rw, err
}

// finish catches a panic and writes what the log gets about a request.
func (s *Server) finish(w *tracked, r *http.Request, in *info) {
	p := recover()
	s.streams.remove(w)
	if p != nil && p != http.ErrAbortHandler { //nolint:errorlint // net/http compares it so, too
		s.cfg.Log.Error("panic in a handler", "panic", p, "request", in.requestID, "stack", string(debug.Stack()))
		fail(w, r, errs.New(errs.Internal, ""))
	}
	if why := httperr.Revoked(r.Context()); why != nil && (p != nil || in.status == http.StatusSwitchingProtocols) {
		in.err = why
	}
	s.observe(r, in)
	if p != nil && errors.Is(asError(p), http.ErrAbortHandler) {
		panic(http.ErrAbortHandler) // net/http cuts the connection, so the client sees a broken answer, not a short one
	}
}

// streams are answers that go on for as long as a command, a log or the daemon does.
type streams struct {
	mu      sync.Mutex
	cut     bool                  // no more may begin
	answers map[*tracked]net.Conn // guarded by mu
}

// goesOn reports whether an answer of a media type is a stream.
func goesOn(kind string) bool {
	return kind == agent.FramesType || strings.HasPrefix(kind, "text/event-stream")
}

func (s *streams) add(t *tracked) {
	conn := t.peer.Conn()
	if conn == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cut {
		conn.Close() //nolint:errcheck // net/http closes it again
		return
	}
	s.answers[t] = conn
}

func (s *streams) remove(t *tracked) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.answers, t)
}

// CutStreams cuts the connections of all streams, for a daemon that is about to end: http.Server's
// Shutdown would wait for them. A client sees a broken answer, not one that is complete, and comes
// back to the next daemon, which goes on at the byte where this one was.
func (s *Server) CutStreams() {
	s.streams.mu.Lock()
	defer s.streams.mu.Unlock()
	s.streams.cut = true
	for _, conn := range s.streams.answers {
		conn.Close() //nolint:errcheck // net/http closes it again
	}
}

func asError(p any) error {
	err, _ := p.(error)
	return err
}

// unescape decodes one path segment. A text that does not decode becomes "", which
// names nothing.
func unescape(seg string) string {
	s, err := url.PathUnescape(seg)
	if err != nil {
		return ""
	}
	return s
}
