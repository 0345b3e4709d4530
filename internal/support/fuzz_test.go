package support

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
)

// FuzzLog: whatever clients and guests have the daemon log, a bundle has lines that are
// whole, and of an operation no value that is not the daemon's own.
func FuzzLog(f *testing.F) {
	f.Add("lab", "start \"PLANTED \\\"x\": no\nlevel=ERROR msg=operation")
	f.Add("msg=operation level=ERROR", "=\x00\xff\u2028")
	f.Fuzz(func(t *testing.T, sandbox, said string) {
		const secret = "PLANTED"
		sandbox, said = strings.ReplaceAll(sandbox, secret, ""), strings.ReplaceAll(said, secret, "")
		var b bytes.Buffer
		log := slog.New(slog.NewTextHandler(&b, &slog.HandlerOptions{Level: slog.LevelDebug}))
		for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelError} {
			for _, msg := range []string{"operation", "request", said} {
				log.Log(context.Background(), level, msg, "op", "exec", "sandbox", secret+sandbox, "outcome", "invalid",
					"image", sandbox+secret, "err", said+secret+said, "request", said+secret)
			}
		}
		if n := strings.Count(b.String(), "\n"); n != 9 {
			t.Fatalf("slog writes %d lines", n)
		}
		for line := range strings.Lines(b.String()) {
			fields, ok := parseFields(strings.TrimSuffix(line, "\n"))
			if !ok || len(fields) < 9 || fields[5].value != secret+sandbox && fields[4].value != secret+sandbox {
				t.Fatalf("%q is read as %q", line, fields)
			}
		}
		for _, text := range []string{b.String(), said + "\n" + b.String()[:b.Len()/2] + said} {
			if got := string(openLog([]byte(text))); strings.Contains(got, secret) {
				t.Fatalf("%q is in\n%s", secret, got)
			}
		}
	})
}
