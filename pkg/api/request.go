package api

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"runtime/debug"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
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
	actor     string // "uid=0 pid=4711", "key", "anonymous"
	trusted   bool   // may use the API
	route     string
	sandbox   string
	status    int
	bytes     int64
	wrote     bool
	hungUp    bool
	err       error
}

type infoKey struct{}

func infoOf(r *http.Request) *info {
	if in, ok := r.Context().Value(infoKey{}).(*info); ok {
		return in
	}
	return &info{start: time.Now()}
}

// requestID is the trimmed incoming one if it is fit for a log, else a fresh one.
func requestID(r *http.Request) string {
	id := strings.TrimSpace(r.Header.Get(wire.HeaderRequestID))
	if id != "" && len(id) <= 128 && strings.IndexFunc(id, func(c rune) bool { return c <= ' ' || c > '~' }) < 0 {
		return id
	}
	var b [16]byte
	rand.Read(b[:]) //nolint:errcheck // never fails since Go 1.24
	return hex.EncodeToString(b[:])
}

// cors lets pages of any origin call the API, as OpenSandbox does. The key is
// a header that no browser sends by itself, so this gives nothing away; where
// no key is asked for, it lets none.
func (s *Server) cors(w http.ResponseWriter, r *http.Request) {
	origin := r.Header.Get("Origin")
	if origin == "" || s.keyless() {
		return
	}
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", origin)
	h.Add("Vary", "Origin")
	h.Set("Access-Control-Allow-Credentials", "true")
	h.Set("Access-Control-Expose-Headers", "X-Request-ID, Server-Timing, EXECD-COMMANDS-TAIL-CURSOR")
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
	peer     *peer
	deadline time.Time
	hold     bool // headers are not worth a packet of their own: the first of the body follows at once
}

func (t *tracked) touch() {
	if now := time.Now(); t.deadline.Sub(now) < writeStall-time.Second {
		t.deadline = now.Add(writeStall)
		t.rc.SetWriteDeadline(t.deadline) //nolint:errcheck // a recorder in a test has none
	}
}

func (t *tracked) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		t.in.status, t.in.wrote = status, true
	}
	t.touch()
	t.ResponseWriter.WriteHeader(status)
}

func (t *tracked) Write(b []byte) (int, error) {
	if !t.in.wrote {
		t.in.status, t.in.wrote = http.StatusOK, true
	}
	t.touch()
	n, err := t.ResponseWriter.Write(b)
	t.in.bytes += int64(n)
	return n, err
}

// Unwrap serves http.ResponseController.
func (t *tracked) Unwrap() http.ResponseWriter { return t.ResponseWriter }

// Flush serves what asks for an http.Flusher.
func (t *tracked) Flush() {
	if !t.hold || t.in.bytes > 0 {
		t.rc.Flush() //nolint:errcheck // a writer that can not flush does not need to
	}
}

// Hijack gives the connection to a protocol other than HTTP.
func (t *tracked) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	t.in.status, t.in.wrote = http.StatusSwitchingProtocols, true
	c, rw, err := t.rc.Hijack()
	if tcp, ok := c.(*net.TCPConn); ok && t.peer.free != nil {
		c = upgradedConn{tcp, t.peer.free}
	}
	return c, rw, err
}

// finish catches a panic and writes the one line a request leaves in the log.
func (s *Server) finish(w *tracked, r *http.Request, in *info) {
	p := recover()
	if p != nil && p != http.ErrAbortHandler { //nolint:errorlint // net/http compares it so, too
		s.cfg.Log.Error("panic in a handler", "panic", p, "request", in.requestID, "stack", string(debug.Stack()))
		s.fail(w, r, errs.New(errs.Internal, ""))
	}
	level := slog.LevelInfo
	switch {
	case in.status >= 500:
		level = slog.LevelError
	case in.hungUp || in.status == 0:
		level = slog.LevelWarn
	}
	attrs := []slog.Attr{
		slog.String("method", r.Method), slog.String("route", in.route), slog.Int("status", in.status),
		slog.Duration("dur", time.Since(in.start)), slog.String("request", in.requestID), slog.String("actor", in.actor),
	}
	if in.sandbox != "" {
		attrs = append(attrs, slog.String("sandbox", in.sandbox))
	}
	if in.bytes > 0 {
		attrs = append(attrs, slog.Int64("bytes", in.bytes))
	}
	if in.hungUp {
		attrs = append(attrs, slog.Bool("hung_up", true))
	}
	if in.err != nil {
		attrs = append(attrs, slog.String("err", in.err.Error()))
	}
	s.cfg.Log.LogAttrs(context.WithoutCancel(r.Context()), level, "request", attrs...)
	if p != nil && errors.Is(asError(p), http.ErrAbortHandler) {
		panic(http.ErrAbortHandler) // net/http cuts the connection, so the client sees a broken answer, not a short one
	}
}

func asError(p any) error {
	err, _ := p.(error)
	return err
}

// unescape decodes one path segment; what does not decode names nothing.
func unescape(seg string) string {
	s, err := url.PathUnescape(seg)
	if err != nil {
		return ""
	}
	return s
}

// clip shortens s for a message.
func clip(s string, n int) string {
	if len(s) > n {
		return s[:n] + "…"
	}
	return s
}
