package support

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
)

// TestLog has a daemon say all kinds of things about requests with PLANTED in
// them, of which no record is kept.
func TestLog(t *testing.T) {
	var b bytes.Buffer
	log := slog.New(slog.NewTextHandler(&b, &slog.HandlerOptions{Level: slog.LevelDebug}))
	say := func(level slog.Level, msg string, args ...any) { log.Log(context.Background(), level, msg, args...) }
	say(slog.LevelDebug, "request", "method", "PLANTED", "route", "/sandboxes", "status", 400, "err", `name "PLANTED": want letters`)
	say(slog.LevelInfo, "denied", "sandbox", "aabcdefghijk", "proto", "tcp", "dst", "192.0.2.77:80", "rule", "PLANTED")
	say(slog.LevelDebug, "dns", "sandbox", "aabcdefghijk", "name", "PLANTED.example.")
	say(slog.LevelInfo, "operation", "op", "exec", "sandbox", "aabcdefghijk", "image", "PLANTED:latest", "outcome", "ok", "status", 200,
		"request", "0123456789abcdef0123456789abcdef", "actor", "uid=0 pid=7")
	say(slog.LevelInfo, "operation", "op", "exec", "sandbox", "PLANTED", "outcome", "not_found", "status", 404,
		"request", "PLANTED-by-client", "err", "no sandbox PLANTED")
	say(slog.LevelError, "operation", "op", "create", "sandbox", "aabcdefghijk", "step_rootfs", "4ms", "outcome", "invalid", "err",
		`env PLANTED=x: rule PLANTED: 192.0.2.77`)
	say(slog.LevelError, "operation", "op", "create", "outcome", "internal", "err",
		`mount /var/lib/x: device busy: start "PLANTED \"x\" y": entry "a\\PLANTED\\\"b", no`)
	say(slog.LevelWarn, "a thing waits", "unheard_of", "PLANTED", "count", 3, "err", "it is\nbroken")
	say(slog.LevelError, "panic in a handler", "panic", "PLANTED", "stack", "goroutine 1 [running]:\nmain.main()\n\t/src/main.go:7 +0x1")
	b.WriteString("level=ERROR msg=cut err=\"PLANTED\n")
	b.WriteString("PLANTED words of somebody\nlevel=ERROR PLANTED\ntime=\"2026\" level=error msg=PLANTED\n")
	b.WriteString("panic: PLANTED\ngoroutine 7 [running]:\nmain.main(0x1)\n\t/src/crash.go:8 +0x1\n")
	in := "2026-11-21T20:00:00+0000 host sandboxd[7]: " + strings.ReplaceAll(strings.TrimSuffix(b.String(), "\n"),
		"\n", "\n2026-11-21T20:00:00+0000 host sandboxd[7]: ") +
		"\n2026-11-21T20:00:01+0000 host systemd[1]: sandboxd.service: Main process exited, code=killed, status=9/KILL\n"
	for name, text := range map[string]string{"of the journal": in, "of a file": b.String()} {
		got := string(openLog([]byte(text)))
		for _, bad := range []string{"PLANTED", "192.0.2.77", "msg=request", "msg=denied", "msg=dns", "somebody"} {
			if strings.Contains(got, bad) {
				t.Errorf("%s: %q is in\n%s", name, bad, got)
			}
		}
		for _, want := range []string{
			"level=INFO msg=operation op=exec sandbox=aabcdefghijk image=[redacted] outcome=ok status=200 " +
				"request=0123456789abcdef0123456789abcdef actor=\"uid=0 pid=7\"\n",
			"op=exec sandbox=[redacted] outcome=not_found status=404 request=[redacted] err=[redacted]\n",
			"op=create sandbox=aabcdefghijk step_rootfs=4ms outcome=invalid err=[redacted]\n",
			`err="mount /var/lib/x: device busy: start \"[redacted]\": entry \"[redacted]\", no"` + "\n",
			`msg="a thing waits" unheard_of=[redacted] count=3 err="it is\nbroken"` + "\n",
			`panic=[redacted] stack="goroutine 1 [running]:\nmain.main()\n\t/src/main.go:7 +0x1"` + "\n",
			"goroutine 7 [running]:\n", "/src/crash.go:8 +0x1\n",
		} {
			if !strings.Contains(got, want) {
				t.Errorf("%s: no %q in\n%s", name, want, got)
			}
		}
	}
	if got := string(openLog([]byte(in))); !strings.Contains(got, "Main process exited") ||
		!strings.Contains(got, "host sandboxd[7]: time=") {
		t.Errorf("the journal's words are not kept:\n%s", got)
	}
}
