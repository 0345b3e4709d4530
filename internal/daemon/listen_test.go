package daemon

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSocketModes: the API's socket is for root and a group, and the admin socket for
// root, whatever the umask of the daemon is.
func TestSocketModes(t *testing.T) {
	for _, umask := range []int{0, 0o077} {
		for _, mode := range []os.FileMode{0o660, 0o600} {
			path := filepath.Join(t.TempDir(), "s")
			old := unix.Umask(umask)
			l, err := bindUnix("listen.socket", path, mode)
			unix.Umask(old)
			if err != nil {
				t.Fatal(err)
			}
			if fi, err := os.Stat(path); err != nil || fi.Mode() != os.ModeSocket|mode {
				t.Errorf("umask %o: %v, %v; want %v", umask, fi.Mode(), err, mode)
			}
			l.Close()
		}
	}
}
