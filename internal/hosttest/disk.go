package hosttest

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// SmallDisk mounts a tmpfs at a directory of its own until t ends. options are those
// of tmpfs(5), such as "size=64k". Preconditions: t has called Root.
func SmallDisk(t testing.TB, options string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Fatalf("mount a tmpfs (%s) at %s: %v", options, dir, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount the tmpfs at %s: %v", dir, err)
		}
	})
	return dir
}

// FillDisk writes to a file named ballast in dir until its file system has no block left.
// free removes the file.
func FillDisk(t testing.TB, dir string) (free func()) {
	t.Helper()
	ballast := filepath.Join(dir, "ballast")
	f, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	if err := errors.Join(err, f.Close()); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill the disk of %s: %v", dir, err)
	}
	return func() {
		t.Helper()
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
	}
}
