package tree

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A tree deeper than there are descriptors, or bytes in a path, goes too.
func TestRemoveDeepTree(t *testing.T) {
	top := filepath.Join(t.TempDir(), "top")
	if err := os.Mkdir(top, 0o755); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(top, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range 2500 {
		err := unix.Mkdirat(fd, "d", 0o755)
		if err == nil {
			err = unix.Symlinkat("/etc", fd, "l")
		}
		next, oerr := unix.Openat(fd, "d", unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil || oerr != nil {
			t.Fatal(err, oerr)
		}
		unix.Close(fd)
		fd = next
	}
	unix.Close(fd)
	if err := os.Mkdir(filepath.Join(top, ".lifted-1"), 0o755); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Remove(top); err != nil {
			t.Fatal(err)
		}
	}
	if ok, err := Exists(top); ok || err != nil {
		t.Errorf("still there (%v)", err)
	}
}
