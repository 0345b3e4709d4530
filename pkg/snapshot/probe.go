package snapshot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// Probe mounts a small overlay of idmapped clones, as every sandbox stands on
// one, in a directory of its own below dir, and takes both away. It says which
// of the two ways this kernel knows. users is as Config.IdentityUserNS.
func Probe(dir string, users *os.File) (how string, err error) {
	return probe(dir, users, (*overlay).mountDetached)
}

func probe(dir string, users *os.File, detached func(*overlay) error) (how string, err error) {
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
	// The target is not on the disk: where mounts are shared (systemd makes / so),
	// the disk's clone would get the overlay too, and take it along when it goes.
	o := overlay{
		source: "sandboxd-probe", volatile: true, // or its end would sync all that anybody has on that disk
		disk: filepath.Join(tmp, "d"), lowers: []string{filepath.Join(tmp, "l")}, userns: int(users.Fd()),
		target: filepath.Join(tmp, "m"), private: filepath.Join(tmp, clonesDir), later: func(f func()) { f() },
	}
	if err = detached(&o); err == nil {
		how = "detached clones"
	} else if old := o.mountAttached(); old == nil {
		how, err = "attached clones", nil
	} else {
		return "", fmt.Errorf("try an overlay of idmapped clones on the file system of %s: %w; and as kernels before 6.15 want it: %w",
			dir, err, old)
	}
	if err := unix.Unmount(o.target, unix.UMOUNT_NOFOLLOW); err != nil {
		return "", fmt.Errorf("unmount %s: %w", o.target, err)
	}
	return how, nil
}
