package proc

import (
	"os/exec"
	"slices"
	"testing"
)

// TestKillAllLooksTwice: what one search has missed, the next one finds.
func TestKillAllLooksTwice(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	left := [][]int{{}, {cmd.Process.Pid}, {}, {}}
	KillAll(func() []int {
		found := left[0]
		left = slices.Delete(left, 0, 1)
		return found
	})
	if err := <-ended; err == nil || err.Error() != "signal: killed" || len(left) > 0 {
		t.Errorf("it has ended: %v; searches left: %v", err, left)
	}
}
