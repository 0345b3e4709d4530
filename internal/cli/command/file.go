package command

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// WriteFile writes a file that has its name only when it is complete and on disk: until
// then, and after a failure, an older file of that name stays as it is. A link is replaced,
// and not followed: it may have come from a sandbox. A device or a pipe is written
// directly, also behind a link of the kernel's own (/dev/stdout).
func WriteFile(name string, mode fs.FileMode, write func(io.Writer) error) error {
	stat := os.Lstat
	if dir := filepath.Dir(name); dir == "/dev" || dir == "/dev/fd" || dir == "/proc/self/fd" {
		stat = os.Stat
	}
	if fi, err := stat(name); err == nil && !fi.Mode().IsRegular() && fi.Mode()&fs.ModeSymlink == 0 {
		f, err := os.OpenFile(name, os.O_WRONLY, 0)
		if err != nil {
			return fmt.Errorf("write to %s: %w", name, err)
		}
		return errors.Join(write(f), f.Close())
	}
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+"-")
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	err = write(f)
	if err == nil {
		err = errors.Join(f.Chmod(mode), f.Sync())
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		if rerr := os.Remove(f.Name()); !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}
