package doctor

import (
	"errors"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/pressure"
)

// TestDiskPressure: a disk that fills is a warning, and one on which nothing new is made a failure.
func TestDiskPressure(t *testing.T) {
	for free, want := range map[int64]struct {
		status Status
		words  string
	}{
		10 << 30:  {OK, "calm: the pool has 10240 MiB of 20480 MiB free"},
		1 << 30:   {Warn, "collect: the pool has 1024 MiB of 20480 MiB free, less than 2048 MiB: sandboxd removes"},
		200 << 20: {Fail, "refuse: the pool has 200 MiB of 20480 MiB free, less than 256 MiB: nothing new is made"},
		0:         {Fail, "rest: "},
	} {
		spaces := []pressure.Space{
			{Title: "the disk", FreeBytes: 20 << 30, Bytes: 20 << 30}, {Title: "the pool", FreeBytes: free, Bytes: 20 << 30},
		}
		f := judge(spaces, 256<<20)
		if f.Status != want.status || !strings.Contains(f.Detail, want.words) || !strings.Contains(f.Detail, "calm: the disk has") ||
			(f.Mend == "") != (f.Status == OK) {
			t.Errorf("%d MiB free: %+v; want %v", free>>20, f, want)
		}
	}
	stuck := []pressure.Space{
		{Title: "the disk", FreeBytes: 20 << 30, Bytes: 20 << 30}, {Title: "the pool", Broken: errors.New("read-only")},
	}
	for _, reserve := range []int64{256 << 20, 0} {
		if f := judge(stuck, reserve); f.Status != Fail || !strings.HasPrefix(f.Detail, "failed: the pool takes no writes: read-only: ") {
			t.Errorf("a disk that takes no writes: %+v", f)
		}
	}
	if f := judge(nil, 0); f.Status != OK || !strings.Contains(f.Detail, "storage.reserve") {
		t.Errorf("without a reserve: %+v", f)
	}
	h := newTree(t, nil)
	h.cfg.StateDir = t.TempDir()
	f := find(t, "disk-pressure").ask(t.Context(), h)
	if strings.Contains(f.Detail, "pool") || !strings.Contains(f.Detail, "state directory") {
		t.Errorf("before the pool is mounted: %+v", f)
	}
}

// TestModulesGone: an upgrade of the kernel has removed the modules of the one that runs.
func TestModulesGone(t *testing.T) {
	files := map[string]string{"/proc/sys/kernel/osrelease": "6.1.0-40-amd64\n"}
	ask := func(want Status, words string) {
		t.Helper()
		if f := find(t, "kernel-modules").ask(t.Context(), newTree(t, files)); f.Status != want || !strings.Contains(f.Detail, words) {
			t.Errorf("%+v; want %v, %q", f, want, words)
		}
	}
	ask(OK, "no modules")
	files["/proc/modules"] = "overlay 151552 0 - Live 0x0000000000000000\n"
	ask(Warn, "/lib/modules/6.1.0-40-amd64 does not exist")
	files["/lib/modules/6.1.0-40-amd64/modules.dep"] = ""
	ask(OK, "is there")
}
