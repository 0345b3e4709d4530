package pidfd

import (
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

func TestEnded(t *testing.T) {
	for script, want := range map[string]string{
		"exec sleep 1000": "killed by SIGTERM",
		"read x; exit 3":  "exited with code 3",
		"read x; exit 0":  "exited with code 0",
	} {
		cmd := exec.Command("sh", "-c", script)
		in, err := cmd.StdinPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		p, err := Open(cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := p.Ended(0); ok {
			t.Errorf("%s lives, and %s", script, got)
		}
		if want == "killed by SIGTERM" {
			err = cmd.Process.Signal(syscall.SIGTERM)
		} else {
			_, err = in.Write([]byte("x\n"))
		}
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := p.Ended(10 * time.Second); !ok || got.String() != want {
			t.Errorf("%s, not reaped yet: %q, %v, want %q", script, got, ok, want)
		}
		cmd.Wait() //nolint:errcheck // how it ended is what p says
		known := hosttest.Kernel(t, 6, 15)
		if got, ok := p.Ended(0); ok != known || ok && got.String() != want {
			t.Errorf("%s, reaped: %q, %v, want %q, %v", script, got, ok, want, known)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := Open(1 << 22); err == nil {
		t.Error("a process that cannot be was opened")
	}
}
