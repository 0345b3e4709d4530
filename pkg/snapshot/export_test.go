package snapshot

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/snapshot/overlay"
	"golang.org/x/sys/unix"
)

// TrapMount mounts what this package never does: two subvolumes of one btrfs
// in one overlay, with 100 files in the lower and 100 written into the upper.
func (s *Store) TrapMount(t *testing.T) (root string) {
	t.Helper()
	lower, upper := filepath.Join(s.Pool.dir, "lower"), filepath.Join(s.Pool.dir, "upper")
	for _, d := range []string{lower, upper} {
		if err := s.Pool.driver.Create(d, 0); err != nil {
			t.Fatal(err)
		}
	}
	root = filepath.Join(s.Mounts.runDir, "trap")
	for _, d := range []string{
		filepath.Join(lower, "l"), filepath.Join(lower, "l/srv"), filepath.Join(upper, "u"),
		filepath.Join(upper, "w"), root,
	} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 100 {
		if err := os.WriteFile(filepath.Join(lower, "l/srv", "lower-"+strconv.Itoa(i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	o := overlay.Mount{
		Source: "sandboxd-trap", Target: root, Disk: upper, Lowers: []string{filepath.Join(lower, "l")},
		UserNS: int(s.Mounts.users.identity.Fd()), Later: s.bg.Go, Private: root + "-clones",
	}
	mount := o.Detached
	if s.Mounts.attached {
		mount = o.Attached
	}
	if err := mount(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(root, 0); err != nil {
			t.Error(err)
		}
	})
	for i := range 100 {
		if err := os.WriteFile(filepath.Join(root, "srv", "new-"+strconv.Itoa(i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}
