package files

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var incrementBytes = flag.Int64("bytes", 128<<20, "of data in TestIncrement")

// A body is files of random bytes, of which regions are changed.
type body struct {
	dir   string
	r     *rand.ChaCha8
	rand  *rand.Rand
	files []string
	sizes []int64
}

// newBody makes files: a half of the bytes in eight large ones, the rest in ones of 4 KiB to 16 MiB.
func newBody(t *testing.T, bytes int64) *body {
	t.Helper()
	b := &body{dir: t.TempDir(), r: rand.NewChaCha8([32]byte{1})}
	b.rand = rand.New(b.r)
	for left := bytes; left > 0; {
		size := bytes / 16
		if len(b.files) >= 8 {
			size = b.size(4<<10, min(16<<20, bytes/32))
		}
		size = min(size, left)
		left -= size
		name := filepath.Join(b.dir, fmt.Sprintf("d%d", len(b.files)%50), fmt.Sprint(len(b.files)))
		must(t, os.MkdirAll(filepath.Dir(name), 0o755))
		f, err := os.Create(name)
		must(t, err)
		must(t, b.fill(f, 0, size), f.Close())
		b.files, b.sizes = append(b.files, name), append(b.sizes, size)
	}
	return b
}

// size draws a size, evenly on a logarithmic scale.
func (b *body) size(low, high int64) int64 {
	return int64(float64(low) * math.Pow(float64(high)/float64(low), b.rand.Float64()))
}

func (b *body) fill(f *os.File, off, n int64) error {
	buf := make([]byte, 1<<20)
	for n > 0 {
		part := buf[:min(n, int64(len(buf)))]
		b.r.Read(part) //nolint:errcheck // it never fails
		if _, err := f.WriteAt(part, off); err != nil {
			return err
		}
		off, n = off+int64(len(part)), n-int64(len(part))
	}
	return nil
}

// change overwrites so many bytes, in regions of low to high bytes at random places.
func (b *body) change(t *testing.T, bytes, low, high int64) (regions int) {
	t.Helper()
	var all int64
	for _, s := range b.sizes {
		all += s
	}
	for ; bytes > 0; regions++ {
		at, i := b.rand.Int64N(all), 0
		for at >= b.sizes[i] {
			at -= b.sizes[i]
			i++
		}
		n := min(b.size(low, high), b.sizes[i]-at, bytes)
		f, err := os.OpenFile(b.files[i], os.O_WRONLY, 0)
		must(t, err)
		must(t, b.fill(f, at, n), f.Close())
		bytes -= n
	}
	return regions
}

// peak is the most memory that this process had since the last call, in MiB.
func peak(t *testing.T) (mib int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	must(t, err)
	for line := range strings.Lines(string(text)) {
		fmt.Sscanf(line, "VmHWM: %d kB", &mib) //nolint:errcheck // other lines
	}
	must(t, os.WriteFile("/proc/self/clear_refs", []byte("5"), 0o600))
	return mib >> 10
}

// cpu is the CPU time that this process has taken: a host that does other work does not change it much.
func cpu(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	must(t, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestIncrement is the benchmark backup_10GB at a smaller size: what a backup sends after 1 % of the
// data has changed. At its size: -run TestIncrement -v -bytes 10737418240. It takes twice that of
// $TMPDIR.
func TestIncrement(t *testing.T) {
	b, s := newBody(t, *incrementBytes), newStore(t)
	var full int64
	for _, c := range []struct {
		what      string
		low, high int64 // of regions; 0: nothing changes
		limit     float64
	}{
		{"full", 0, 0, 1.01},
		{"nothing changed", 0, 0, 0.001},
		{"1 % in regions of 4 KiB to 1 MiB", 4 << 10, 1 << 20, 0.05},
		{"1 % in regions of 4 KiB", 4 << 10, 4 << 10, 1}, // no goal: each costs a chunk of 192 KiB
	} {
		regions := 0
		if c.low > 0 {
			regions = b.change(t, *incrementBytes/100, c.low, c.high)
		}
		peak(t)
		began, used := time.Now(), cpu(t)
		_, catalog, stats := save(t, s, b.dir)
		took := time.Since(began)
		text, err := json.Marshal(catalog)
		must(t, err)
		sent := stats.Sent + int64(len(text))
		if full == 0 {
			full = sent
		}
		part := float64(sent) / float64(full)
		t.Logf("%s: %d regions, %d bytes sent in %d packs, %.4f of the full one, %d chunks, %d new, %v (CPU %v), %d MiB", c.what,
			regions, sent, stats.Packs, part, stats.Chunks, stats.NewChunks,
			took.Round(time.Millisecond), (cpu(t) - used).Round(time.Millisecond), peak(t))
		if part > c.limit {
			t.Errorf("%s: %.4f of a full one is sent, want at most %.4f", c.what, part, c.limit)
		}
	}
}
