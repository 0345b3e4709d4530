package cgroups

import (
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
	if left, _ := filepath.Glob("/sys/fs/cgroup/sandboxd-probe-*"); len(left) > 0 {
		t.Errorf("left %v", left)
	}
	if left, _ := filepath.Glob("/sys/fs/cgroup/*/sandboxd-probe-*"); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}
