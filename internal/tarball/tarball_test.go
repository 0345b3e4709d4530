package tarball

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// then is the time of all files that the tests make.
var then = time.Unix(1_700_000_000, 123_456_789)

// build makes what lines say, in a new directory:
//
//	dir/            a directory
//	name=text       a file
//	name->target    a symbolic link
func build(t testing.TB, lines ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, line := range lines {
		var err error
		if name, to, ok := strings.Cut(line, "->"); ok {
			err = os.Symlink(to, filepath.Join(dir, name))
		} else if name, text, ok := strings.Cut(line, "="); ok {
			at := filepath.Join(dir, name)
			err = errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.WriteFile(at, []byte(text), 0o640), os.Chtimes(at, then, then))
		} else {
			err = os.MkdirAll(filepath.Join(dir, line), 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// list says what is in a directory, in the same form.
func list(t *testing.T, dir string) string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(at string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(dir, at)
		switch {
		case err != nil || at == dir:
			return err
		case d.IsDir():
			rel += "/"
		case d.Type()&fs.ModeSymlink != 0:
			to, err := os.Readlink(at)
			if err != nil {
				return err
			}
			rel += "->" + to
		case d.Type().IsRegular():
			b, err := os.ReadFile(at)
			if err != nil {
				return err
			}
			rel += "=" + string(b)
		}
		out = append(out, rel)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// cp copies from a sandbox, as docker cp does.
func cp(src, dst string, follow bool) error { return cpAs(src, dst, follow, Options{Untrusted: true}) }

func cpAs(src, dst string, follow bool, o Options) error {
	s, err := Find(src, follow)
	if err != nil {
		return err
	}
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := s.Pack(w)
		packed <- err
		if _, ok := errors.AsType[LeftOut](err); ok {
			err = nil
		}
		w.CloseWithError(err)
	}()
	err = Place(r, dst, s.Name, o)
	r.Close()
	return errors.Join(err, <-packed)
}

// TestRules is the table of docker cp's manual, and what it says of links.
func TestRules(t *testing.T) {
	for _, c := range []struct {
		name, src, dst string
		there          []string // in the directory of the destination
		want           string   // what it holds then; or the error, after "error: "
	}{
		{"a file to nothing", "f", "new", nil, "new=F"},
		{"a file to nothing that ends in /", "f", "new/", nil, "error: does not exist; create it first"},
		{"a file to a file", "f", "x", []string{"x=old"}, "x=F"},
		{"a file to a file that ends in /", "f", "x/", []string{"x=old"}, "error: not a directory"},
		{"a file to a directory", "f", "d", []string{"d/"}, "d/ d/f=F"},
		{"a file to a directory that ends in /", "f", "d/", []string{"d/"}, "d/ d/f=F"},
		{"a file over a file of the directory", "f", "d", []string{"d/f=old", "d/g=G"}, "d/ d/f=F d/g=G"},
		{"a file to a directory of its name", "f", "d", []string{"d/f/"}, "error: is a directory"},
		{"a file below nothing", "f", "no/new", nil, "error: no does not exist; create it first"},
		{"a directory to nothing", "tree", "new", nil, "new/ new/a=A new/l->a new/sub/ new/sub/b=B"},
		{"a directory to nothing that ends in /", "tree", "new/", nil, "new/ new/a=A new/l->a new/sub/ new/sub/b=B"},
		{"a directory to a file", "tree", "x", []string{"x=old"}, "error: cannot be copied to a file"},
		{"a directory to a directory", "tree", "d", []string{"d/"}, "d/ d/tree/ d/tree/a=A d/tree/l->a d/tree/sub/ d/tree/sub/b=B"},
		{"a directory that ends in /", "tree/", "d", []string{"d/"}, "d/ d/tree/ d/tree/a=A d/tree/l->a d/tree/sub/ d/tree/sub/b=B"},
		{"contents to a directory", "tree/.", "d", []string{"d/"}, "d/ d/a=A d/l->a d/sub/ d/sub/b=B"},
		{"contents to nothing", "tree/.", "new", nil, "new/ new/a=A new/l->a new/sub/ new/sub/b=B"},
		{"contents below nothing", "tree/.", "no/new", nil, "error: no does not exist; create it first"},
		{"contents to a file", "tree/.", "x", []string{"x=old"}, "error: cannot be copied to a file"},
		{
			"a directory over one", "tree", "d",
			[]string{"d/tree/a=old", "d/tree/sub/c=C", "d/tree/z=Z"},
			"d/ d/tree/ d/tree/a=A d/tree/l->a d/tree/sub/ d/tree/sub/b=B d/tree/sub/c=C d/tree/z=Z",
		},
		{"a directory over a file of a directory", "tree", "d", []string{"d/tree=old"}, "error: is not a directory"},
		{"a directory over a link to one", "tree", "d", []string{"e/", "d/", "d/tree->../e"}, "error: is not a directory"},
		{"the contents of a file", "f/.", "d", []string{"d/"}, "error: not a directory"},
		{"a file that ends in /", "f/", "d", []string{"d/"}, "error: not a directory"},
		{"nothing", "none", "d", []string{"d/"}, "error: no such file"},
		{"a link", "trust link", "new", nil, "new->f"},
		{"a link into a directory", "trust link", "d", []string{"d/"}, "d/ d/link->f"},
		{"a link of a guest", "link", "new", nil, "error: it is a symbolic link to \"f\""},
		{"a link of a guest into a directory", "link", "d", []string{"d/"}, "error: -L copies what it leads to"},
		{"a link, followed", "-L link", "d", []string{"d/"}, "d/ d/link=F"},
		{"a link to a directory", "trust dirlink", "new", nil, "new->tree"},
		{"a link to a directory, followed", "-L dirlink", "d", []string{"d/"}, "d/ d/dirlink/ d/dirlink/a=A d/dirlink/l->a " +
			"d/dirlink/sub/ d/dirlink/sub/b=B"},
		{"a link to a directory that ends in /", "dirlink/", "new", nil, "new/ new/a=A new/l->a new/sub/ new/sub/b=B"},
		{"the contents of a link to a directory", "dirlink/.", "d", []string{"d/"}, "d/ d/a=A d/l->a d/sub/ d/sub/b=B"},
		{"a link to nothing", "trust dangling", "new", nil, "new->none"},
		{"a link to nothing, followed", "-L dangling", "new", nil, "error: no such file"},
		{"to a link to a file", "f", "to", []string{"x=old", "to->x"}, "to->x x=F"},
		{"to a link to nothing", "f", "to", []string{"to->x"}, "to->x x=F"},
		{"to a link to a directory", "f", "to", []string{"d/", "to->d"}, "d/ d/f=F to->d"},
		{"to links in a ring", "f", "to", []string{"to->to2", "to2->to"}, "error: too many levels of symbolic links"},
		{"over a link in a directory", "f", "d", []string{"x=old", "d/", "d/f->../x"}, "d/ d/f=F x=old"},
		{"to a parent behind a link", "f", "to/../x", []string{"d/e/", "to->d/e"}, "d/ d/e/ d/x=F to->d/e"},
	} {
		t.Run(c.name, func(t *testing.T) {
			from := build(t, "f=F", "tree/a=A", "tree/sub/b=B", "tree/l->a", "link->f", "dirlink->tree", "dangling->none")
			to := build(t, c.there...)
			before := list(t, to)
			src, follow := strings.CutPrefix(c.src, "-L ")
			src, trusted := strings.CutPrefix(src, "trust ")
			err := cpAs(from+"/"+src, to+"/"+c.dst, follow, Options{Untrusted: !trusted})
			if says, ok := strings.CutPrefix(c.want, "error: "); ok {
				if err == nil || !strings.Contains(err.Error(), says) || list(t, to) != before {
					t.Errorf("error %v; there is %s", err, list(t, to))
				}
				return
			}
			if got := list(t, to); err != nil || got != c.want {
				t.Errorf("%s; %v", got, err)
			}
		})
	}
	to := build(t)
	if err := unix.Mkfifo(to+"/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	from := build(t, "f=F")
	for _, dst := range []string{"/dev/null", to + "/fifo"} {
		if err := cp(from+"/f", dst, false); err == nil || !strings.Contains(err.Error(), "device, pipe or socket") {
			t.Errorf("to %s: %v", dst, err)
		}
	}
}

// TestKept: kinds, modes, times and hard links are as they were, and strange names too.
func TestKept(t *testing.T) {
	long := strings.Repeat("x", 255)
	from := build(t, "d/f=one", "d/new\nline=N", "d/not\xffutf8=U", "d/"+long+"/"+long+"=L", "d/shut/in=I")
	src := from + "/d"
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	do(os.Link(src+"/f", src+"/g"))
	do(os.Symlink("shut/../shut/in", src+"/l"))
	do(unix.Mkfifo(src+"/pipe", 0o604))
	do(os.Chmod(src+"/f", 0o755|fs.ModeSetuid))
	do(os.Truncate(src+"/new\nline", 3<<20)) // with a hole
	do(os.Chmod(src+"/shut", 0o500))
	t.Cleanup(func() { os.Chmod(src+"/shut", 0o700) }) //nolint:errcheck // for TempDir
	for _, name := range []string{"l", "pipe", ".", "shut", long} {
		ts := unix.NsecToTimespec(then.UnixNano())
		do(unix.UtimesNanoAt(unix.AT_FDCWD, src+"/"+name, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
	}
	to := t.TempDir()
	t.Cleanup(func() { os.Chmod(to+"/d/shut", 0o700) }) //nolint:errcheck // for TempDir
	do(cp(src, to, false))
	if got, want := list(t, to+"/d"), list(t, src); got != want {
		t.Errorf("%.2000q, want %.2000q", got, want)
	}
	for name, mode := range map[string]fs.FileMode{
		"f": 0o755, "l": fs.ModeSymlink | 0o777, "pipe": fs.ModeNamedPipe | 0o604, "shut": fs.ModeDir | 0o500, "shut/in": 0o640,
		".": fs.ModeDir | 0o755,
	} {
		fi, err := os.Lstat(filepath.Join(to, "d", name))
		if err != nil || fi.Mode() != mode || !fi.ModTime().Equal(then) {
			t.Errorf("%s: %v %v %v", name, fi.Mode(), fi.ModTime(), err)
		}
	}
	f, err := os.Stat(to + "/d/f")
	g, err2 := os.Stat(to + "/d/g")
	if errors.Join(err, err2) != nil || !os.SameFile(f, g) {
		t.Error("the names of one file are two files")
	}
	hole, err := os.Stat(to + "/d/new\nline")
	if err != nil || hole.Sys().(*syscall.Stat_t).Blocks*512 > 1<<20 {
		t.Errorf("the hole was filled: %v", err)
	}
	// Again, over what is there: the file has two names, and a draft of one is no copy.
	do(os.Chmod(to+"/d/shut", 0o700))
	do(cp(src, to, false))
	if got, want := list(t, to+"/d"), list(t, src); got != want {
		t.Errorf("the second time %.2000q, want %.2000q", got, want)
	}
}

// TestProc: a file whose size the kernel does not know is copied whole.
func TestProc(t *testing.T) {
	to := t.TempDir()
	if err := cp("/proc/self/limits", to, false); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(to + "/limits"); err != nil || !bytes.Contains(b, []byte("Max processes")) {
		t.Errorf("%q %v", b, err)
	}
}

// TestLeftOut: what cannot be copied is named, and the rest is copied.
func TestLeftOut(t *testing.T) {
	from, to := build(t, "d/f=F", "d/z=Z"), t.TempDir()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: from + "/d/sock"}); err != nil {
		t.Fatal(err)
	}
	err = cp(from+"/d", to, false)
	left, ok := errors.AsType[LeftOut](err)
	if !ok || len(left) != 1 || !strings.HasSuffix(left[0], "/d/sock is a socket") {
		t.Error(err)
	}
	if got := list(t, to); got != "d/ d/f=F d/z=Z" {
		t.Error(got)
	}
	many := LeftOut(slices.Repeat([]string{"x"}, 12))
	if !strings.Contains(many.Error(), "and 2 more") {
		t.Error(many)
	}
}

// TestHidden: what is named is not copied, and neither are drafts.
func TestHidden(t *testing.T) {
	from, to := build(t, "d/hollow/x=X", "d/hidden/y=Y", "d/secret=S", "d/f=F", "d/"+DraftPrefix+"1=half"), t.TempDir()
	s, err := Find(from+"/d", false)
	if err != nil {
		t.Fatal(err)
	}
	s.Hollow, s.Hidden = []string{from + "/d/hollow"}, []string{from + "/d/hidden", from + "/d/secret"}
	var b bytes.Buffer
	if err := errors.Join(s.Pack(&b), Place(&b, to, s.Name, Options{})); err != nil {
		t.Fatal(err)
	}
	if got := list(t, to); got != "d/ d/f=F d/hollow/" {
		t.Error(got)
	}
	if s, err = Find(from+"/d/hollow", false); err != nil {
		t.Fatal(err)
	}
	s.Hollow = []string{from + "/d/hollow"} // named itself
	if err := errors.Join(s.Pack(&b), Place(&b, to, s.Name, Options{})); err != nil || !strings.Contains(list(t, to), "hollow/x=X") {
		t.Error(list(t, to), err)
	}
}

// tarOf writes a tar of entries as they are.
func tarOf(t testing.TB, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for _, h := range entries {
		text := ""
		if h.Typeflag == tar.TypeReg {
			text, h.Linkname = h.Linkname, ""
			h.Size = int64(len(text))
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := tw.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		io.WriteString(tw, text) //nolint:errcheck // Close says so
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func fileOf(name, text string) tar.Header {
	return tar.Header{Typeflag: tar.TypeReg, Name: name, Linkname: text}
}

func dirOf(name string) tar.Header { return tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755} }

func linkTo(name, to string) tar.Header {
	return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to}
}

func hardTo(name, to string) tar.Header {
	return tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to}
}

// TestHostile: whatever a guest sends, nothing outside of the destination changes.
func TestHostile(t *testing.T) {
	deep := strings.Repeat("d/", 3000)
	for _, c := range []struct {
		name    string
		entries []tar.Header
		says    string // the error; empty: none
		want    string // what is in the directory above the destination then
	}{
		{"..", []tar.Header{dirOf("x"), fileOf("x/../../evil", "E")}, "outside", "dst/ mine=M"},
		{".. within", []tar.Header{dirOf("x"), fileOf("x/../evil", "E")}, "outside", "dst/ mine=M"},
		{"another name", []tar.Header{dirOf("x"), fileOf("evil", "E")}, "outside", "dst/ mine=M"},
		{"another file", []tar.Header{fileOf("x", "X"), fileOf("mine", "E")}, "", ""},
		{"the file twice", []tar.Header{fileOf("x", "X"), fileOf("x", "E")}, "beside the one", "dst=X mine=M"},
		{"below the file", []tar.Header{fileOf("x", "X"), fileOf("x/y", "E")}, "beside the one", "dst=X mine=M"},
		{"absolute", []tar.Header{dirOf("x"), fileOf("/mine", "E")}, "outside", "dst/ mine=M"},
		{"a root of two parts", []tar.Header{fileOf("x/y", "E")}, "instead of one", "mine=M"},
		{"a root ..", []tar.Header{dirOf("..")}, "outside", "mine=M"},
		{"a file called .", []tar.Header{fileOf(".", "E")}, "instead of one", "mine=M"},
		{
			"through a link",
			[]tar.Header{dirOf("x"), linkTo("x/l", ".."), fileOf("x/l/mine", "E")},
			`"l" is a link to "..", which is outside`,
			"dst/ dst/l/ dst/l/mine=E mine=M",
		},
		{
			"through an absolute link",
			[]tar.Header{dirOf("x"), linkTo("x/l", "/"), fileOf("x/l/tmp/evil", "E")},
			`"l" is a link to "/", which is outside`,
			"dst/ dst/l/ dst/l/tmp/ dst/l/tmp/evil=E mine=M",
		},
		{
			"through a link of links",
			[]tar.Header{dirOf("x"), linkTo("x/a", "b/.."), dirOf("x/b"), linkTo("x/b/..c", "../.."), fileOf("x/b/..c/mine", "E")},
			`"b/..c" is a link to "../..", which is outside`, "dst/ dst/a->b/.. dst/b/ dst/b/..c/ dst/b/..c/mine=E mine=M",
		},
		{
			"through a link within",
			[]tar.Header{dirOf("x"), dirOf("x/d"), linkTo("x/l", "d"), fileOf("x/l/f", "F")},
			"nothing is copied through a link", "dst/ dst/d/ dst/l->d mine=M",
		},
		{
			"a link that is deeper by its name than by its place",
			[]tar.Header{dirOf("x"), linkTo("x/s", "."), linkTo("x/s/s/l", "../../mine")},
			"nothing is copied through a link", "dst/ dst/s->. mine=M",
		},
		{
			"a link out by a link within",
			[]tar.Header{dirOf("x"), linkTo("x/s", "."), linkTo("x/l", "s/s/../mine")},
			`"l" is a link to "s/s/../mine", which is outside`, "dst/ dst/s->. mine=M",
		},
		{
			"a link that waits for a directory, which is a link in the end",
			[]tar.Header{
				dirOf("x"), linkTo("x/l", "s/../f"), linkTo("x/s", "."), linkTo("x/k", "d/../f"), dirOf("x/d"), fileOf("x/f", "F"),
			},
			`"l" is a link to "s/../f", which is outside`, "dst/ dst/d/ dst/f=F dst/k->d/../f dst/s->. mine=M",
		},
		{
			"a link that waits, and a file by its name",
			[]tar.Header{dirOf("x"), linkTo("x/l", "d/../f"), dirOf("x/d"), fileOf("x/l", "L")},
			"", "dst/ dst/d/ dst/l=L mine=M",
		},
		{
			"a hard link that is less deep than its link",
			[]tar.Header{dirOf("x"), dirOf("x/d"), linkTo("x/d/l", "../mine"), hardTo("x/l", "x/d/l")},
			`"l" is a link to "../mine", which is outside`, "dst/ dst/d/ dst/d/l->../mine mine=M",
		},
		{
			"links within",
			[]tar.Header{dirOf("x"), dirOf("x/a"), dirOf("x/a/b"), linkTo("x/a/b/l", "./../../c//f"), linkTo("x/a/m", "b")},
			"", "dst/ dst/a/ dst/a/b/ dst/a/b/l->./../../c//f dst/a/m->b mine=M",
		},
		{"over a link", []tar.Header{dirOf("x"), linkTo("x/l", "../mine"), fileOf("x/l", "E")}, "left out", "dst/ dst/l=E mine=M"},
		{
			"a directory over a link",
			[]tar.Header{dirOf("x"), linkTo("x/l", ".."), dirOf("x/l"), fileOf("x/l/mine", "E")},
			"left out", "dst/ dst/l/ dst/l/mine=E mine=M",
		},
		{"a root that is a link", []tar.Header{linkTo("x", "."), fileOf("x/mine", "E")}, "is a symbolic link", "mine=M"},
		{"a hard link to outside", []tar.Header{dirOf("x"), hardTo("x/h", "../mine")}, "outside", "dst/ mine=M"},
		{"a hard link to an absolute name", []tar.Header{dirOf("x"), hardTo("x/h", "/etc/passwd")}, "outside", "dst/ mine=M"},
		{
			"a hard link through a link",
			[]tar.Header{dirOf("x"), linkTo("x/l", ".."), hardTo("x/h", "x/l/mine")},
			`"h" is a hard link to "x/l/mine", which was not copied`,
			"dst/ mine=M",
		},
		{
			"a hard link to a link",
			[]tar.Header{dirOf("x"), linkTo("x/l", "../mine"), hardTo("x/h", "x/l"), fileOf("x/h", "E")},
			`"h" is a hard link to "x/l", which was not copied`,
			"dst/ dst/h=E mine=M",
		},
		{
			"duplicates",
			[]tar.Header{dirOf("x"), fileOf("x/f", "1"), dirOf("x"), fileOf("x/f", "22"), linkTo("x/f", "g"), fileOf("x/f", "3")},
			"", "dst/ dst/f=3 mine=M",
		},
		{
			"a device",
			[]tar.Header{dirOf("x"), {Typeflag: tar.TypeBlock, Name: "x/sda", Devmajor: 8}, fileOf("x/f", "F")},
			"x/sda is a device", "dst/ dst/f=F mine=M",
		},
		{"a strange type", []tar.Header{dirOf("x"), {Typeflag: 'Z', Name: "x/z"}}, "unknown type", "dst/ mine=M"},
		{"a long name", []tar.Header{dirOf("x"), fileOf("x/"+strings.Repeat("y", 256), "E")}, "file name too long", "dst/ mine=M"},
		{"a deep name", []tar.Header{dirOf("x"), fileOf("x/"+deep+"f", "E")}, "too long", "dst/ mine=M"},
		{"a line break", []tar.Header{dirOf("x"), fileOf("x/a\nb\x1b[2J", "N")}, "", "dst/ dst/a\nb\x1b[2J=N mine=M"},
		{"nothing", nil, "empty", "mine=M"},
	} {
		t.Run(c.name, func(t *testing.T) {
			to := build(t, "mine=M")
			if c.name == "another file" {
				c.says, c.want = "outside", "dst=X mine=M"
			}
			err := Place(bytes.NewReader(tarOf(t, c.entries...)), to+"/dst", "x", Options{Untrusted: true})
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v", err)
			}
			if got := list(t, to); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
	// Modes that a guest has no say in, and a directory that only its owner may not enter.
	to := t.TempDir()
	x := dirOf("x")
	x.Mode = 0o7777
	s := fileOf("x/s", "S")
	s.Mode = 0o6755
	if err := Place(bytes.NewReader(tarOf(t, x, s)), to+"/dst", "x", Options{Untrusted: true}); err != nil {
		t.Fatal(err)
	}
	for name, mode := range map[string]fs.FileMode{"dst": fs.ModeDir | 0o777, "dst/s": 0o755} {
		if fi, err := os.Stat(to + "/" + name); err != nil || fi.Mode() != mode {
			t.Errorf("%s: %v %v", name, fi.Mode(), err)
		}
	}
	if err := Place(bytes.NewReader(tarOf(t, x, s)), to+"/kept", "x", Options{}); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(to + "/kept/s"); err != nil || fi.Mode() != 0o755|fs.ModeSetuid|fs.ModeSetgid {
		t.Errorf("%v %v", fi.Mode(), err)
	}
}

// TestTwice: what a guest sent the first time leads no later copy out of the destination.
func TestTwice(t *testing.T) {
	for name, first := range map[string][]tar.Header{
		"a link": {linkTo("x", "mine")}, "a link to a directory": {linkTo("x", "theirs")}, "a tree": {
			dirOf("x"), linkTo("x/l", "../theirs"), linkTo("x/mine", "../mine"), linkTo("x/up", ".."), dirOf("x/d"),
			linkTo("x/d/up", "../.."), hardTo("x/d/up2", "x/up"), linkTo("x/abs", "/"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			to := build(t, "mine=M", "theirs/f=F")
			o := Options{Untrusted: true}
			if err := Place(bytes.NewReader(tarOf(t, first...)), to+"/dst", "x", o); err == nil {
				t.Error("a link that leads out was copied")
			}
			for _, at := range []string{"", "/l", "/mine", "/up/mine", "/d/up/mine", "/d/up2/mine", "/abs" + to + "/mine", "/l/f"} {
				for _, e := range []tar.Header{fileOf("f", "E"), fileOf("mine", "E")} {
					Place(bytes.NewReader(tarOf(t, e)), to+"/dst"+at, e.Name, o) //nolint:errcheck // most have no directory
				}
			}
			for at, want := range map[string]string{"mine": "M", "theirs/f": "F"} {
				if b, err := os.ReadFile(filepath.Join(to, at)); err != nil || string(b) != want {
					t.Errorf("%s: %q %v", at, b, err)
				}
			}
		})
	}
}

// TestHoles: 512 bytes of a tar may stand for a file of any size.
func TestHoles(t *testing.T) {
	to := t.TempDir()
	tar := sparseTar(1 << 32)
	err := Place(bytes.NewReader(tar), to+"/dst", "x", Options{Untrusted: true})
	if err == nil || !strings.Contains(err.Error(), "holes") || list(t, to) != "" {
		t.Errorf("%v: %s", err, list(t, to))
	}
	if err := Place(bytes.NewReader(sparseTar(1<<20)), to+"/dst", "x", Options{}); err != nil {
		t.Error(err)
	}
	if fi, err := os.Stat(to + "/dst"); err != nil || fi.Size() != 1<<20 {
		t.Errorf("%v %v", fi, err)
	}
}

// sparseTar is a tar of one file that is all hole, in GNU's old format.
func sparseTar(size int64) []byte {
	b := make([]byte, 512*3)
	h := b[:512]
	copy(h, "x")
	copy(h[100:], "0000644\x000000000\x000000000\x00")
	copy(h[124:], fmt.Sprintf("%011o\x00", 0))
	copy(h[136:], fmt.Sprintf("%011o\x00", 0))
	h[156] = 'S'
	copy(h[257:], "ustar  \x00")
	copy(h[386:], fmt.Sprintf("%011o\x00%011o\x00", size, 0)) // one empty piece, at the end
	copy(h[483:], fmt.Sprintf("%011o\x00", size))
	copy(h[148:], "        ")
	sum := 0
	for _, c := range h {
		sum += int(c)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// TestCutOff: a tar that ends anywhere but at its end is an error, and no half file is left.
func TestCutOff(t *testing.T) {
	whole := tarOf(t, dirOf("x"), fileOf("x/a", "A"), fileOf("x/b", strings.Repeat("B", 2000)))
	for n := 0; n < len(whole)-512; n += 256 {
		to := build(t, "dst/a=old", "dst/b=old")
		err := Place(bytes.NewReader(whole[:n]), to+"/dst", ".", Options{})
		if _, ok := errors.AsType[*Broken](err); !ok {
			t.Errorf("%d bytes: %v", n, err)
		}
		got := list(t, to)
		if strings.Contains(got, DraftPrefix) || !strings.Contains(got, "b=old") && !strings.Contains(got, "b="+strings.Repeat("B", 2000)) {
			t.Errorf("%d bytes: %s", n, got)
		}
		if err := Unpack(bytes.NewReader(whole[:n]), to, Options{}); err == nil {
			t.Errorf("%d bytes were unpacked", n)
		}
	}
	if err := Unpack(strings.NewReader("hello, I am no tar"), t.TempDir(), Options{}); err == nil || !strings.Contains(err.Error(), "tar") {
		t.Error(err)
	}
	torn := io.MultiReader(bytes.NewReader(whole[:3000]), failing{})
	if err := Place(torn, t.TempDir(), "x", Options{}); !errors.Is(err, errTorn) {
		t.Error(err)
	}
}

var errTorn = errors.New("torn")

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errTorn }

// TestUnpack: any tar goes into a directory that is there, as by other programs that unpack tars.
func TestUnpack(t *testing.T) {
	to := build(t, "d/", "f=F", "l->d")
	entries := tarOf(t, fileOf("./a/b/c", "C"), dirOf("./a"), fileOf("/abs", "X"), linkTo("z", "/etc"), dirOf("."), hardTo("h", "./a/b/c"))
	if err := Unpack(bytes.NewReader(append(entries, make([]byte, 8192)...)), to+"/l", Options{}); err != nil {
		t.Fatal(err)
	}
	if got := list(t, to); got != "d/ d/a/ d/a/b/ d/a/b/c=C d/abs=X d/h=C d/z->/etc f=F l->d" {
		t.Error(got)
	}
	for dir, says := range map[string]string{"f": "is not a directory", "none": "create it first"} {
		if err := Unpack(bytes.NewReader(entries), to+"/"+dir, Options{}); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", dir, err)
		}
	}
	if err := Unpack(bytes.NewReader(tarOf(t, fileOf("../evil", "E"))), to+"/d", Options{}); err == nil {
		t.Error("a name led out of the directory")
	}
}

// TestChanging: a file that shrinks while it is read, or cannot be read, is an error.
func TestChanging(t *testing.T) {
	from := build(t, "d/f=F")
	s, err := Find(from+"/d/f", false)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(from+"/d/f", 10<<20); err != nil {
		t.Fatal(err)
	}
	once := writerFunc(func(p []byte) (int, error) { return len(p), os.Truncate(from+"/d/f", 1) })
	if err := s.Pack(once); err == nil || !strings.Contains(err.Error(), "became shorter") {
		t.Error(err)
	}
	if os.Getuid() != 0 {
		if err := os.Chmod(from+"/d/f", 0); err != nil {
			t.Fatal(err)
		}
		if err := s.Pack(io.Discard); !errors.Is(err, fs.ErrPermission) {
			t.Error(err)
		}
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// TestFull: a full disk is told from other errors. /dev/full is the kernel's own.
func TestFull(t *testing.T) {
	f, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write([]byte("x")); !DiskFull(err) || DiskFull(fs.ErrPermission) {
		t.Error(err)
	}
}
