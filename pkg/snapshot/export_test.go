package snapshot

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// TrapMount mounts what this package never does: two subvolumes of one btrfs
// in one overlay, with 100 files in the lower and 100 written into the upper.
func (s *Store) TrapMount(t *testing.T) (root string) {
	t.Helper()
	lower, upper := filepath.Join(s.poolDir, "lower"), filepath.Join(s.poolDir, "upper")
	for _, d := range []string{lower, upper} {
		if err := s.pool.Create(d, 0); err != nil {
			t.Fatal(err)
		}
	}
	root = filepath.Join(s.cfg.RunDir, "trap")
	for _, d := range []string{filepath.Join(lower, "l"), filepath.Join(lower, "l/srv"), filepath.Join(upper, "u"),
		filepath.Join(upper, "w"), root} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 100 {
		if err := os.WriteFile(filepath.Join(lower, "l/srv", "lower-"+strconv.Itoa(i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	o := overlay{source: "sandboxd-trap", target: root, disk: upper, lowers: []string{filepath.Join(lower, "l")},
		userns: int(s.cfg.IdentityUserNS.Fd()), later: s.bg.Go, private: root + "-clones"}
	mount := o.mountDetached
	if s.attached {
		mount = o.mountAttached
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

// ProbeAsLinux61 is Probe on a kernel that wants attached clones.
func ProbeAsLinux61(dir string, users *os.File) (how string, err error) {
	return probe(dir, users, func(*overlay) error { return errors.New("as before Linux 6.15") })
}
