package daemontest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Marker is the suffix of the file beside a state directory that says that the directory is the tests' own. (In it, a
// daemon accepts no file of others.) `make clean` (scripts/clean.sh) removes both.
const Marker = ".made-by-tests"

// claimState marks the state directory of an instance as the tests' own. It fails if the directory has something in it
// that no test has put there: an instance that somebody uses on this host. The tests would delete its sandboxes.
func claimState(dir string) error {
	marker := dir + Marker
	if _, err := os.Stat(marker); err == nil {
		return nil
	}
	there, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	notes, err := filepath.Glob(filepath.Join(dir, "recipe-of-*")) // of tests from before there was a marker
	if err != nil {
		return err
	}
	if len(there) > 0 && len(notes) == 0 {
		return fmt.Errorf("%s was not made by a test, and tests delete the sandboxes of the instance that they use: if nobody needs "+
			"the directory, remove it; otherwise name two free instances, as SANDBOXD_TEST_INSTANCE=vx", dir)
	}
	return os.WriteFile(marker, nil, 0o600)
}
