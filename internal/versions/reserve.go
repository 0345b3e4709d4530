package versions

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// reserve is the room that the undoing of a change takes at most: the journal, two unit files, names.
const reserve = 256 << 10

// Reserve takes the room that an undoing needs, so that a change can be undone on a disk that has
// become full. It fails if there is not so much. Release gives it back.
func (r Root) Reserve() error {
	f, err := os.OpenFile(r.reserve(), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err == nil {
		_, err = f.Write(make([]byte, reserve)) // not fallocate(2): not every file system has it
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err != nil {
		return fmt.Errorf("reserve the %d KiB that going back would need: %w", reserve>>10, errors.Join(err, r.Release()))
	}
	return nil
}

// Release is the first step of an undoing. It may be called again.
func (r Root) Release() error {
	if err := os.Remove(r.reserve()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (r Root) reserve() string { return filepath.Join(string(r), "upgrade.reserve") }
