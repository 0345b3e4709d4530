package overlay_test

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/snapshot/overlay"
	"github.com/sandboxd/sandboxd/pkg/snapshot/snapshottest"
)

// TestProbe works on a disk, and says what is wrong with a file system that
// cannot hold an upper.
func TestProbe(t *testing.T) {
	hosttest.Root(t)
	users, err := snapshottest.UserNS(0)
	if err != nil {
		t.Fatal(err)
	}
	defer users.Close()
	dir := t.TempDir()
	how, err := overlay.Probe(dir, users)
	if err != nil || !strings.Contains(how, "clones") {
		t.Errorf("%q, %v", how, err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
	if err := unix.Mount("ramfs", dir, "ramfs", 0, ""); err != nil { // knows no idmapped mounts
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	if how, err := overlay.Probe(dir, users); err == nil || !strings.Contains(err.Error(), "idmap") {
		t.Errorf("on ramfs: %q, %v", how, err)
	}
}

// TestProbeWhereMountsAreShared, as systemd has them: what is mounted at a place
// is mounted in every clone of it, and unmounted with it.
func TestProbeWhereMountsAreShared(t *testing.T) {
	hosttest.Root(t)
	users, err := snapshottest.UserNS(0)
	if err != nil {
		t.Fatal(err)
	}
	defer users.Close()
	dir := t.TempDir()
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	if err := unix.Mount("", dir, "", unix.MS_SHARED, ""); err != nil {
		t.Fatal(err)
	}
	for want, probe := range map[string]func(string, *os.File) (string, error){
		"detached clones": overlay.Probe,
		"attached clones": overlay.ProbeAsLinux61,
	} {
		if how, err := probe(dir, users); err != nil || how != want {
			t.Errorf("%q, %v; want %s", how, err, want)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}
