package cgroups

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

func TestProbe(t *testing.T) {
	hosttest.Root(t)
	mode, _, err := Probe()
	if err != nil || mode == "" {
		t.Errorf("%q, %v", mode, err)
	}
	name := fmt.Sprintf("sandboxd-probe-%d-*", os.Getpid()) // other processes have their own
	if left, _ := filepath.Glob("/sys/fs/cgroup/" + name); len(left) > 0 {
		t.Errorf("left %v", left)
	}
	if left, _ := filepath.Glob("/sys/fs/cgroup/*/" + name); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}
