package e2e_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
)

// TestTmpIsOnTheDisk: what a guest writes to /tmp counts against its disk and
// is in its snapshots, on gVisor too, which would put a tmpfs there.
func TestTmpIsOnTheDisk(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, rt := range runtimes {
		t.Run(rt, func(t *testing.T) {
			id := h.create(t, spec(rt)).ID
			out, err := h.exec(t.Context(), id, "sh", "-c", "echo kept >/tmp/probe && stat -c %a /tmp /tmp/.X11-unix")
			if err != nil || out != "1777\n1777\n" {
				t.Errorf("%q, %v", out, err)
			}
			if b, err := os.ReadFile(filepath.Join(h.StateDir, "pool", id, "u/tmp/probe")); err != nil || string(b) != "kept\n" {
				t.Errorf("in the upper: %q, %v", b, err)
			}
		})
	}
}
