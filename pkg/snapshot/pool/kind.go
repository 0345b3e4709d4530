package pool

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// The kinds of pool, as the configuration names them.
const (
	Auto      = "auto"       // the file system that is mounted on the pool directory, else BtrfsLoop
	Btrfs     = "btrfs"      // a btrfs mounted on the pool directory; limits bytes
	BtrfsLoop = "btrfs-loop" // a btrfs in a file that sandboxd makes; limits bytes
	Project   = "prjquota"   // a directory of an xfs or ext4 with project quotas; limits bytes and files
	Plain     = "plain"      // a directory; limits nothing, so Auto never chooses it
)

// Dir is the directory of the pool.
func Dir(stateDir string) string { return filepath.Join(stateDir, "pool") }

// Image is the file that holds a pool of kind BtrfsLoop, or a link to it.
func Image(stateDir string) string { return filepath.Join(stateDir, "pool.img") }

// MovedImage is the name of that file in another directory than the state directory.
const MovedImage = "sandboxd-pool.img"

// Kind is the kind of pool that a daemon with this state directory and this
// configuration takes. An empty configuration is Auto.
func Kind(stateDir, configured string) (kind string, err error) {
	if configured != Auto && configured != "" {
		return configured, nil
	}
	dir := Dir(stateDir)
	mounted, err := tree.IsMountPoint(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if there, err := tree.Exists(Image(stateDir)); err != nil || there || !mounted {
		return BtrfsLoop, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return "", &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	if st.Type == unix.BTRFS_SUPER_MAGIC {
		return Btrfs, nil
	}
	return Project, nil
}
