package sbom

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/errs"
	at "github.com/sandboxd/sandboxd/pkg/image/archive/archivetest"
)

func TestMain(m *testing.M) {
	confine.MainOfTest(map[string]confine.Verb{ReadVerb: Read})
	os.Exit(m.Run())
}

// file, link and hard are entries of a layer; dir is one by its final slash.
func file(name, content string) entry {
	return entry{tar.Header{Typeflag: tar.TypeReg, Name: name}, content}
}

func link(name, to string) entry {
	return entry{tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to}, ""}
}

func hard(name, to string) entry {
	return entry{tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to}, ""}
}

// node is a pipe or a device.
func node(kind byte, name string) entry {
	return entry{tar.Header{Typeflag: kind, Name: name, Devmajor: 1, Devminor: 3}, ""}
}

func dir(name string) entry { return entry{tar.Header{Typeflag: tar.TypeDir, Name: name}, ""} }

type entry struct {
	tar.Header
	content string
}

func layerOf(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		e.Size, e.Mode = int64(len(e.content)), 0o644
		must(t, w.WriteHeader(&e.Header))
		_, err := io.WriteString(w, e.content)
		must(t, err)
	}
	must(t, w.Close())
	return b.Bytes()
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// write writes a file of a temporary directory.
func write(t testing.TB, name string, b []byte) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), name)
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(t, os.WriteFile(path, b, 0o644))
	return path
}

const (
	release = "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nID=debian\nVERSION_ID=\"12\"\n"
	status  = `Package: libc6
Status: install ok installed
Maintainer: GNU Libc Maintainers <debian-glibc@lists.debian.org>
Architecture: amd64
Multi-Arch: same
Source: glibc (2.36-9+deb12u9)
Version: 2.36-9+deb12u10
Description: GNU C Library: Shared libraries
 Contains the standard libraries.
 .
 Version: 1 is no field of its own

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1:2.0~rc1-1

Package: half
Status: install reinstreq half-installed
Architecture: all
Version: 1:2.0~rc1-1
`
	wheel = "Metadata-Version: 2.4\nName: Zope.Interface\nVersion: 6.0\nLicense-Expression: MIT OR (Apache-2.0 AND BSD-2-Clause)\n" +
		"Author: A\n Person\n\nName: in the text\n"
)

// archiveOf writes the archive of an image.
func archiveOf(t testing.TB, layers ...[]byte) string {
	t.Helper()
	return write(t, "image.tar", at.Docker(t, at.Image(t, layers...), "team/app:7"))
}

func imageOf(t testing.TB, layers ...[]byte) (Image, error) {
	t.Helper()
	b := at.OCI(t, at.Image(t, layers...))
	return readImage(bytes.NewReader(b), int64(len(b)), "app")
}

// ids are the packages of an image.
func ids(i Image) (all []string) {
	for _, p := range i.Packages {
		all = append(all, strings.TrimPrefix(p.url(i.OS), "pkg:"))
	}
	return all
}

func TestImage(t *testing.T) {
	i, err := imageOf(t,
		layerOf(t, dir("etc/"), file("usr/lib/os-release", release), link("etc/os-release", "../usr/lib/os-release"),
			file("var/lib/dpkg/status", status),
			file("usr/share/doc/libc6/copyright", "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\n"+
				"Files: *\nLicense: LGPL-2.1+\n Text.\n\nFiles: debian/*\nLicense: GPL-2+\n\nLicense: GPL-2+\n Text.\n"),
			link("usr/share/doc/half", "libc6"),
			file("usr/lib/python3/dist-packages/zope.interface-6.0.dist-info/METADATA", wheel),
			file("usr/lib/python3/dist-packages/old.egg-info", "Name: old\nVersion: 1\nLicense: UNKNOWN\n"),
			file("app/node_modules/@team/lib/package.json", `{"name":"@team/lib","version":"1.2.3","license":"MIT"}`),
			file("app/node_modules/@team/lib/dist/package.json", `{"type":"module"}`),
			hard("app/node_modules/linked/package.json", "store/0a"),
			file("store/0a", "")), // see below: the link comes first
		layerOf(t, file("store/0b", `{"name":"linked","version":"2.0.0","licenses":[{"type":"ISC"}]}`),
			hard("app/node_modules/linked/package.json", "store/0b")))
	must(t, err)
	want := []string{
		"deb/debian/half@1:2.0~rc1-1?arch=all&distro=debian-12",
		"deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=debian-12&upstream=glibc%402.36-9%2Bdeb12u9",
		"npm/%40team/lib@1.2.3", "npm/linked@2.0.0", "pypi/zope-interface@6.0", "pypi/old@1",
	}
	if got := ids(i); !slices.Equal(got, want) {
		t.Errorf("packages %q, want %q", got, want)
	}
	var licences []string
	for _, p := range i.Packages {
		licences = append(licences, strings.Join(p.Licences, ", "))
	}
	if want := []string{"GPL-2+, LGPL-2.1+", "GPL-2+, LGPL-2.1+", "MIT", "ISC", "MIT OR (Apache-2.0 AND BSD-2-Clause)", ""}; !slices.Equal(
		licences, want) {
		t.Errorf("licences %q, want %q", licences, want)
	}
	if want := (OS{"debian", "12", "Debian GNU/Linux 12 (bookworm)"}); i.OS != want {
		t.Errorf("the distribution is %+v", i.OS)
	}
	if i.Name != "from-oci:1" || len(i.Layers) != 2 || len(i.Notes) != 0 {
		t.Errorf("image %s, layers %q, notes %q", i.Name, i.Layers, i.Notes)
	}
	must(t, i.check())
}

// TestWhiteouts: what a later layer hides or replaces is not in the image.
func TestWhiteouts(t *testing.T) {
	egg := func(name, version string) entry {
		return file(name, "Name: "+strings.TrimSuffix(filepath.Base(name), ".egg-info")+"\nVersion: "+version+"\n")
	}
	lower := layerOf(t, egg("lib/a.egg-info", "1"), egg("lib/b.egg-info", "1"), egg("lib/sub/c.egg-info", "1"))
	for name, c := range map[string]struct {
		upper []entry
		want  string
	}{
		"nothing":                     {nil, "a@1 b@1 c@1"},
		"a file":                      {[]entry{file("lib/.wh.a.egg-info", "")}, "b@1 c@1"},
		"a directory":                 {[]entry{file("lib/.wh.sub", "")}, "a@1 b@1"},
		"a directory with a slash":    {[]entry{dir("lib/"), dir("lib/sub/")}, "a@1 b@1 c@1"},
		"all of a directory":          {[]entry{file("lib/.wh..wh..opq", "")}, ""},
		"all of it, and a new one":    {[]entry{egg("lib/d.egg-info", "2"), file("lib/.wh..wh..opq", "")}, "d@2"},
		"all of the image":            {[]entry{file(".wh..wh..opq", "")}, ""},
		"what only begins so":         {[]entry{file("lib/.wh.su", ""), file("li/.wh..wh..opq", "")}, "a@1 b@1 c@1"},
		"of aufs":                     {[]entry{file("lib/.wh..wh.aufs", "")}, "a@1 b@1 c@1"},
		"replaced":                    {[]entry{egg("lib/a.egg-info", "2")}, "a@2 b@1 c@1"},
		"hidden and replaced":         {[]entry{egg("lib/a.egg-info", "2"), file("lib/.wh.a.egg-info", "")}, "a@2 b@1 c@1"},
		"a file in place of a tree":   {[]entry{file("lib", "")}, ""},
		"a link in place of a tree":   {[]entry{link("lib", "/usr/lib")}, ""},
		"a directory in place of one": {[]entry{file("lib/a.egg-info/PKG-INFO", "Name: a\nVersion: 3\n")}, "a@3 b@1 c@1"},
		"an empty one in its place":   {[]entry{dir("lib/a.egg-info/")}, "b@1 c@1"},
		"a directory that is implied": {[]entry{file("lib/a.egg-info/SOURCES.txt", "")}, "b@1 c@1"},
		"of a tree, then a file": {
			[]entry{egg("lib/new.egg-info/PKG-INFO/x.egg-info", "2"), egg("lib/new.egg-info", "2")}, "a@1 b@1 c@1 new@2",
		},
		"a pipe in place of one":      {[]entry{node(tar.TypeFifo, "lib/a.egg-info")}, "a@1 b@1 c@1"},
		"a device in place of a tree": {[]entry{node(tar.TypeBlock, "lib"), node(tar.TypeChar, "lib/sub")}, "a@1 b@1 c@1"},
		"a pipe after a new one":      {[]entry{egg("lib/d.egg-info", "2"), node(tar.TypeFifo, "lib/d.egg-info")}, "a@1 b@1 c@1 d@2"},
		"a pipe that needs a tree":    {[]entry{node(tar.TypeFifo, "lib/a.egg-info/pipe")}, "b@1 c@1"},
		"a whiteout that is a pipe":   {[]entry{node(tar.TypeFifo, "lib/.wh.sub")}, "a@1 b@1"},
		"links to what is left out": {
			[]entry{hard("lib/a.egg-info", "/dev/x"), hard("lib/b.egg-info", ".wh..wh.plnk/1.2"), hard("lib/sub", "proc/x")}, "a@1 b@1 c@1",
		},
		"the root as a link":   {[]entry{link(".", "/etc"), node(tar.TypeFifo, ".")}, "a@1 b@1 c@1"},
		"of aufs, at the root": {[]entry{egg(".wh..wh.plnk/d.egg-info", "2"), file(".wh..wh.aufs", "")}, "a@1 b@1 c@1"},
		"below dev and proc":   {[]entry{egg("dev/d.egg-info", "2"), egg("/proc/e.egg-info", "2")}, "a@1 b@1 c@1"},
		"an absolute name":     {[]entry{egg("/lib/../lib/a.egg-info", "2")}, "a@2 b@1 c@1"},
		"the last of two":      {[]entry{egg("lib/a.egg-info", "2"), egg("lib/a.egg-info", "3")}, "a@3 b@1 c@1"},
	} {
		i, err := imageOf(t, lower, layerOf(t, append([]entry{file("upper", "")}, c.upper...)...))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := strings.ReplaceAll(strings.Join(ids(i), " "), "pypi/", ""); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// TestBadImages: what is wrong with one file is a note; what is wrong with the image is an error.
func TestBadImages(t *testing.T) {
	huge := file("a.egg-info", strings.Repeat(" ", int(limits[metadata])+1))
	for name, c := range map[string]struct {
		entries []entry
		want    string // of the note, or of the error
		fails   bool
	}{
		"a status without versions": {
			[]entry{file("var/lib/dpkg/status", "Package: a\nArchitecture: all\n")},
			"/var/lib/dpkg/status: the package at line 1 is left out: \"\" is no version of the package a", false,
		},
		"a status that is no text": {[]entry{file("var/lib/dpkg/status", "\x00\xff\n")}, "line 1 is no field", false},
		"a field twice": {
			[]entry{file("var/lib/dpkg/status", "Package: a\nPackage: b\n")},
			"line 2 has the field Package again", false,
		},
		"a name that climbs":     {[]entry{file("x.dist-info/METADATA", "Name: ../x\nVersion: 1\n")}, "is no name of a package", false},
		"a version of two lines": {[]entry{file("x.dist-info/METADATA", "Name: x\nVersion: 1\n 2\n")}, "is no version", false},
		"a link to metadata":     {[]entry{link("x.dist-info/METADATA", "/etc/passwd")}, "is a link, which is not followed", false},
		"a link to the status": {
			[]entry{link("var/lib/dpkg/status", "../../../etc/passwd")},
			"is a link, which is not followed", false,
		},
		"package.json of an array": {[]entry{file("node_modules/x/package.json", "[]")}, "it is not a JSON object", false},
		"a name that is no text":   {[]entry{file("node_modules/x/package.json", `{"name":7}`)}, "is no name of a package", false},
		"a file too large":         {[]entry{huge}, "more than the", false},
		"an os-release that lies":  {[]entry{file("etc/os-release", "ID=<b>\n")}, "its ID is not a word", false},
		"a file below a link":      {[]entry{link("a", "/etc"), file("a/x.egg-info", "")}, "below \"a\", which is no directory", true},
		"a file below a file":      {[]entry{file("a.egg-info", ""), file("a.egg-info/PKG-INFO", "")}, "which is no directory", true},
		"a hard link to nothing":   {[]entry{hard("x.egg-info", "y")}, "which is no file in it", true},
		"a hard link to itself":    {[]entry{hard("x.egg-info", "x.egg-info")}, "which is no file in it", true},
		"a hard link that climbs":  {[]entry{hard("x.egg-info", "../y")}, "invalid file name", true},
		"a name with ..":           {[]entry{file("a/../../x.egg-info", "")}, "invalid file name", true},
		"an absolute name":         {[]entry{file("/../x.egg-info", "")}, "invalid file name", true},
		"a whiteout of nothing":    {[]entry{file("a/.wh.", "")}, "is not a file name", true},
		"a whiteout of ..":         {[]entry{file("a/.wh...", "")}, "is not a file name", true},
	} {
		i, err := imageOf(t, layerOf(t, c.entries...))
		got := strings.Join(i.Notes, "; ")
		if err != nil {
			got = err.Error()
		}
		if (err != nil) != c.fails || !strings.Contains(got, c.want) || len(i.Packages) > 0 {
			t.Errorf("%s: %q, %v, %v; want %q", name, got, err, ids(i), c.want)
		}
		if err == nil {
			must(t, i.check())
		}
	}
}

// TestDamaged: an archive whose layer is not the one of its config says nothing.
func TestDamaged(t *testing.T) {
	good := at.Docker(t, at.Image(t, layerOf(t, file("x.egg-info", "Name: x\nVersion: 1\n"))), "x:1")
	other := layerOf(t, file("x.egg-info", "Name: x\nVersion: 2\n"))
	bad := at.Edit(t, good, func(h *tar.Header, content []byte) (*tar.Header, []byte) {
		if strings.HasSuffix(h.Name, ".tar.gz") {
			content = other
		}
		return h, content
	})
	for name, b := range map[string][]byte{"changed": bad, "cut": good[:len(good)/2], "text": []byte("no archive"), "empty": {}} {
		path := write(t, "bad.tar", b)
		_, err := Make(t.Context(), Content{Images: []string{path}})
		if err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v; want an error with the file's name", name, err)
		}
	}
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err := w.Write(good)
	must(t, errors.Join(err, w.Close()))
	if _, err := readImage(bytes.NewReader(packed.Bytes()), int64(packed.Len()), "x"); !errs.Is(err, errs.Unsupported) {
		t.Errorf("a compressed archive: %v", err)
	}
	b := layerOf(t, file("x.egg-info", "Name: x\nVersion: 2\n"))
	if i, err := readImage(bytes.NewReader(b), int64(len(b)), "root"); err != nil || i.Name != "root" || len(i.Packages) != 1 {
		t.Errorf("a root file system: %+v, %v", i, err)
	}
}

// TestTooMuch: what an image says has a bound, also over its layers.
func TestTooMuch(t *testing.T) {
	fs := newFiles()
	text := strings.Repeat("x", maxWeight/4)
	for n := range 4 {
		err := fs.put(fmt.Sprint(n), said{notes: []string{text}})
		if (err != nil) != (n == 3) {
			t.Fatalf("file %d: %v", n, err)
		}
	}
	fs.drop("0")
	must(t, fs.put("4", said{notes: []string{text}}))
	// Packages may share one long list of licences.
	fs = newFiles()
	list := slices.Repeat([]string{strings.Repeat("x", maxLicence)}, maxLicences)
	for n := range maxWeight/size(list) + 2 {
		must(t, fs.put(fmt.Sprint(n), said{packages: []Package{{Type: deb, Name: "a"}}}))
	}
	must(t, fs.put("usr/share/doc/a/copyright", said{licences: list}))
	if err := fs.gather(new(Image)); !errors.Is(err, errTooMuch) {
		t.Errorf("shared licences: %v", err)
	}
}

// TestManyLinks: what hard links lead to is read for each of them, also each time that the layer
// has the file. Together that has a bound.
func TestManyLinks(t *testing.T) {
	large := file("a", strings.Repeat(" ", int(limits[metadata])+1)) // too large to be understood, which is quick
	for name, c := range map[string]struct {
		links, files int
		content      entry
		fails        bool
	}{
		"links to a large file": {300, 1, large, true},
		"a large file again":    {150, 2, large, true},
		"many links":            {1000, 1, file("a", "Name: x\nVersion: 1\n"), false},
	} {
		var all []entry
		for n := range c.links {
			all = append(all, hard(fmt.Sprintf("%d.egg-info", n), "a"))
		}
		b := layerOf(t, append(all, slices.Repeat([]entry{c.content}, c.files)...)...)
		fs := newFiles()
		err := fs.add(func() io.ReadCloser { return io.NopCloser(bytes.NewReader(b)) })
		if c.fails != errs.Is(err, errs.Invalid) || c.fails && !strings.Contains(err.Error(), `too many hard links to "a"`) {
			t.Errorf("%s: %v", name, err)
		}
		if !c.fails && len(fs.said) != c.links {
			t.Errorf("%s: %d files say something, %v", name, len(fs.said), err)
		}
	}
}

// TestDpkg compares what is read of the status of this host, and of states that it does not have,
// with what dpkg-query reads of the same file.
func TestDpkg(t *testing.T) {
	host, err := os.ReadFile("/var/lib/dpkg/status")
	must(t, err)
	b := []byte(status)
	for _, state := range []string{
		"install ok unpacked", "deinstall ok half-configured", "install ok triggers-awaited",
		"hold ok triggers-pending", "purge ok not-installed",
	} {
		name := strings.Fields(state)[2]
		b = fmt.Appendf(b, "\nPackage: x-%s\nVersion: 1\nArchitecture: all\nStatus: %s\n", name, state)
		switch name { // dpkg wants to know which
		case "triggers-awaited":
			b = append(b, "Triggers-Awaited: x-triggers-pending\n"...)
		case "triggers-pending":
			b = append(b, "Triggers-Pending: x\n"...)
		}
	}
	for name, b := range map[string][]byte{"host": host, "states": b} {
		admin := filepath.Dir(write(t, "admin/status", b))
		out, err := exec.Command("dpkg-query", "--admindir="+admin, "-W", "-f",
			"${Package} ${Version} ${Architecture} ${source:Package} ${source:Version} ${db:Status-Status}\n").Output()
		must(t, err)
		var want []string
		for line := range strings.Lines(string(out)) {
			f := strings.Fields(line)
			if state := f[5]; state == "not-installed" || state == "config-files" {
				continue
			}
			want = append(want, strings.Join(f[:5], " "))
		}
		found, notes := readStatus(b)
		var got []string
		for _, p := range found {
			if p.Source == "" {
				p.Source = p.Name
			}
			if p.SourceVersion == "" {
				p.SourceVersion = p.Version
			}
			got = append(got, strings.Join([]string{p.Name, p.Version, p.Arch, p.Source, p.SourceVersion}, " "))
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) || len(notes) > 0 || len(got) < 5 {
			t.Errorf("%s: %d packages, dpkg-query has %d; notes %q\n%q\n%q", name, len(got), len(want), notes, got, want)
		}
	}
}

// TestPython compares what is read of packages with what Python's importlib.metadata reads.
func TestPython(t *testing.T) {
	top := t.TempDir()
	for name, text := range map[string]string{
		"a-1.dist-info/METADATA":     wheel,
		"b.egg-info/PKG-INFO":        "Metadata-Version: 1.0\r\nname: b_c.D\r\nVERSION:2.0.post1\r\nLicense: BSD\r\n",
		"c-3.egg-info":               "Name: c\nName: c2\nVersion: 3+deb12u1\n",
		"d-4.dist-info/METADATA":     "Description: of\n two lines\nName: d\nVersion: 4\n\nText\n",
		"e-5.dist-info/METADATA":     "Name: e\nno header\nVersion: 5\n",
		"f-6.dist-info/METADATA":     "Name: f\n\nVersion: 6\n",
		"sub/g-7.dist-info/METADATA": "Name: g\nVersion: 7\n",
	} {
		path := filepath.Join(top, name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, []byte(text), 0o644))
	}
	out, err := exec.Command("python3", "-c", `
import importlib.metadata, json, sys
print(json.dumps({d.metadata["Name"]: d.metadata["Version"] for p in sys.argv[1:] for d in importlib.metadata.distributions(path=[p])}))`,
		top, filepath.Join(top, "sub")).Output()
	must(t, err)
	want := map[string]any{}
	must(t, json.Unmarshal(out, &want))
	maps.DeleteFunc(want, func(_ string, v any) bool { return v == nil }) // no version: a note
	var all []entry
	must(t, filepath.Walk(top, func(p string, fi os.FileInfo, err error) error {
		if err != nil || fi.IsDir() {
			return err
		}
		b, err := os.ReadFile(p)
		rel, _ := filepath.Rel(top, p)
		all = append(all, file("lib/"+rel, string(b)))
		return err
	}))
	i, err := imageOf(t, layerOf(t, all...))
	must(t, err)
	got := map[string]any{}
	for _, p := range i.Packages {
		got[p.Name] = p.Version
	}
	if !maps.Equal(got, want) || len(got) != 5 || len(i.Notes) != 2 {
		t.Errorf("%v, Python has %v; notes %q", got, want, i.Notes)
	}
}

var uuid5Form = regexp.MustCompile(`^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)

// TestMake: a bill of a real program, this one, and of an image is valid, complete and the same twice.
func TestMake(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	content := Content{
		Version: "1.2.3", Time: time.Unix(1e9, 0), Programs: []string{self},
		Images: []string{archiveOf(t,
			layerOf(t, file("etc/os-release", release), file("var/lib/dpkg/status", status), file("a.dist-info/METADATA", wheel),
				file("b/a.dist-info/METADATA", wheel),
				file("var/lib/dpkg/status.d/tzdata", "Package: tzdata\nVersion: 1\nArchitecture: all\n"),
				file("var/lib/dpkg/status.d/tzdata.md5sums", "0  x\n"), file("x.egg-info", "")))},
	}
	b, err := Make(t.Context(), content)
	must(t, err)
	again, err := Make(t.Context(), content)
	must(t, err)
	if !bytes.Equal(b, again) {
		t.Error("the same content gives other bytes")
	}
	valid(t, b)
	var bom cdx.BOM
	must(t, cdx.NewBOMDecoder(bytes.NewReader(b), cdx.BOMFileFormatJSON).Decode(&bom))
	if !uuid5Form.MatchString(bom.SerialNumber) || bom.Metadata.Timestamp != "2001-09-09T01:46:40Z" {
		t.Errorf("%s at %s", bom.SerialNumber, bom.Metadata.Timestamp)
	}
	content.Time = time.Unix(2e9, 0)
	if again, err = Make(t.Context(), content); err != nil || bytes.Contains(again, []byte(bom.SerialNumber)) {
		t.Errorf("other content has the same serial number (%v)", err)
	}
	parts := *bom.Components
	if len(parts) != 2 || parts[0].BOMRef != "image:team/app:7" || parts[1].Name != filepath.Base(self) {
		t.Fatalf("parts %+v", parts)
	}
	ofImage := *parts[0].Components
	if len(ofImage) != 5 || ofImage[0].Type != cdx.ComponentTypeOS || len(*ofImage[4].Evidence.Occurrences) != 2 {
		t.Errorf("the image has %+v", ofImage)
	}
	if p := *parts[0].Properties; len(p) != 2 || !strings.HasPrefix(p[1].Value, "/x.egg-info: it is left out") {
		t.Errorf("properties of the image: %q", p)
	}
	if p := *parts[1].Components; len(p) != 2 || p[0].PackageURL != "pkg:golang/github.com/sandboxd/sandboxd@1.2.3" ||
		p[1].Name != "stdlib" || "go"+p[1].Version != runtime.Version() {
		t.Errorf("this program has %+v", p)
	}
}

// TestProgram: of a program of this build, the modules have the sums of go.sum.
func TestProgram(t *testing.T) {
	hosttest.Root(t) // with which the programs are built
	path := filepath.Join(cmp.Or(os.Getenv("SANDBOXD_BIN"), "../../build/bin"), "sandboxd")
	b, err := Make(t.Context(), Content{Version: "1.2.3", Programs: []string{path}})
	must(t, err)
	valid(t, b)
	var bom cdx.BOM
	must(t, cdx.NewBOMDecoder(bytes.NewReader(b), cdx.BOMFileFormatJSON).Decode(&bom))
	sums, err := os.ReadFile("../../go.sum")
	must(t, err)
	modules := 0
	for _, m := range *(*bom.Components)[0].Components {
		if m.Properties == nil {
			continue
		}
		modules++
		if line := m.Name + " " + m.Version + " " + (*m.Properties)[0].Value; !bytes.Contains(sums, []byte(line+"\n")) {
			t.Errorf("go.sum has no %s", line)
		}
	}
	if modules < 20 {
		t.Errorf("%s has %d modules with sums", path, modules)
	}
}

// TestModule: of what is replaced, the bill says which code is in the program.
func TestModule(t *testing.T) {
	for name, c := range map[string]struct {
		m    debug.Module
		want cdx.Component
	}{
		"a module": {
			debug.Module{Path: "github.com/A/b", Version: "v1.0.0", Sum: "h1:x="},
			cdx.Component{
				Name: "github.com/A/b", Version: "v1.0.0", PackageURL: "pkg:golang/github.com/a/b@v1.0.0",
				Properties: &[]cdx.Property{{Name: "sandboxd:go:sum", Value: "h1:x="}},
			},
		},
		"a directory": {
			debug.Module{Path: "gvisor.dev/gvisor", Version: "v0.0.1", Replace: &debug.Module{Path: "./mended/gvisor"}},
			cdx.Component{
				Name: "gvisor.dev/gvisor", Version: "v0.0.1", PackageURL: "pkg:golang/gvisor.dev/gvisor@v0.0.1",
				Pedigree: &cdx.Pedigree{Notes: "built from a changed copy, ./mended/gvisor"},
			},
		},
		"another": {
			debug.Module{
				Path: "a.example/b", Version: "v1.0.0",
				Replace: &debug.Module{Path: "a.example/c", Version: "v2.0.0", Sum: "h1:y="},
			},
			cdx.Component{
				Name: "a.example/c", Version: "v2.0.0", PackageURL: "pkg:golang/a.example/c@v2.0.0",
				Pedigree:   &cdx.Pedigree{Notes: "used in place of a.example/b v1.0.0"},
				Properties: &[]cdx.Property{{Name: "sandboxd:go:sum", Value: "h1:y="}},
			},
		},
		"ours": {
			debug.Module{Path: ours + "/tools/runsc", Version: "(devel)"},
			cdx.Component{
				Name: ours + "/tools/runsc", Version: "1.2.3", PackageURL: "pkg:golang/github.com/sandboxd/sandboxd/tools/runsc@1.2.3",
			},
		},
	} {
		c.want.Type = cdx.ComponentTypeLibrary
		if got := module(&c.m, "1.2.3"); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

// valid holds a bill against CycloneDX's schema.
func valid(t *testing.T, b []byte) {
	t.Helper()
	c := jsonschema.NewCompiler()
	for _, name := range []string{"bom-1.6.schema.json", "spdx.schema.json", "jsf-0.82.schema.json"} {
		f, err := os.Open(filepath.Join("testdata", name))
		must(t, err)
		doc, err := jsonschema.UnmarshalJSON(f)
		must(t, err)
		must(t, f.Close())
		must(t, c.AddResource("http://cyclonedx.org/schema/"+name, doc))
	}
	s, err := c.Compile("http://cyclonedx.org/schema/bom-1.6.schema.json")
	must(t, err)
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
	must(t, err)
	if err := s.Validate(doc); err != nil {
		t.Errorf("not valid: %v", err)
	}
}

func TestBadPrograms(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	text := write(t, "text", []byte("#!/bin/sh\n"))
	for name, c := range map[string]struct {
		programs []string
		want     string
	}{
		"no program": {[]string{text}, text},
		"absent":     {[]string{text + "2"}, text + "2"},
		"two":        {[]string{self, self}, "there are two of program " + filepath.Base(self)},
	} {
		if _, err := Make(t.Context(), Content{Programs: c.programs}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
}

// TestChild: root has a child read an image, which has no rights.
func TestChild(t *testing.T) {
	hosttest.Root(t)
	path := archiveOf(t, layerOf(t, file("x.egg-info", "Name: x\nVersion: 1\n")))
	b, err := Make(t.Context(), Content{Images: []string{path}})
	must(t, err)
	if !bytes.Contains(b, []byte(`"pkg:pypi/x@1"`)) {
		t.Errorf("%s", b)
	}
	_, err = Make(t.Context(), Content{Images: []string{archiveOf(t, layerOf(t, hard("x.egg-info", "y")))}})
	if err == nil || !strings.Contains(err.Error(), "layer 1 of 1") || !strings.Contains(err.Error(), "which is no file in it") {
		t.Errorf("an error of the child: %v", err)
	}
}

func TestCheck(t *testing.T) {
	good := Package{Type: deb, Name: "x", Version: "1", Arch: "all", At: "/x"}
	for name, i := range map[string]Image{
		"no name":   {},
		"a control": {Name: "a\x1b[0m"},
		"a system":  {Name: "a", OS: OS{ID: "A"}},
		"no type":   {Name: "a", Packages: []Package{{Type: "exe", Name: "x", Version: "1", At: "/x"}}},
		"no file":   {Name: "a", Packages: []Package{{Type: npm, Name: "x", Version: "1"}}},
		"a note":    {Name: "a", Packages: []Package{good}, Notes: []string{"a\nb"}},
	} {
		if i.check() == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	must(t, Image{Name: "a", Packages: []Package{good}}.check())
}

// TestPURL has examples of the specification.
func TestPURL(t *testing.T) {
	for got, want := range map[string]string{
		purl("npm", "@angular/animation", "12.3.1"):                                "pkg:npm/%40angular/animation@12.3.1",
		purl("deb", "debian/curl", "7.50.3-1", "arch", "i386", "distro", "jessie"): "pkg:deb/debian/curl@7.50.3-1?arch=i386&distro=jessie",
		purl("deb", "debian/attr", "1:2.4.47-2", "arch", "source"):                 "pkg:deb/debian/attr@1:2.4.47-2?arch=source",
		purl("golang", "github.com/a/b", "v1.0.0+incompatible", "goos", ""):        "pkg:golang/github.com/a/b@v1.0.0%2Bincompatible",
	} {
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestLicences(t *testing.T) {
	for text, want := range map[string]string{
		"MIT": "id", "GPL-2.0-or-later WITH Classpath-exception-2.0": "expression", "(MIT OR Apache-2.0)": "expression",
		"MIT OR": "name", "MIT)": "name", "(MIT": "name", "MIT Apache-2.0": "name", "SEE LICENSE IN x": "name",
		"GPL-2+": "name", "AND": "name",
		"()": "name",
	} {
		l := (*licences([]string{text}))[0]
		got := "expression"
		switch {
		case l.License != nil && l.License.ID == text:
			got = "id"
		case l.License != nil && l.License.Name == text:
			got = "name"
		case l.Expression != text:
			got = "nothing"
		}
		if got != want {
			t.Errorf("%s is said as %s, want %s", text, got, want)
		}
	}
	if l := *licences([]string{"MIT", "MIT OR ISC"}); len(l) != 2 || l[1].License.Name != "MIT OR ISC" {
		t.Errorf("two: %+v", l)
	}
}
