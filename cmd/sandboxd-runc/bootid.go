package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/oci"
)

// takeBootID takes the mount over the boot ID out of spec, for which libcontainer would
// refuse the whole spec, and returns its source, or nothing if there is none.
func takeBootID(spec *specs.Spec) (file string) {
	spec.Mounts = slices.DeleteFunc(spec.Mounts, func(m specs.Mount) bool {
		if m.Destination != oci.BootIDPath {
			return false
		}
		file = m.Source
		return true
	})
	return file
}

// mountBootID mounts file, read-only, over the boot ID that the container of pid sees.
// All its other mounts are made, and no guest has run in it.
func mountBootID(pid int, file string) error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, file, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return &os.PathError{Op: "open_tree", Path: file, Err: err}
	}
	defer unix.Close(fd) //nolint:errcheck // nothing is written
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC,
		Propagation: unix.MS_PRIVATE,
	}); err != nil {
		return &os.PathError{Op: "mount_setattr", Path: file, Err: err}
	}
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return err
	}
	defer ns.Close() //nolint:errcheck // only entered
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and leaves the namespace
		done <- attachIn(int(ns.Fd()), fd, oci.BootIDPath)
	}()
	return <-done
}

// attachIn moves the calling thread into a mount namespace, and attaches a mount there.
func attachIn(ns, mount int, target string) error {
	// setns(2) refuses a thread that shares its root and working directory with others.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Setns(ns, unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("setns", err)
	}
	err := unix.MoveMount(mount, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
	if err != nil && !errors.Is(err, unix.ENOENT) { // ENOENT: a kernel without sysctls
		return &os.PathError{Op: "move_mount", Path: target, Err: err}
	}
	return nil
}
