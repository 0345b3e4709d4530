package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestDetachHangs: whoever waits for a daemon that is never ready can end it by its pid file.
func TestDetachHangs(t *testing.T) {
	pidFile := filepath.Join(t.TempDir(), "pid")
	ended := make(chan error, 1)
	go func() { ended <- detached{pidFile: pidFile}.start("") }()
	var pid int
	for tick := time.NewTicker(time.Millisecond); pid == 0; {
		select {
		case err := <-ended:
			t.Fatal("it has ended:", err)
		case <-tick.C:
			text, _ := os.ReadFile(pidFile) // nothing yet
			pid, _ = strconv.Atoi(strings.TrimSpace(string(text)))
		}
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "ended before it was ready (signal: terminated)") {
		t.Error(err)
	}
}
