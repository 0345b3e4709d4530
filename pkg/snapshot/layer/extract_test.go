package layer

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// tarOf makes a tar of headers; content, where there is some, is the name.
func tarOf(t testing.TB, headers ...tar.Header) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		h.Uid, h.Gid = max(h.Uid, os.Getuid()), max(h.Gid, os.Getgid()) // no root needed
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(h.Name))
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := io.WriteString(w, h.Name); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

// unpackHere unpacks as the child does, in this process.
func unpackHere(dir string, r io.Reader) error {
	return tree.WithDir(dir, func(fd int) error {
		x := newExtractor(fd, os.Getuid(), layerLimits, func(dir string) error {
			if os.Getuid() != 0 {
				return nil
			}
			return setOpaque(fd, dir)
		})
		defer x.close()
		return x.extract(r)
	})
}

// outside makes a directory to unpack into and a file beside it that no tar may touch.
func outside(t testing.TB) (dir, victim string) {
	t.Helper()
	top := t.TempDir()
	dir, victim = filepath.Join(top, "layer"), filepath.Join(top, "victim")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(victim, []byte("untouched"), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir, victim
}

func TestHostileTars(t *testing.T) {
	link := func(name, to string) tar.Header {
		return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to}
	}
	file := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }
	dir := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeDir, Name: name} }
	for name, entries := range map[string][]tar.Header{
		"dot dot":                  {file("../victim")},
		"dot dot inside":           {dir("a"), file("a/../../victim")},
		"dot dot, absolute":        {file("/../victim")},
		"dot dot of many slashes":  {file("//..//victim")},
		"through a symlink":        {link("a", ".."), file("a/victim")},
		"through an absolute link": {link("a", "/"), file("a/tmp/sandboxd-victim")},
		"through a link below":     {dir("a"), link("a/b", "../.."), file("a/b/victim")},
		"hard link out":            {{Typeflag: tar.TypeLink, Name: "a", Linkname: "../victim"}},
		"hard link absolute":       {{Typeflag: tar.TypeLink, Name: "a", Linkname: "/etc/passwd"}},
		"hard link through a link": {link("a", ".."), {Typeflag: tar.TypeLink, Name: "b", Linkname: "a/victim"}},
		"hard link to nothing":     {{Typeflag: tar.TypeLink, Name: "b", Linkname: "a"}},
		"hard link to a directory": {dir("a"), {Typeflag: tar.TypeLink, Name: "b", Linkname: "a"}},
		"hard link over its file":  {file("a/b"), {Typeflag: tar.TypeLink, Name: "a", Linkname: "a/b"}},
		"below a replaced link":    {link("a", ".."), dir("a"), link("b", "a"), file("b/victim")},
		"device 0:0":               {{Typeflag: tar.TypeChar, Name: "a"}},
		"nested too deeply":        {file(strings.Repeat("d/", 257) + "f")},
		"whiteout of nothing":      {file(".wh.")},
		"whiteout of the root":     {file(".wh..")},
		"whiteout of the parent":   {dir("a"), file("a/.wh...")},
		"opaque root":              {file(".wh..wh..opq")},
		"opaque through a link":    {link("a", "/"), file("a/.wh..wh..opq")},
		"whiteout through a link":  {link("a", ".."), file("a/.wh.victim")},
		"owner no sandbox has":     {{Typeflag: tar.TypeReg, Name: "a", Uid: 65536}},
		"group no sandbox has":     {{Typeflag: tar.TypeDir, Name: "a", Gid: 1 << 20}},
		"component too long":       {file(strings.Repeat("x", 256))},
		"name too long":            {file(strings.Repeat("x/", 2049) + "x")},
		"file below a file":        {file("a"), file("a/b")},
	} {
		t.Run(name, func(t *testing.T) {
			into, victim := outside(t)
			err := unpackHere(into, tarOf(t, entries...))
			if err == nil {
				t.Error("was unpacked")
			}
			if b, err := os.ReadFile(victim); err != nil || string(b) != "untouched" {
				t.Errorf("the file outside: %q, %v", b, err)
			}
		})
	}
	t.Run("no tar", func(t *testing.T) {
		into, _ := outside(t)
		if err := unpackHere(into, strings.NewReader(strings.Repeat("no tar ", 200))); !errs.Is(err, errs.Invalid) {
			t.Errorf("no tar: %v", err)
		}
	})
}

// TestOddTars: archives that are odd but honest are unpacked.
func TestOddTars(t *testing.T) {
	into, victim := outside(t)
	headers := []tar.Header{
		{Typeflag: tar.TypeReg, Name: "./no/parents/given"},
		{Typeflag: tar.TypeReg, Name: "twice"},
		{Typeflag: tar.TypeSymlink, Name: "twice", Linkname: victim},
		{Typeflag: tar.TypeReg, Name: "twice", Mode: 0o4755},
		{Typeflag: tar.TypeDir, Name: "dir/", Mode: 0o700},
		{Typeflag: tar.TypeReg, Name: "dir/a"},
		{Typeflag: tar.TypeDir, Name: "dir/", Mode: 0o755},
		{Typeflag: tar.TypeLink, Name: "dir/b", Linkname: "./dir/a"},
		{Typeflag: tar.TypeSymlink, Name: "dangling", Linkname: "../../../../etc/passwd"},
		{Typeflag: tar.TypeChar, Name: "dev/null", Devmajor: 1, Devminor: 3},
		{Typeflag: tar.TypeReg, Name: "proc/1/mem"},
	}
	for i := range maxOpenDirs {
		headers = append(headers, tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("many/%d/file", i)},
			tar.Header{Typeflag: tar.TypeLink, Name: fmt.Sprintf("other/%d/link", i), Linkname: fmt.Sprintf("many/%d/file", i)})
	}
	if err := unpackHere(into, tarOf(t, headers...)); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	for name, mode := range map[string]uint32{
		"twice": unix.S_IFREG | 0o4755, "dir": unix.S_IFDIR | 0o755,
		"no/parents": unix.S_IFDIR | 0o755, "dangling": unix.S_IFLNK | 0o777,
	} {
		if err := unix.Lstat(filepath.Join(into, name), &st); err != nil || st.Mode != mode {
			t.Errorf("%s: mode %o, %v; want %o", name, st.Mode, err, mode)
		}
	}
	if err := unix.Lstat(filepath.Join(into, "dir/b"), &st); err != nil || st.Nlink != 2 {
		t.Errorf("hard link: %d links, %v", st.Nlink, err)
	}
	for _, name := range []string{"dev/null", "proc/1"} {
		if ok, err := tree.Exists(filepath.Join(into, name)); ok || err != nil {
			t.Errorf("%s was unpacked (%v)", name, err)
		}
	}
	if b, err := os.ReadFile(victim); err != nil || string(b) != "untouched" {
		t.Errorf("the file outside: %q, %v", b, err)
	}
}

// TestAsDockerTakesThem: what docker takes, and what it makes of it, is the same here.
func TestAsDockerTakesThem(t *testing.T) {
	file := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }
	dir := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeDir, Name: name} }
	link := func(name, to string) tar.Header {
		return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to}
	}
	hard := func(name, to string) tar.Header { return tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to} }
	null := func(name string) tar.Header {
		return tar.Header{Typeflag: tar.TypeChar, Name: name, Devmajor: 1, Devminor: 3}
	}
	for name, c := range map[string]struct {
		entries []tar.Header
		want    string // name and kind of what is there
	}{
		"nothing":          {nil, ""},
		"absolute names":   {[]tar.Header{dir("/"), dir("/a/"), file("/a/b"), file("//c"), hard("/d", "/a/b")}, "a/ a/b c d"},
		"the root":         {[]tar.Header{dir("."), dir("./"), dir(""), file("x")}, "x"},
		"dot dot inside":   {[]tar.Header{dir("a"), file("a/../b"), file("./c/./d/../e")}, "a/ b c/ c/e"},
		"an absolute link": {[]tar.Header{link("a", "/etc/passwd"), hard("b", "a")}, "a@ b@"},
		"file over dir":    {[]tar.Header{dir("a"), file("a")}, "a"},
		"file over tree":   {[]tar.Header{file("a/b/c"), file("a/.wh..wh..opq"), file("a"), file("b")}, "a b"},
		"link over tree":   {[]tar.Header{dir("a/b"), link("a", "c"), file("c")}, "a@ c"},
		"tree over file":   {[]tar.Header{file("a"), dir("a"), file("a/b")}, "a/ a/b"},
		"dir over link":    {[]tar.Header{link("a", ".."), dir("a"), file("a/victim")}, "a/ a/victim"},
		"tree, file, tree": {[]tar.Header{file("a/b/c"), file("a"), dir("a"), dir("a/d"), file("a/d/e")}, "a/ a/d/ a/d/e"},
		"devices and pipes": {[]tar.Header{
			{Typeflag: tar.TypeBlock, Name: "a", Devmajor: 8}, {Typeflag: tar.TypeFifo, Name: "b"}, null("srv/dev/null"),
		}, "srv/ srv/dev/"},
		"pipe over a file": {[]tar.Header{file("a"), {Typeflag: tar.TypeFifo, Name: "a"}, {Typeflag: tar.TypeFifo, Name: "."}}, "a"},
		"link to a device": {[]tar.Header{null("dev/null"), hard("null", "dev/null"), file("x")}, "x"},
		"aufs": {[]tar.Header{
			file(".wh..wh.aufs"), dir(".wh..wh.plnk"), file(".wh..wh.plnk/1.2"), hard("a", ".wh..wh.plnk/1.2"), file("b"),
		}, "b"},
		"attribute": {[]tar.Header{{Typeflag: tar.TypeReg, Name: "a", PAXRecords: map[string]string{
			"SCHILY.xattr.security.selinux": "x", "SCHILY.xattr.trusted.a": "x", "LIBARCHIVE.x": "y", "comment": "z",
		}}}, "a"},
	} {
		t.Run(name, func(t *testing.T) {
			into, victim := outside(t)
			if err := unpackHere(into, tarOf(t, c.entries...)); err != nil {
				t.Fatal(err)
			}
			var got []string
			err := filepath.WalkDir(into, func(p string, d os.DirEntry, err error) error {
				if err != nil || p == into {
					return err
				}
				kind := map[os.FileMode]string{0: "", os.ModeDir: "/", os.ModeSymlink: "@"}[d.Type()]
				got = append(got, strings.TrimPrefix(p, into+"/")+kind)
				return nil
			})
			if s := strings.Join(got, " "); err != nil || s != c.want {
				t.Errorf("unpacked are %q, %v; want %q", s, err, c.want)
			}
			if b, err := os.ReadFile(victim); err != nil || string(b) != "untouched" {
				t.Errorf("the file outside: %q, %v", b, err)
			}
		})
	}
}

// TestReplacedDirectories: a layer that replaces directory after directory is refused, before
// that costs much.
func TestReplacedDirectories(t *testing.T) {
	var all []tar.Header
	for range maxReplaced + 1 {
		all = append(all, tar.Header{Typeflag: tar.TypeReg, Name: "a/b"}, tar.Header{Typeflag: tar.TypeReg, Name: "a"},
			tar.Header{Typeflag: tar.TypeDir, Name: "a"})
	}
	into, _ := outside(t)
	if err := unpackHere(into, tarOf(t, all[:len(all)-3]...)); err != nil {
		t.Error(err)
	}
	if err := unpackHere(into, tarOf(t, all...)); !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "replaces") {
		t.Errorf("one more: %v", err)
	}
}

// TestOpenDirsAreBounded: neither deep names nor many directories hold more
// descriptors than was said.
func TestOpenDirsAreBounded(t *testing.T) {
	deep := []tar.Header{{Typeflag: tar.TypeReg, Name: strings.Repeat("d/", 250) + "f"}}
	var many []tar.Header
	for i := range 2 * maxOpenDirs {
		many = append(many, tar.Header{Typeflag: tar.TypeDir, Name: fmt.Sprintf("%d/in", i)})
	}
	for name, headers := range map[string][]tar.Header{"deep": deep, "many": many} {
		into, _ := outside(t)
		err := tree.WithDir(into, func(fd int) error {
			x := newExtractor(fd, os.Getuid(), layerLimits, nil)
			defer x.close()
			err := x.extract(tarOf(t, headers...))
			if n := len(x.dirs); n > maxOpenDirs+2 {
				t.Errorf("%s: %d directories are open", name, n)
			}
			return err
		})
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := tree.Remove(into); err != nil { // deeper than a path may be long
			t.Error(err)
		}
	}
}
