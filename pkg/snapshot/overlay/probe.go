package overlay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// Probe mounts a small overlay of idmapped clones in a directory of its own below
// dir, and takes both away. It says, for people, which of the two ways this kernel
// knows. users is a user namespace that maps 0..65535 to itself.
func Probe(dir string, users *os.File) (how string, err error) {
	return probe(dir, users, (*Mount).Detached)
}

func probe(dir string, users *os.File, detached func(*Mount) error) (how string, err error) {
	tmp, err := os.MkdirTemp(dir, "sandboxd-probe-")
	if err != nil {
		return "", fmt.Errorf("try an overlay: %w", err)
	}
	defer func() { err = errors.Join(err, tree.Remove(tmp)) }()
	for _, d := range []string{"d/u", "d/w", "l", "m"} {
		if err := os.MkdirAll(filepath.Join(tmp, d), 0o700); err != nil {
			return "", fmt.Errorf("try an overlay: %w", err)
		}
	}
	// The target is not on the disk: where mounts are shared (systemd makes / shared),
	// the overlay would appear in the clone of the disk too, and go with it.
	o := Mount{
		Source: "sandboxd-probe", Volatile: true, // or its end would sync the whole disk
		Disk: filepath.Join(tmp, "d"), Lowers: []string{filepath.Join(tmp, "l")}, UserNS: int(users.Fd()),
		Target: filepath.Join(tmp, "m"), Private: filepath.Join(tmp, "clones"), Later: func(f func()) { f() },
	}
	if err = newAPI(); err == nil {
		err = detached(&o)
	}
	if err == nil {
		how = "detached clones"
	} else if old := o.Attached(); old == nil {
		how, err = "attached clones", nil
	} else {
		return "", fmt.Errorf("try an overlay of idmapped clones on the file system of %s: %w; and with attached clones, as for kernels "+
			"before 6.15: %w", dir, err, old)
	}
	if err := unix.Unmount(o.Target, unix.UMOUNT_NOFOLLOW); err != nil {
		return "", fmt.Errorf("unmount %s: %w", o.Target, err)
	}
	return how, nil
}

// newAPI fails if overlayfs does not have the new mount API, which it has since Linux 6.5. An older kernel takes any
// option, refuses those that it does not know when the mount is made, and writes an error into its log: at each start
// of a daemon, an operator would read one that means nothing.
func newAPI() error {
	fsfd, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("fsopen overlay: %w", err)
	}
	defer unix.Close(fsfd)
	if unix.FsconfigSetFlag(fsfd, "sandboxd-no-such-option") == nil {
		return fmt.Errorf("overlayfs does not have the new mount API: %w", errors.ErrUnsupported)
	}
	return nil
}

// DetachedWorks tries whether [Mount.Detached] works on this kernel: it does since
// Linux 6.15, which has no other way to ask. dir is an empty directory where layers
// are; users and later are as in Mount.
func DetachedWorks(dir string, users *os.File, later func(func())) bool {
	if newAPI() != nil {
		return false
	}
	for _, d := range []string{"u", "w", "l"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			return false
		}
	}
	// Volatile, or its end would sync the whole disk.
	o := Mount{
		Source: "sandboxd-probe", Volatile: true, Disk: dir, Lowers: []string{filepath.Join(dir, "l")},
		UserNS: int(users.Fd()), Later: later,
	}
	fsfd, err := o.configure()
	if err != nil {
		return false
	}
	return unix.Close(fsfd) == nil
}
