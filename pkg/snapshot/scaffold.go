package snapshot

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/snapshot/layer"
)

// scaffoldName depends on the scaffold's content: another set of mount points is
// another layer, and running sandboxes keep theirs. Older ones are left: a dozen empty
// inodes.
var scaffoldName = func() string {
	h := sha256.Sum256([]byte(fmt.Sprint(scaffold)))
	return fmt.Sprintf("scaffold-%x", h[:4])
}()

// agentState is the agent's own directory, on the disk. It is writable even if the root
// file system is read-only.
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

// makeScaffold makes the layer that holds every mount point, unless it is there,
// and returns its directory. Were they made in the upper, they would show as
// changes of the guest, and a read-only root could not start.
func makeScaffold(layers *layer.Store) (string, error) {
	return layers.Make(scaffoldName, fillScaffold)
}

func fillScaffold(dir string) (err error) {
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
	return nil
}

// lowers are the directories that an overlay of these layers has below its upper,
// topmost first: the scaffold, and the layers, which come lowest first.
func (m *Mounts) lowers(layers []string) ([]string, error) {
	dirs := []string{m.scaffold}
	for _, digest := range slices.Backward(layers) {
		dir, err := m.layers.Path(digest)
		if err != nil {
			return nil, err
		}
		dirs = append(dirs, dir)
	}
	return dirs, nil
}
