package snapshottest

import (
	"archive/tar"
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/snapshot"
)

// testWhiteouts: a file that an imported layer hides is hidden, whichever way it is
// mounted.
func (e *Env) testWhiteouts(t *testing.T) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range []string{
		"usr/", "usr/lib/", "usr/lib/dir/", "usr/lib/dir/.wh..wh..opq", "usr/lib/dir/new", "usr/share/",
		"usr/share/.wh.goes", ".wh.srv",
	} {
		h := &tar.Header{Name: name, Mode: 0o755}
		if name[len(name)-1] != '/' {
			h.Typeflag = tar.TypeReg
		}
		must(t, w.WriteHeader(h))
	}
	must(t, w.Close())
	upper, _, err := e.Layers.Import(t.Context(), &b, nil)
	must(t, err)
	for _, s := range []slot{first, identity} {
		id := e.Disk(t, 16<<20)
		e.users[id] = s
		must(t, e.Mounts.Mount(t.Context(), id, snapshot.Mount{Layers: []string{e.Layer, upper}, OwnUsers: s.own, UIDBase: s.base}))
		root := e.Mounts.RootfsDir(id)
		for name, there := range map[string]bool{
			"usr/lib/dir/new": true, "usr/lib/dir/old": false, "usr/share/goes": false, "usr/share/lower-0001": true,
			"usr/bin/plain": true, "srv": false,
		} {
			_, err := os.Lstat(filepath.Join(root, name))
			if there && err != nil || !there && !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s: %v, there should be one: %v", name, err, there)
			}
		}
		must(t, e.Mounts.Unmount(t.Context(), id))
		must(t, e.Disks.DeleteDisk(t.Context(), id))
	}
	must(t, e.Layers.Remove(t.Context(), upper))
}
