package journal

import (
	"bytes"
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// TestLines holds what a line looks like, on a terminal and in the journal.
func TestLines(t *testing.T) {
	for _, journal := range []bool{false, true} {
		var b bytes.Buffer
		log := slog.New(newHandler(&b, slog.LevelInfo, journal))
		ctx := With(t.Context(), slog.String("request", "r1"), slog.String("actor", "uid=0"))
		log.DebugContext(ctx, "hidden")
		log.InfoContext(ctx, "operation", "op", "create")
		log.With("part", "x").Warn("two\nlines")
		log.WithGroup("g").Error("bad", "err", "no")
		lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
		want := []string{
			`<6>level=INFO msg=operation op=create request=r1 actor="uid=0"`,
			`<4>level=WARN msg="two\nlines" part=x`,
			`<3>level=ERROR msg=bad g.err=no`,
		}
		if len(lines) != len(want) {
			t.Fatalf("%d lines: %q", len(lines), b.String())
		}
		for i, line := range lines {
			if !journal {
				stamp, rest, _ := strings.Cut(line, " ")
				if !strings.HasPrefix(stamp, "time=") {
					t.Errorf("no time in %q", line)
				}
				line = want[i][:3] + rest
			}
			if line != want[i] {
				t.Errorf("journal %v: got %q, want %q", journal, line, want[i])
			}
		}
	}
}

// TestIsJournal holds that only the stream that is named counts, not the variable.
func TestIsJournal(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	fi, err := w.Stat()
	if err != nil {
		t.Fatal(err)
	}
	st := fi.Sys().(*syscall.Stat_t)
	for stream, want := range map[string]bool{
		fmt.Sprintf("%d:%d", st.Dev, st.Ino):   true,
		fmt.Sprintf("%d:%d", st.Dev, st.Ino+1): false,
		"":                                     false,
		"nonsense":                             false,
	} {
		if got := isJournal(w, stream); got != want {
			t.Errorf("JOURNAL_STREAM=%q: %v", stream, got)
		}
	}
}

func BenchmarkLine(b *testing.B) {
	log := slog.New(newHandler(io.Discard, slog.LevelInfo, true))
	ctx := With(b.Context(), slog.String("request", "0123456789abcdef"), slog.String("actor", "uid=0 pid=1"))
	b.ReportAllocs()
	for b.Loop() {
		log.LogAttrs(ctx, slog.LevelInfo, "operation", slog.String("op", "exec"), slog.String("sandbox", "daaaaaaaaaaa"),
			slog.Duration("dur", 1234567))
	}
}

// TestCapture: what libraries log is a line like others, whoever's words it has.
func TestCapture(t *testing.T) {
	was, out, flags := slog.Default(), log.Writer(), log.Flags()
	defer func() {
		slog.SetDefault(was)
		log.SetOutput(out)
		log.SetFlags(flags)
	}()
	var debug, info bytes.Buffer
	Capture(slog.New(newHandler(&info, slog.LevelInfo, true)))
	log.Print("Unsolicited response")
	Capture(slog.New(newHandler(&debug, slog.LevelDebug, true)))
	log.Print("Unsolicited response received on idle HTTP channel starting with \"\x1b[2J\"\nlevel=ERROR msg=forged")
	want := `<7>level=DEBUG msg="Unsolicited response received on idle HTTP channel starting with \"\x1b[2J\"\nlevel=ERROR msg=forged"` +
		"\n"
	if info.Len() > 0 || debug.String() != want {
		t.Errorf("%q, %q", info.String(), debug.String())
	}
}

// TestStarting: until a start has ended, only warnings and errors are written; then what was held back is, in order.
// So it is after the limits of time and bytes.
func TestStarting(t *testing.T) {
	begin := func(limit time.Duration) (*bytes.Buffer, *slog.Logger, *line, func()) {
		b := new(bytes.Buffer)
		h := newHandler(b, slog.LevelInfo, true)
		release := h.line.hold(limit)
		return b, slog.New(h), h.line, release
	}
	b, log, _, started := begin(time.Hour)
	log.Info("one")
	log.With("part", "x").Info("two")
	log.Warn("three")
	if got := b.String(); got != "<4>level=WARN msg=three\n" {
		t.Errorf("before the end of the start: %q", got)
	}
	started()
	started()
	log.Info("four")
	want := "<4>level=WARN msg=three\n<6>level=INFO msg=one\n<6>level=INFO msg=two part=x\n<6>level=INFO msg=four\n"
	if got := b.String(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}

	b, log, _, _ = begin(time.Hour)
	for range heldLimit / 1000 {
		log.Info(strings.Repeat("x", 1000))
	}
	if b.Len() < heldLimit {
		t.Errorf("%d bytes are written of more than %d", b.Len(), heldLimit)
	}

	synctest.Test(t, func(t *testing.T) {
		b, log, l, _ := begin(startLimit)
		log.Info("slow")
		time.Sleep(startLimit)
		synctest.Wait()
		l.mu.Lock()
		defer l.mu.Unlock()
		if b.Len() == 0 {
			t.Error("a slow start writes nothing")
		}
	})
}
