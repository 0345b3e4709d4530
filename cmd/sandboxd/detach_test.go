package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestDetachHangs: a caller that waits for a daemon that is never ready can kill it by its pid file. The file then
// names the daemon that it named before, or is gone.
func TestDetachHangs(t *testing.T) {
	for _, before := range []string{"", "4711\n"} {
		t.Run(strings.TrimSpace("before="+before), func(t *testing.T) { detachHangs(t, before) })
	}
}

func detachHangs(t *testing.T, before string) {
	pidFile := filepath.Join(t.TempDir(), "pid")
	if before != "" {
		if err := os.WriteFile(pidFile, []byte(before), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	ended := make(chan error, 1)
	go func() { ended <- detached{pidFile: pidFile}.start("") }()
	var pid int
	for tick := time.NewTicker(time.Millisecond); pid == 0; {
		select {
		case err := <-ended:
			t.Fatal("it has ended:", err)
		case <-tick.C:
			text, _ := os.ReadFile(pidFile) // nothing yet
			if string(text) == before {
				continue
			}
			pid, _ = strconv.Atoi(strings.TrimSpace(string(text)))
		}
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "ended before it was ready (signal: terminated)") {
		t.Error(err)
	}
	switch text, err := os.ReadFile(pidFile); {
	case before == "" && !errors.Is(err, fs.ErrNotExist):
		t.Errorf("the pid file stays: %q, %v", text, err)
	case before != "" && string(text) != before:
		t.Errorf("the pid file has %q, %v; before: %q", text, err, before)
	}
}
