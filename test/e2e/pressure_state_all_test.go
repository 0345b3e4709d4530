//go:build all

package e2e_test

import (
	"archive/tar"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// TestStatePressure fills the disk of the state directory, an ext4 that is a file: no image is added then,
// a sandbox goes on, and with room again the image is there.
func TestStatePressure(t *testing.T) {
	hosttest.Root(t)
	h := connect(t, daemontest.NewWith(t, daemontest.Options{
		Instance: daemontest.Other, StateDir: filepath.Join(ext4(t, 1<<30), "state"), Pool: pool.Plain,
		Storage: []string{`reserve = "64Mi"`},
	}))
	daemontest.Image(t, h.Daemon, "base")
	id := h.create(t, spec("runc")).ID
	ballast := filepath.Join(h.StateDir, "ballast")
	f, err := os.Create(ballast)
	must(t, err)
	defer f.Close()
	var st unix.Statfs_t
	must(t, unix.Fstatfs(int(f.Fd()), &st))
	must(t, unix.Fallocate(int(f.Fd()), 0, 0, int64(st.Bavail)*st.Bsize-30<<20))

	snap, err := h.api.Snapshots().Create(t.Context(), id, "", true)
	if !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(), "no room for another snapshot") { // the pool is on this disk
		t.Errorf("a snapshot: %+v, %v", snap, err)
	}
	l := &lab{host: h, T: t, runtime: "runc"}
	var small bytes.Buffer
	w := tar.NewWriter(&small)
	must(t, w.WriteHeader(&tar.Header{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755}))
	must(t, w.Close())
	file := filepath.Join(t.TempDir(), "image.tar")
	must(t, os.WriteFile(file, small.Bytes(), 0o600))
	add := []string{"image", "import", file, "another:1"}
	l.wants(l.ctl(add...), 125, "no room for another image: the disk of the state directory has", "storage.reserve", "image prune -a")
	h.refused(t, errs.Exhausted, "storage.reserve")
	h.answers(t, id)

	must(t, os.Remove(ballast))
	must(t, f.Close())
	must(t, flush(h.StateDir))
	l.ok(add...)
	h.deleteAll(t)
}

// ext4 mounts a new ext4 of so many bytes until t ends.
func ext4(t *testing.T, bytes int64) (dir string) {
	t.Helper()
	dir, image := filepath.Join(t.TempDir(), "mnt"), filepath.Join(t.TempDir(), "disk")
	must(t, os.WriteFile(image, nil, 0o600))
	must(t, os.Truncate(image, bytes))
	must(t, os.Mkdir(dir, 0o755))
	run := func(argv ...string) {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Errorf("%v: %v: %s", argv, err, out)
		}
	}
	run("mkfs.ext4", "-q", image)
	run("mount", "-o", "loop", image, dir)
	t.Cleanup(func() { run("umount", dir) })
	return dir
}
