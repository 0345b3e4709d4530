package layer

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree/treetest"
	"golang.org/x/sys/unix"
)

// budget has room for the names of two directories of a crowd.
const budget = 250 * (tree.NameCost + 3)

// TestReadLayerHolds: reading a layer counts the names of all directories that it is
// in, and no others.
func TestReadLayerHolds(t *testing.T) {
	for _, nested := range []bool{true, false} {
		root, err := tree.OpenDir(unix.AT_FDCWD, treetest.Crowd(t, nested))
		if err != nil {
			t.Fatal(err)
		}
		p := packer{
			ctx: t.Context(), tw: tar.NewWriter(io.Discard), met: tree.Inodes{}, first: map[uint64]string{},
			names: tree.Names{Max: budget},
		}
		err = errors.Join(p.dir(root, ""), root.Close())
		if errs.Is(err, errs.Exhausted) != nested || !nested && (err != nil || p.names.Bytes != 0) {
			t.Errorf("nested %v: %d bytes held, %v", nested, p.names.Bytes, err)
		}
	}
}

// TestReadLayerLinks: a file with several names is in a tar once, and forgotten
// after its last name; how many may be open at once is bounded.
func TestReadLayerLinks(t *testing.T) {
	dir := t.TempDir()
	for i, links := range [][]string{{"a", "b", "c"}, {"d", "e"}} {
		for j, name := range links {
			var err error
			if j == 0 {
				err = os.WriteFile(filepath.Join(dir, name), make([]byte, i+1), 0o644)
			} else {
				err = os.Link(filepath.Join(dir, links[0]), filepath.Join(dir, name))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	pack := func(room int) (p packer, got []string, err error) {
		root, err := tree.OpenDir(unix.AT_FDCWD, dir)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		r, w := io.Pipe()
		p = packer{
			ctx: t.Context(), tw: tar.NewWriter(w), met: tree.Inodes{}, first: map[uint64]string{}, names: tree.Names{Max: budget},
			links: tree.Names{Max: room}, buf: make([]byte, 100),
		}
		go func() {
			err := p.dir(root, "")
			if err == nil {
				err = p.tw.Close()
			}
			w.CloseWithError(err)
		}()
		tr := tar.NewReader(r)
		for {
			h, err := tr.Next()
			if err != nil {
				return p, got, err
			}
			got = append(got, h.Name+">"+h.Linkname)
		}
	}
	p, got, err := pack(tree.NameCost + 1) // for one at a time
	if want := []string{"a>", "b>a", "c>a", "d>", "e>d"}; err != io.EOF || !slices.Equal(got, want) ||
		len(p.met)+len(p.first)+p.links.Bytes > 0 {
		t.Errorf("%v, %v; kept %v, %v, %d bytes", got, err, p.met, p.first, p.links.Bytes)
	}
	if _, _, err := pack(tree.NameCost); !errs.Is(err, errs.Exhausted) {
		t.Errorf("without room: %v", err)
	}
}

// TestMeterAsks: a tar of small things fills the disk faster than it comes.
func TestMeterAsks(t *testing.T) {
	full, left := errors.New("full"), 3
	m := meter{ctx: t.Context(), r: neverEnding{}, room: func() error {
		if left--; left < 0 {
			return full
		}
		return nil
	}}
	n, err := io.Copy(io.Discard, struct{ io.Reader }{&m})
	if !errors.Is(err, full) || n > 3*(4<<20)+copySize {
		t.Errorf("%d bytes, %v", n, err)
	}
}

type neverEnding struct{}

func (neverEnding) Read(p []byte) (int, error) { return len(p), nil }
