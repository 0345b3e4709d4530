package daemontest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestLog: what a daemon wrote before it said something is in its log when that is heard, over
// restarts.
func TestLog(t *testing.T) {
	program := filepath.Join(t.TempDir(), "daemon")
	const script = `#!/bin/sh
echo out; echo err >&2; echo READY=1 >&3; exec 3>&-; exec sleep 1000
`
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	d := &Daemon{t: t, program: program, log: memory(t, "log")}
	for i := range 50 {
		d.Start()
		if got, want := d.Log(), strings.Repeat("out\nerr\n", i+1); got != want {
			t.Fatalf("after %d starts the log is %q", i+1, got)
		}
		d.Kill()
	}
}
