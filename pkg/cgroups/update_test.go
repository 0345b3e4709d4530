package cgroups

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// diskOf is the whole disk that dir is on.
func diskOf(t *testing.T, dir string) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	dev := fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	sys, err := filepath.EvalSymlinks("/sys/dev/block/" + dev)
	if err != nil {
		t.Fatalf("the tests lie on no disk (%v): run them from one", err)
	}
	if b, err := os.ReadFile(filepath.Join(filepath.Dir(sys), "dev")); err == nil {
		dev = strings.TrimSpace(string(b))
	}
	return dev
}

// testUpdate: limits go up and down under a living process, and hold.
func testUpdate(t *testing.T, e *env) {
	id := e.create(Limits{MemoryBytes: 64 << 20, Pids: 10})
	e.sh(id, "exec sleep 1000")
	for _, l := range []Limits{
		{MemoryBytes: 256 << 20, Pids: 30},
		{MemoryBytes: 1 << 20, Pids: 25, KeepMemory: true},
		{MemoryBytes: 128 << 20, HeadroomBytes: 32 << 20, Pids: 20},
		{},
		{MemoryBytes: 32 << 20, Pids: 5},
	} {
		e.must(e.Limit(e.ctx, id, l))
		e.must(e.Limit(e.ctx, id, l))
		if l.KeepMemory {
			l.MemoryBytes = 256 << 20 // of the one before
		}
		for _, c := range needed {
			for _, dir := range []string{e.dir(e.layout.of[c], id), e.leafIn(e.layout.of[c], id)} {
				for _, w := range l.writes(c, e.flavours[c]) {
					got, err := readFile(dir + "/" + w.file)
					e.must(err)
					if got = strings.TrimSpace(got); got != w.value && !(w.value == "-1" && len(got) >= 19) {
						t.Errorf("%+v: %s/%s is %s, want %s", l, dir, w.file, got, w.value)
					}
				}
			}
		}
	}
	if out := e.output(id, hog(64)); strings.Contains(out, "held") {
		t.Errorf("above the last limit: %s", out)
	}
	before, err := e.PidsRefused(id)
	e.must(err)
	e.output(id, "for i in 1 2 3 4 5 6 7 8 9; do sleep 1000 >/dev/null 2>&1 & done")
	if n, err := e.PidsRefused(id); n <= before || err != nil {
		t.Errorf("%d tasks were refused before, %d after, %v", before, n, err)
	}
	if err := e.Limit(e.ctx, "gaaaaaaaaaa2", Limits{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("limits of nobody: %v", err)
	}
	if n, err := e.PidsRefused("gaaaaaaaaaa2"); n != 0 || err != nil {
		t.Errorf("refused to nobody: %d, %v", n, err)
	}
	if n, err := e.MemoryHeld("gaaaaaaaaaa2"); n != 0 || err != nil {
		t.Errorf("held by nobody: %d, %v", n, err)
	}
}

// testBelowUse: what is held is known, page cache left out, and v1 refuses less.
func testBelowUse(t *testing.T, e *env) {
	id := e.create(Limits{MemoryBytes: 256 << 20})
	dir := t.TempDir()
	// 32 MiB of page cache, and 64 MiB that stay.
	e.sh(id, fmt.Sprintf("head -c %d /dev/zero >%s/file; x=$(head -c %d /dev/zero | tr '\\0' x); echo >%s/held; sleep 1000 & wait", 32<<20,
		dir, 64<<20, dir))
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) { // a file of the test's, looked at from outside
		if _, err := os.Stat(dir + "/held"); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("it never held its memory")
		}
	}
	used, err := e.Usage(id)
	e.must(err)
	held, err := e.MemoryHeld(id)
	e.must(err)
	if held < 64<<20 || held > 200<<20 || held > int64(used.MemoryBytes) {
		t.Errorf("%d bytes are held, %d used", held, used.MemoryBytes)
	}
	if e.flavours["memory"].v2 {
		return // it would kill
	}
	if err := e.Limit(e.ctx, id, Limits{MemoryBytes: 32 << 20}); !errs.Is(err, errs.WrongState) {
		t.Errorf("half of what is held: %v", err)
	}
	e.must(e.Limit(e.ctx, id, Limits{MemoryBytes: 256 << 20}))
	if yes, err := e.Populated(id); !yes || err != nil {
		t.Errorf("after all that: populated %v, %v", yes, err)
	}
}

// testShares: of two that want all of one CPU, one gets four times as much.
func testShares(t *testing.T, e *env) {
	few, many := e.create(Limits{CPUShares: 256}), e.create(Limits{CPUShares: 1024})
	for _, id := range []string{few, many} {
		// On one CPU, whatever the host has: shares count where tasks meet.
		e.sh(id, "exec taskset -c 0 sh -c 'while :; do :; done'")
	}
	for _, id := range []string{few, many} {
		e.until("a loop that uses its CPU", func() bool { return e.usage(id).CPUMicros > 50_000 }) // taskset and sh have started
	}
	var c, d Usage
	a, b := e.usage(few), e.usage(many)
	e.until("a second and a half of CPU", func() bool {
		c, d = e.usage(few), e.usage(many)
		return c.CPUMicros+d.CPUMicros > a.CPUMicros+b.CPUMicros+1_500_000
	})
	ratio := float64(d.CPUMicros-b.CPUMicros) / float64(c.CPUMicros-a.CPUMicros)
	if ratio < 2.5 || ratio > 6 {
		t.Errorf("four times the shares got %.2f times the CPU", ratio)
	}
	t.Logf("1024 to 256 shares: %.2f times the CPU", ratio)
}

// testIO: direct I/O goes as fast as the limit, and faster when that is lifted.
func testIO(t *testing.T, e *env) {
	can, writeback := e.LimitsIO()
	if !can {
		t.Fatal("this host cannot limit I/O")
	}
	t.Logf("what the page cache writes back is limited: %v", writeback)
	dir, err := os.MkdirTemp(".", ".io-") // not /tmp, which may be memory; go and archtest pass it by
	e.must(err)
	defer os.RemoveAll(dir)
	path, err := filepath.Abs(dir + "/file")
	e.must(err)
	const limit, size = 8 << 20, 16 << 20
	id := e.create(Limits{IOReadBps: limit, IOWriteBps: limit})
	rate := func(dd string) float64 {
		start := time.Now()
		out := e.output(id, dd)
		took := time.Since(start)
		if !strings.Contains(out, "copied") {
			t.Fatalf("%s: %s", dd, out)
		}
		return size / took.Seconds()
	}
	write := fmt.Sprintf("dd if=/dev/zero of=%s bs=1M count=%d oflag=direct", path, size>>20)
	read := fmt.Sprintf("dd if=%s of=/dev/null bs=1M count=%d iflag=direct", path, size>>20)
	// best is the first of three that is enough, or the fastest: what others do on
	// the disk makes it slower, never faster. So how fast it is at least, is compared
	// with how fast it was within the smaller limit.
	best := func(dd string, enough float64) (r float64) {
		for range 3 {
			if r = max(r, rate(dd)); r > enough {
				break
			}
		}
		return r
	}
	within := map[string]float64{}
	for _, dd := range []string{write, read} {
		if within[dd] = best(dd, 0.7*limit); within[dd] > 1.3*limit {
			t.Errorf("%s: %.1f MiB/s with a limit of %d", dd, within[dd]/(1<<20), limit>>20)
		}
	}
	e.must(e.Limit(e.ctx, id, Limits{IOReadBps: 4 * limit}))
	if r := best(read, 1.5*limit); r > 1.3*4*limit || r < 1.3*within[read] {
		t.Errorf("four times the limit: %.1f MiB/s, after %.1f", r/(1<<20), within[read]/(1<<20))
	}
	e.must(e.Limit(e.ctx, id, Limits{}))
	if r := best(write, 2*limit); r < 1.3*within[write] {
		t.Errorf("without a limit: %.1f MiB/s, after %.1f", r/(1<<20), within[write]/(1<<20))
	}
	if e.hasIOLimits(id) {
		t.Error("limits are left")
	}
	e.must(e.Limit(e.ctx, id, Limits{IOReadIOPS: 40}))
	var took time.Duration
	for range 3 {
		start := time.Now()
		e.output(id, fmt.Sprintf("dd if=%s of=/dev/null bs=4k count=80 iflag=direct", path))
		if took = time.Since(start); took < 6*time.Second {
			break
		}
	}
	if took < time.Second || took > 6*time.Second {
		t.Errorf("80 reads at 40 a second took %v", took)
	}
}
