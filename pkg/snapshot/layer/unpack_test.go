package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// listTree says of everything below dir what it is, as one line each.
func listTree(t testing.TB, dir string) (lines []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(p string, _ os.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		line := fmt.Sprintf("%s %o %d:%d", strings.TrimPrefix(p, dir+"/"), st.Mode, st.Uid, st.Gid)
		if isWhiteout(&st) {
			line = strings.TrimPrefix(p, dir+"/") + " whiteout"
		}
		var b [8]byte
		if n, err := unix.Lgetxattr(p, opaqueAttr, b[:]); err == nil {
			line += " opaque=" + string(b[:n])
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// layersOnly is a store in a directory of its own.
func layersOnly(t testing.TB, dir string) *Store {
	t.Helper()
	hosttest.Root(t)
	s := &Store{dir: filepath.Join(dir, "layers")}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return s
}

// nothingLeft fails the test if a failed import left anything.
func nothingLeft(t testing.TB, s *Store) {
	t.Helper()
	if left, err := os.ReadDir(s.dir); err != nil || len(left) > 0 {
		t.Errorf("left in the layer store: %v, %v", left, err)
	}
}

func TestWhiteouts(t *testing.T) {
	dir := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeDir, Name: name} }
	empty := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }
	s := layersOnly(t, t.TempDir())
	digest, _, err := s.Import(t.Context(), tarOf(t,
		dir("gone"), empty("gone/.wh.file"),
		dir("hides"), empty("hides/.wh..wh..opq"), empty("hides/own"),
		dir("own"), empty(".wh.own"),
		empty(".wh.later"), dir("later"),
		empty(".wh.file"), empty("file"),
		empty("kept"), empty(".wh.kept"),
		empty(".wh..wh.plnk"), empty("no/parent/.wh.x"),
		empty("dev/.wh.null"),
	), nil)
	if err != nil {
		t.Fatal(err)
	}
	path, err := s.Path(digest)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"file 100755 0:0", "gone 40755 0:0", "gone/file whiteout", "hides 40755 0:0 opaque=y", "hides/own 100755 0:0",
		"kept 100755 0:0", "later 40755 0:0 opaque=y", "no 40755 0:0", "no/parent 40755 0:0", "no/parent/x whiteout",
		"own 40755 0:0 opaque=y",
	}
	if got := listTree(t, path); !slices.Equal(got, want) {
		t.Errorf("the layer holds\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if n, err := s.Size(t.Context(), digest); err != nil || n == 0 {
		t.Errorf("size %d, %v", n, err)
	}
	if err := unix.Removexattr(path, sizeAttr); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Size(t.Context(), digest); err != nil || n != int64(len("hides/own")+len("file")+len("kept")) {
		t.Errorf("size counted: %d, %v", n, err)
	}
}

// TestHostileLayers: the child and the store refuse what a daemon would be given.
func TestHostileLayers(t *testing.T) {
	whole := tarOf(t,
		tar.Header{Typeflag: tar.TypeReg, Name: "a"},
		tar.Header{Typeflag: tar.TypeReg, Name: strings.Repeat("b", 200)},
	).Bytes()
	for name, in := range map[string]io.Reader{
		"no tar":             strings.NewReader(strings.Repeat("no tar ", 1000)),
		"cut in a file":      bytes.NewReader(whole[:512+3]),
		"cut in a header":    bytes.NewReader(whole[:1024+100]),
		"leaves":             tarOf(t, tar.Header{Typeflag: tar.TypeReg, Name: "../x"}),
		"device 0:0":         tarOf(t, tar.Header{Typeflag: tar.TypeChar, Name: "x"}),
		"whiteout of itself": tarOf(t, tar.Header{Typeflag: tar.TypeReg, Name: ".wh.."}),
		"100 links":          tarOf(t, chain(100)...),
	} {
		t.Run(name, func(t *testing.T) {
			s := layersOnly(t, t.TempDir())
			if _, _, err := s.Import(t.Context(), in, nil); !errs.Is(err, errs.Invalid) {
				t.Errorf("got %v", err)
			}
			nothingLeft(t, s)
		})
	}
	t.Run("reader fails", func(t *testing.T) {
		s := layersOnly(t, t.TempDir())
		broken := io.MultiReader(bytes.NewReader(whole[:600]), errReader{})
		if _, _, err := s.Import(t.Context(), broken, nil); !errors.Is(err, errBroken) {
			t.Errorf("got %v", err)
		}
		nothingLeft(t, s)
	})
}

var errBroken = errors.New("the client left")

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errBroken }

// chain is n links to directories, each to the next, and a file through all.
func chain(n int) (all []tar.Header) {
	all = append(all, tar.Header{Typeflag: tar.TypeDir, Name: "link-0"})
	for i := range n {
		all = append(all, tar.Header{Typeflag: tar.TypeSymlink, Name: "link-" + strconv.Itoa(i+1), Linkname: "link-" + strconv.Itoa(i)})
	}
	return append(all, tar.Header{Typeflag: tar.TypeReg, Name: "link-" + strconv.Itoa(n) + "/file"})
}

// TestConfinedTakesThem: what docker takes is unpacked by the child, too, which has few
// system calls.
func TestConfinedTakesThem(t *testing.T) {
	file := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }
	s := layersOnly(t, t.TempDir())
	for name, c := range map[string]struct {
		in   io.Reader
		want []string
		says string
	}{
		"no bytes": {strings.NewReader(""), nil, ""},
		"replaced": {
			tarOf(t, file("/a/b/c/d"), file("/a/.wh..wh..opq"), file("/a"), file("x/y"), tar.Header{Typeflag: tar.TypeDir, Name: "/x"},
				tar.Header{Typeflag: tar.TypeFifo, Name: "p"}),
			[]string{"a 100755 0:0", "x 40755 0:0", "x/y 100755 0:0"},
			"",
		},
		"owner": {
			tarOf(t, tar.Header{Typeflag: tar.TypeReg, Name: "a", Uid: 100_000, Gid: 7}), nil,
			`the layer sets the owner of "a" to 100000:7, and a sandbox has only the ids 0 to 65535`,
		},
	} {
		digest, _, err := s.Import(t.Context(), c.in, nil)
		if c.says != "" {
			if !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%s: %v; want %q", name, err, c.says)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		path, err := s.Path(digest)
		if got := listTree(t, path); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s holds %q, %v; want %q", name, got, err, c.want)
		}
		if err := s.Remove(t.Context(), digest); err != nil {
			t.Error(err)
		}
	}
	nothingLeft(t, s)
}

// Hard links to hard links are one file.
func TestHundredHardLinks(t *testing.T) {
	all := []tar.Header{{Typeflag: tar.TypeReg, Name: "0"}}
	for i := range 100 {
		all = append(all, tar.Header{Typeflag: tar.TypeLink, Name: strconv.Itoa(i + 1), Linkname: strconv.Itoa(i)})
	}
	s := layersOnly(t, t.TempDir())
	digest, n, err := s.Import(t.Context(), tarOf(t, all...), nil)
	if err != nil || n != 1 {
		t.Fatal(n, err)
	}
	path, _ := s.Path(digest)
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(path, "100"), &st); err != nil || st.Nlink != 101 {
		t.Errorf("%d links, %v", st.Nlink, err)
	}
}

// 5 GB of nothing take no disk, whether the tar has a word for it or not.
func TestSparseFile(t *testing.T) {
	for name, flags := range map[string][]string{"gnu": {"--format=gnu", "-S"}, "pax": {"--format=pax", "-S"}, "spelled out": nil} {
		t.Run(name, func(t *testing.T) {
			s := layersOnly(t, t.TempDir())
			src := t.TempDir()
			f, err := os.Create(filepath.Join(src, "sparse"))
			if err != nil {
				t.Fatal(err)
			}
			const size = 5 << 30
			_, err = f.WriteAt([]byte("end"), size-3)
			if err := errors.Join(err, f.Close()); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command("tar", append(append([]string{"-C", src}, flags...), "-cf", "-", "sparse")...)
			out, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			digest, n, err := s.Import(t.Context(), out, nil)
			if err := errors.Join(err, cmd.Wait()); err != nil || n != size {
				t.Fatal(n, err)
			}
			path, _ := s.Path(digest)
			var st unix.Stat_t
			if err := unix.Lstat(filepath.Join(path, "sparse"), &st); err != nil || st.Size != size || st.Blocks*512 > 1<<20 {
				t.Errorf("%d bytes in %d on disk, %v", st.Size, st.Blocks*512, err)
			}
			b := make([]byte, 3)
			g, err := os.Open(filepath.Join(path, "sparse"))
			if err != nil {
				t.Fatal(err)
			}
			defer g.Close()
			if _, err := g.ReadAt(b, size-3); err != nil || string(b) != "end" {
				t.Errorf("it ends with %q, %v", b, err)
			}
		})
	}
}

// A million files are an image like any other, in memory that does not grow. `make test`
// takes a tenth of them.
func TestMillionFiles(t *testing.T) {
	directories := 1000
	if !everything {
		directories = 100
	}
	s := layersOnly(t, t.TempDir())
	r, w := io.Pipe()
	go func() {
		tw := tar.NewWriter(w)
		for i := range directories * 1000 {
			if i%1000 == 0 {
				_ = tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: fmt.Sprintf("d%03d", i/1000), Mode: 0o755})
			}
			_ = tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("d%03d/f%03d", i/1000, i%1000), Mode: 0o644})
		}
		w.CloseWithError(tw.Close())
	}()
	start := time.Now()
	digest, _, err := s.Import(t.Context(), r, nil)
	if err != nil {
		t.Fatal(err)
	}
	took := time.Since(start)
	path, _ := s.Path(digest)
	last, err := os.ReadDir(filepath.Join(path, fmt.Sprintf("d%03d", directories-1)))
	if err != nil || len(last) != 1000 {
		t.Errorf("the last directory has %d files, %v", len(last), err)
	}
	start = time.Now()
	if err := s.Remove(t.Context(), digest); err != nil {
		t.Error(err)
	}
	t.Logf("%d files: import %.1f s, remove %.1f s", directories*1000, took.Seconds(), time.Since(start).Seconds())
	nothingLeft(t, s)
}

// Entries beyond the limit end the import, not the host.
func TestTooManyEntries(t *testing.T) {
	was := layerLimits.Entries
	layerLimits.Entries = 1000
	t.Cleanup(func() { layerLimits.Entries = was })
	var all []tar.Header
	for i := range 1001 {
		all = append(all, tar.Header{Typeflag: tar.TypeReg, Name: strconv.Itoa(i)})
	}
	s := layersOnly(t, t.TempDir())
	if _, _, err := s.Import(t.Context(), tarOf(t, all...), nil); !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "entries") {
		t.Errorf("got %v", err)
	}
	nothingLeft(t, s)
}

// TestDiskFull: a disk that fills up in the middle of an import is left as it was.
func TestDiskFull(t *testing.T) {
	hosttest.Root(t)
	dir := t.TempDir()
	if err := unix.Mount("sandboxd-test", dir, "tmpfs", 0, "size=64m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	s := layersOnly(t, dir)
	size := int64(100 << 20)
	var head bytes.Buffer
	if err := tar.NewWriter(&head).WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "big", Mode: 0o644, Size: size}); err != nil {
		t.Fatal(err)
	}
	in := io.MultiReader(&head, io.LimitReader(ones{}, size))
	if _, _, err := s.Import(t.Context(), in, nil); !errs.Is(err, errs.Exhausted) {
		t.Errorf("got %v", err)
	}
	nothingLeft(t, s)
	if err := s.Room(); err != nil {
		t.Errorf("after it: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "filler"), bytes.Repeat([]byte("x"), 63<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Import(t.Context(), tarOf(t, tar.Header{Typeflag: tar.TypeReg, Name: "small"}), nil); !errs.Is(err,
		errs.Exhausted) || !strings.Contains(err.Error(), "imports must leave") {
		t.Errorf("on a disk that is nearly full: %v", err)
	}
	nothingLeft(t, s)
}

type ones struct{}

func (ones) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 1
	}
	return len(p), nil
}

// A staged layer has no name until it is committed, and can be dropped twice.
func TestStage(t *testing.T) {
	s := layersOnly(t, t.TempDir())
	ctx := context.Background()
	content := tarOf(t, tar.Header{Typeflag: tar.TypeReg, Name: "a"}).Bytes()
	stage, digest, _, err := s.Stage(ctx, bytes.NewReader(content), nil)
	if err != nil {
		t.Fatal(err)
	}
	if all, err := s.List(ctx); err != nil || len(all) > 0 {
		t.Errorf("staged only, but listed: %v, %v", all, err)
	}
	other, _, _, err := s.Stage(ctx, bytes.NewReader(content), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, st := range []string{stage, other} { // the second finds the name taken
		if err := s.Commit(ctx, st, digest); err != nil {
			t.Error(err)
		}
	}
	for range 2 {
		if err := s.Drop(stage); err != nil {
			t.Error(err)
		}
	}
	if err := s.Drop(strings.TrimPrefix(digest, digestPrefix)); err == nil {
		t.Error("a layer with a name was dropped as a stage")
	}
	if left, err := os.ReadDir(s.dir); err != nil || len(left) != 1 {
		t.Errorf("in the store: %v, %v", left, err)
	}
}

// A layer made into a tar and back is the same layer; and the tar of that is
// the same tar.
func TestReadLayer(t *testing.T) {
	s := layersOnly(t, t.TempDir())
	ctx := t.Context()
	at := time.Unix(1_600_000_000, 123_000_000)
	xattr := map[string]string{
		"SCHILY.xattr.user.a":              "b\x00c",
		"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20" + strings.Repeat("\x00", 14),
	}
	digest, size, err := s.Import(ctx, tarOf(t,
		tar.Header{Typeflag: tar.TypeDir, Name: "d", Mode: 0o2750, Uid: 1000, Gid: 65535, ModTime: at},
		tar.Header{Typeflag: tar.TypeReg, Name: "d/file", Mode: 0o4711, Uid: 7, ModTime: at, PAXRecords: xattr, Format: tar.FormatPAX},
		tar.Header{Typeflag: tar.TypeLink, Name: "d/link", Linkname: "d/file"},
		tar.Header{Typeflag: tar.TypeSymlink, Name: "d/to", Linkname: "../../etc", Uid: 3, ModTime: at},
		tar.Header{Typeflag: tar.TypeReg, Name: "d/.wh.gone"},
		tar.Header{Typeflag: tar.TypeDir, Name: "o"},
		tar.Header{Typeflag: tar.TypeReg, Name: "o/.wh..wh..opq"},
		tar.Header{Typeflag: tar.TypeReg, Name: strings.Repeat("long/", 200) + "name", Format: tar.FormatPAX},
	), nil)
	if err != nil {
		t.Fatal(err)
	}
	var first, second bytes.Buffer
	if err := s.Read(ctx, digest, &first); err != nil {
		t.Fatal(err)
	}
	again, size2, err := s.Import(ctx, bytes.NewReader(first.Bytes()), nil)
	if err != nil || size2 != size {
		t.Fatal(size2, size, err)
	}
	if err := s.Read(ctx, again, &second); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("the tar of a tar differs")
	}
	a, _ := s.Path(digest)
	b, _ := s.Path(again)
	if la, lb := listTree(t, a), listTree(t, b); !slices.Equal(la, lb) {
		t.Errorf("the layer became\n%s\nit was\n%s", strings.Join(lb, "\n"), strings.Join(la, "\n"))
	}
	for _, name := range []string{"user.a", "security.capability"} {
		var v [64]byte
		if n, err := unix.Lgetxattr(filepath.Join(b, "d/link"), name, v[:]); err != nil || string(v[:n]) != xattr["SCHILY.xattr."+name] {
			t.Errorf("%s: %q, %v", name, v[:n], err)
		}
	}
	if err := s.Read(ctx, digestPrefix+strings.Repeat("0", 64), io.Discard); !errs.Is(err, errs.NotFound) {
		t.Errorf("an absent layer: %v", err)
	}
}
