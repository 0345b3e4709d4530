package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// TestHolder: a refused daemon learns which process has the file, also on a file system
// whose files have another device than its locks (overlayfs, btrfs).
func TestHolder(t *testing.T) {
	hosttest.Root(t)
	lower, upper, dir := hosttest.SmallDisk(t, "size=1m"), hosttest.SmallDisk(t, "size=32m"), t.TempDir()
	for _, d := range []string{"upper", "work"} {
		if err := os.Mkdir(filepath.Join(upper, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%[2]s/work,xino=off", lower, upper)
	if err := unix.Mount("overlay", dir, "overlay", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(dir, "sandboxd.db")
	db := openTest(t, path, Options{})
	defer closeTest(t, db)
	var fi, root unix.Stat_t
	if err := errors.Join(unix.Stat(path, &fi), unix.Stat(dir, &root)); err != nil || fi.Dev == root.Dev {
		t.Fatalf("a file here has the device of its file system, %x: the test shows nothing (%v)", fi.Dev, err)
	}
	if got, want := holder(path), fmt.Sprint("pid ", os.Getpid()); got != want {
		t.Errorf("the holder is %s, want %s", got, want)
	}
	if got := holder(lower); got != "pid unknown" {
		t.Errorf("the holder of what nobody locked: %s", got)
	}
}
