package appliance

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// workName is how directories of installations are called. A star stands for a random part.
const workName = "sandboxd-install.*"

// newWork makes the private directory of an installation in parent, and removes those of
// installations that a power cut ended: nobody holds the lock of one. The lock of the new one is
// held until remove is called.
func newWork(parent string) (dir string, remove func() error, err error) {
	if err := sweep(parent); err != nil {
		return "", nil, fmt.Errorf("remove what an interrupted installation has left: %w", err)
	}
	for {
		if dir, err = os.MkdirTemp(parent, workName); err != nil {
			return "", nil, err
		}
		held, err := lock(dir)
		if err == nil {
			return dir, func() error { return errors.Join(os.RemoveAll(dir), held.Close()) }, nil
		}
		// Another installation took it for one without an owner, and removes it.
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, os.ErrNotExist) {
			return "", nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
}

// sweep removes the directories in parent that no installation uses. Other users may write to
// parent, so what is not this user's stays.
func sweep(parent string) error {
	found, err := filepath.Glob(filepath.Join(parent, workName))
	if err != nil {
		return err
	}
	for _, dir := range found {
		fi, err := os.Lstat(dir)
		if err != nil || !fi.IsDir() || int(fi.Sys().(*syscall.Stat_t).Uid) != os.Geteuid() {
			continue
		}
		held, err := lock(dir)
		if err != nil {
			continue
		}
		if err := errors.Join(os.RemoveAll(dir), held.Close()); err != nil {
			return err
		}
	}
	return nil
}

// lock locks a directory. The error is [os.ErrNotExist] if somebody removed it meanwhile.
func lock(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	if _, err := os.Lstat(dir); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
