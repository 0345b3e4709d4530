package snapshot

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"golang.org/x/sys/unix"
)

// crowd makes a hundred files in each of three directories, which lie in one
// another or beside one another.
func crowd(t *testing.T, nested bool) string {
	t.Helper()
	root := t.TempDir()
	in := root
	for n := range 3 {
		dir := filepath.Join(in, fmt.Sprintf("z%d", n))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for i := range 100 {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%03d", i)), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if nested {
			in = dir
		}
	}
	return root
}

// budget has room for two directories of a crowd.
const budget = 250 * (nameCost + 3)

// TestDiffHolds: it counts the names of all directories that it is in, and no others.
func TestDiffHolds(t *testing.T) {
	for _, nested := range []bool{true, false} {
		told := 0
		d := differ{
			ctx: t.Context(), held: held{max: budget},
			hide: func(string) bool { return false }, emit: func(_, _ string) error { told++; return nil },
		}
		fd, err := d.open(unix.AT_FDCWD, crowd(t, nested))
		if err != nil {
			t.Fatal(err)
		}
		err = d.directory("", node{dir: true, own: true, upper: fd}, node{dir: true}, nil)
		d.closeFrom(0)
		if errs.Is(err, errs.Exhausted) != nested || !nested && (err != nil || told != 303 || d.held.bytes != 0) {
			t.Errorf("nested %v: %d changes, %d bytes held, %v", nested, told, d.held.bytes, err)
		}
	}
}

// TestDiffsAtOnce: who comes when there are enough is sent away.
func TestDiffsAtOnce(t *testing.T) {
	s := &Store{diffs: make(chan struct{}, 1), poolDir: t.TempDir()}
	none := func(string, string) error { return nil }
	s.diffs <- struct{}{}
	if err := s.Diff(t.Context(), "daaaaaaaaaaa", "", nil, nil, none); !errs.Is(err, errs.Unavailable) {
		t.Errorf("beside others: %v", err)
	}
	<-s.diffs
	for range 2 { // each gives its place back
		if err := s.Diff(t.Context(), "daaaaaaaaaaa", "", nil, nil, none); !errs.Is(err, errs.WrongState) {
			t.Errorf("alone: %v", err)
		}
	}
}

// TestReadLayerHolds is TestDiffHolds of a layer that is read.
func TestReadLayerHolds(t *testing.T) {
	for _, nested := range []bool{true, false} {
		root, err := openDir(unix.AT_FDCWD, crowd(t, nested))
		if err != nil {
			t.Fatal(err)
		}
		p := packer{ctx: t.Context(), tw: tar.NewWriter(io.Discard), seen: inodes{}, first: map[uint64]string{}, names: held{max: budget}}
		err = errors.Join(p.dir(root, ""), root.Close())
		if errs.Is(err, errs.Exhausted) != nested || !nested && (err != nil || p.names.bytes != 0) {
			t.Errorf("nested %v: %d bytes held, %v", nested, p.names.bytes, err)
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
		root, err := openDir(unix.AT_FDCWD, dir)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		r, w := io.Pipe()
		p = packer{ctx: t.Context(), tw: tar.NewWriter(w), seen: inodes{}, first: map[uint64]string{}, names: held{max: budget}, links: held{max: room}, buf: make([]byte, 100)}
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
	p, got, err := pack(nameCost + 1) // for one at a time
	if want := []string{"a>", "b>a", "c>a", "d>", "e>d"}; err != io.EOF || !slices.Equal(got, want) || len(p.seen)+len(p.first)+p.links.bytes > 0 {
		t.Errorf("%v, %v; kept %v, %v, %d bytes", got, err, p.seen, p.first, p.links.bytes)
	}
	if _, _, err := pack(nameCost); !errs.Is(err, errs.Exhausted) {
		t.Errorf("without room: %v", err)
	}
}

// TestWalk counts every inode once, however many names are in a directory.
func TestWalk(t *testing.T) {
	dir := crowd(t, true)
	many := filepath.Join(dir, "many")
	if err := os.Mkdir(many, 0o755); err != nil {
		t.Fatal(err)
	}
	for i := range 2*chunk + 1 {
		if err := os.Link(filepath.Join(dir, "z0", "000"), filepath.Join(many, fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	dirs, files := 0, 0
	err := walk(t.Context(), dir, func(st *unix.Stat_t) {
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			dirs++
		} else {
			files++
		}
	})
	if err != nil || dirs != 5 || files != 300 {
		t.Errorf("%d directories, %d files, %v", dirs, files, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := walk(ctx, dir, func(*unix.Stat_t) {}); !errors.Is(err, context.Canceled) {
		t.Errorf("of nobody: %v", err)
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
