// Package journal writes the daemon's log: logfmt, one line for each record. If
// standard error is the systemd journal, each line begins with its priority
// (sd-daemon(3)) and has no time, because the journal adds a better one.
//
// The attributes of a request travel in the context: With puts them there, and every
// line that is logged with that context has them. So the line of a sandbox's creation
// names its request, although the Manager that writes it knows nothing of requests.
package journal

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// New returns a logger that writes records of at least level to f.
func New(f *os.File, level slog.Leveler) *slog.Logger {
	return slog.New(newHandler(f, level, isJournal(f, os.Getenv("JOURNAL_STREAM"))))
}

const (
	startLimit = 10 * time.Second // a start that takes longer is followed
	heldLimit  = 64 << 10         // bytes
)

// Starting is New for a program that a service manager starts again and again if it fails: what is below a warning is
// held back until started is called, or the start has taken ten seconds. So a start that fails writes why, and
// not what it did before.
func Starting(f *os.File, level slog.Leveler) (log *slog.Logger, started func()) {
	h := newHandler(f, level, isJournal(f, os.Getenv("JOURNAL_STREAM")))
	return slog.New(h), h.line.hold(startLimit)
}

// hold begins to hold lines back, and returns what ends that.
func (l *line) hold(limit time.Duration) (release func()) {
	l.held = new(bytes.Buffer)
	release = func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.release() //nolint:errcheck // as of any other line, there is nobody to report it to
	}
	time.AfterFunc(limit, release)
	return release
}

// release writes what was held back. Precondition: mu is held.
func (l *line) release() error {
	held := l.held
	if l.held = nil; held == nil {
		return nil
	}
	_, err := l.out.Write(held.Bytes())
	return err
}

// Capture makes to the default logger. It also gets the output of package log, at level
// debug: there net/http logs unsolicited data in the words of a server, which may be a
// guest.
func Capture(to *slog.Logger) {
	slog.SetLogLoggerLevel(slog.LevelDebug)
	slog.SetDefault(to)
}

// isJournal reports whether f is the stream that $JOURNAL_STREAM names, as device:inode
// (systemd.exec(5)). The variable alone proves nothing: children inherit it, whatever
// their standard error is.
func isJournal(f *os.File, stream string) bool {
	var st unix.Stat_t
	if stream == "" || unix.Fstat(int(f.Fd()), &st) != nil {
		return false
	}
	return stream == fmt.Sprintf("%d:%d", st.Dev, st.Ino)
}

// handler is slog's TextHandler. It adds the attributes of the context to every line
// and, for the journal, puts a priority before it.
type handler struct {
	slog.Handler // writes into line
	line         *line
}

// line is the buffer of one record, which is written in one piece.
type line struct {
	mu      sync.Mutex
	buf     bytes.Buffer  // guarded by mu
	held    *bytes.Buffer // lines that wait for the end of a start; nil: none do. guarded by mu
	out     io.Writer
	journal bool
}

func newHandler(out io.Writer, level slog.Leveler, journal bool) handler {
	l := &line{out: out, journal: journal}
	opts := slog.HandlerOptions{Level: level}
	if journal {
		opts.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
			if len(groups) == 0 && a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}
	}
	return handler{slog.NewTextHandler(&l.buf, &opts), l}
}

// Handle writes one record.
func (h handler) Handle(ctx context.Context, r slog.Record) error {
	if who, ok := ctx.Value(key{}).([]slog.Attr); ok {
		r = r.Clone()
		r.AddAttrs(who...)
	}
	h.line.mu.Lock()
	defer h.line.mu.Unlock()
	h.line.buf.Reset()
	if h.line.journal {
		h.line.buf.WriteString(priority(r.Level))
	}
	if err := h.Handler.Handle(ctx, r); err != nil {
		return err
	}
	if held := h.line.held; held != nil && r.Level < slog.LevelWarn {
		held.Write(h.line.buf.Bytes())
		if held.Len() < heldLimit {
			return nil
		}
		return h.line.release()
	}
	_, err := h.line.out.Write(h.line.buf.Bytes())
	return err
}

// WithAttrs implements slog.Handler.
func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return handler{h.Handler.WithAttrs(attrs), h.line}
}

// WithGroup implements slog.Handler.
func (h handler) WithGroup(name string) slog.Handler {
	return handler{h.Handler.WithGroup(name), h.line}
}

// priority is a level in the notation of sd-daemon(3).
func priority(l slog.Level) string {
	switch {
	case l >= slog.LevelError:
		return "<3>"
	case l >= slog.LevelWarn:
		return "<4>"
	case l >= slog.LevelInfo:
		return "<6>"
	}
	return "<7>"
}

type key struct{}

// With returns a context whose log lines have attrs, and no longer those of ctx.
func With(ctx context.Context, attrs ...slog.Attr) context.Context {
	return context.WithValue(ctx, key{}, attrs)
}
