package doctor

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/btrfs"
)

// TestReadiness: of a file of which a quarter was written once, a quarter is ready. A file
// system that does not tell (tmpfs has no FIEMAP) leaves the doctor without a word.
func TestReadiness(t *testing.T) {
	const size = 4 << 20
	image := filepath.Join(t.TempDir(), "pool.img")
	f, err := os.Create(image)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	err = unix.Fallocate(int(f.Fd()), 0, 0, size)
	if errors.Is(err, unix.EOPNOTSUPP) { // then the rest is a hole, which is as unwritten
		err = f.Truncate(size)
	}
	if err != nil {
		t.Fatalf("make %s of %d bytes: %v", image, size, err)
	}
	if _, err := f.Write(make([]byte, size/4)); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil { // until then its blocks are as unwritten as the others
		t.Fatal(err)
	}
	want := ", 25 % ready (the first write to the rest is slow; the daemon writes to free blocks in the background)"
	if _, _, err := btrfs.Written(image); errors.Is(err, errors.ErrUnsupported) {
		want = ""
	}
	if got := readiness(pool.BtrfsLoop, image); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := readiness(pool.Plain, image); got != "" {
		t.Errorf("of a pool that is no file: %q", got)
	}
}
