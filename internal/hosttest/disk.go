package hosttest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
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
	if err := Fill(dir); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := os.Remove(filepath.Join(dir, "ballast")); err != nil {
			t.Fatal(err)
		}
	}
}

// Fill does so in a process that is no test.
func Fill(dir string) error {
	f, err := os.Create(filepath.Join(dir, "ballast"))
	if err != nil {
		return err
	}
	for _, size := range []int{4096, 512} { // the second for a file system of smaller blocks
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
	}
	if err := errors.Join(err, f.Sync(), f.Close()); !errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("fill the disk of %s: %w", dir, err)
	}
	return nil
}

// A Disk is an ext4 in a file, which becomes read-only after an error, as Debian mounts its root.
type Disk struct {
	Dir string // where it is mounted

	t     testing.TB
	image string
}

// NewDisk mounts a new Disk of so many bytes until t ends. Blocks that nobody writes to take no room.
// Preconditions: t has called Root.
func NewDisk(t testing.TB, bytes int64) *Disk {
	t.Helper()
	dir := t.TempDir()
	d := &Disk{Dir: filepath.Join(dir, "mnt"), t: t, image: filepath.Join(dir, "image")}
	if err := errors.Join(os.WriteFile(d.image, nil, 0o600), os.Truncate(d.image, bytes), os.Mkdir(d.Dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	d.run("mkfs.ext4", "-q", "-m", "0", d.image)
	d.mount()
	t.Cleanup(d.unmount)
	return d
}

func (d *Disk) run(argv ...string) {
	d.t.Helper()
	if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
		d.t.Errorf("%v: %v: %s", argv, err, out)
	}
}

func (d *Disk) mount() {
	d.t.Helper()
	d.run("mount", "-o", "loop,errors=remount-ro", d.image, d.Dir)
}

func (d *Disk) unmount() {
	d.t.Helper()
	d.run("umount", d.Dir)
}

// Left returns a file that is the disk as a power cut would leave it now.
func (d *Disk) Left() (image string) {
	d.t.Helper()
	image = filepath.Join(d.t.TempDir(), "image")
	d.run("cp", "--sparse=always", d.image, image)
	return image
}

// Put replaces the disk by a copy of an image. Nothing may use it.
func (d *Disk) Put(image string) {
	d.t.Helper()
	d.unmount()
	d.run("cp", "--sparse=always", image, d.image)
	d.mount()
}

// Break makes the file system fail as after an I/O error: from now on it takes no writes.
func (d *Disk) Break() {
	d.t.Helper()
	var st unix.Stat_t
	err := unix.Stat(d.Dir, &st)
	dev, lerr := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
	err = errors.Join(err, lerr, os.WriteFile(filepath.Join("/sys/fs/ext4", filepath.Base(dev), "trigger_fs_error"), []byte("1"), 0))
	if err != nil {
		d.t.Fatal(err)
	}
}

// Repair does what a boot does: it checks the file system, and mounts it anew. Nothing may use it.
func (d *Disk) Repair() {
	d.t.Helper()
	d.unmount()
	// e2fsck(8): 1 is that it has corrected errors.
	err := exec.Command("e2fsck", "-fy", d.image).Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && (!ok || exit.ExitCode() > 1) {
		d.t.Errorf("check the file system: %v", err)
	}
	d.mount()
}
