package snapshot

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// scaffoldName is made of what is in it: another set of mount points is another
// layer, and running sandboxes keep theirs. Older ones are left: a dozen empty
// inodes.
var scaffoldName = func() string {
	h := sha256.Sum256([]byte(fmt.Sprint(scaffold)))
	return fmt.Sprintf("scaffold-%x", h[:4])
}()

// agentState is where the agent keeps its own, on the disk: a place that is
// written to even where the root file system is read-only.
const agentState = ".sandboxd"

// scaffold is every mount point of a sandbox, in an order that makes parents
// first. Directories merge with the image's, and the topmost gives owner and
// mode: these are Debian's. Files hide the image's, also where those are links.
var scaffold = []struct {
	path string
	mode fs.FileMode
}{
	{"proc", fs.ModeDir | 0o555},
	{"sys", fs.ModeDir | 0o555},
	{"dev", fs.ModeDir | 0o755},
	{"run", fs.ModeDir | 0o755},
	{"tmp", fs.ModeDir | fs.ModeSticky | 0o777},
	// gVisor mounts a tmpfs of its own over a /tmp that is empty, outside the
	// disk limit and every snapshot (runsc/boot, mountTmp).
	{"tmp/.X11-unix", fs.ModeDir | fs.ModeSticky | 0o777},
	{"opt", fs.ModeDir | 0o755},
	{"opt/opensandbox", fs.ModeDir | 0o755},
	{agentState, fs.ModeDir | 0o700},
	{"etc", fs.ModeDir | 0o755},
	{"etc/resolv.conf", 0o644},
	{"etc/hosts", 0o644},
	{"etc/hostname", 0o644},
}

// makeScaffold makes the layer that holds every mount point, unless it is
// there. Were they made in the upper, they would show as changes of the guest,
// and a read-only root could not start.
func (s *Store) makeScaffold() error {
	final := filepath.Join(s.layerDir, scaffoldName)
	if ok, err := tree.Exists(final); ok || err != nil {
		return err
	}
	dir, err := os.MkdirTemp(s.layerDir, newPrefix)
	if err != nil {
		return err
	}
	defer tree.Remove(dir) //nolint:errcheck // renamed away, or cleared at the next Open
	for _, e := range scaffold {
		p := filepath.Join(dir, e.path)
		if e.mode.IsDir() {
			err = os.Mkdir(p, 0o700)
		} else {
			err = os.WriteFile(p, nil, 0o600)
		}
		if err == nil {
			err = os.Chmod(p, e.mode) // whatever the umask
		}
		if err != nil {
			return err
		}
	}
	for _, e := range scaffold {
		if err := os.Chtimes(filepath.Join(dir, e.path), time.Unix(0, 0), time.Unix(0, 0)); err != nil {
			return err
		}
	}
	return finishLayer(dir, final)
}

// finishLayer puts a whole layer on disk, then under its name.
func finishLayer(dir, final string) error {
	if err := settleLayer(dir); err != nil {
		return err
	}
	return nameLayer(dir, final)
}

// settleLayer gives the top of a layer the same mode and time always, and puts
// it all on disk.
func settleLayer(dir string) error {
	if err := errors.Join(os.Chmod(dir, 0o755), os.Chtimes(dir, time.Unix(0, 0), time.Unix(0, 0))); err != nil {
		return err
	}
	return tree.WithDir(dir, unix.Syncfs)
}

// nameLayer gives a layer its name. Another who was faster with the same layer
// is fine.
func nameLayer(dir, final string) error {
	if err := os.Rename(dir, final); err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return tree.WithDir(filepath.Dir(final), unix.Fsync)
}
