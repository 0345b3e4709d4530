package proc

import (
	"os"
	"testing"
)

func TestReserveThreads(t *testing.T) {
	for range 3 { // again: none is made twice
		ReserveThreads()
		have, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		if n := len(have); n < threads || n > threads+4 {
			t.Errorf("%d threads, want %d, and a few that the runtime makes meanwhile", n, threads)
		}
	}
}
