package doctor

import (
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
