package bundle

import (
	"bytes"
	"context"
	"crypto/rand"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"aead.dev/minisign"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// signer is a pair of keys of a test. None is in the repository.
type signer struct {
	public Key
	secret minisign.PrivateKey
}

func newSigner(t testing.TB) signer {
	t.Helper()
	public, secret, err := minisign.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return signer{Key{"test.pub", public}, secret}
}

func put(t testing.TB, path, text string, mode fs.FileMode) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

// verifier is a program that stands for sandboxd: it prints its arguments.
const verifier = "#!/bin/sh\n[ \"$*\" = --version ] || echo \"ran $*\"\n"

// files are members, with their content.
var files = []struct {
	source Source
	text   string
	mode   fs.FileMode
}{
	{Source{Member: Member{Name: "documents/README.md", Kind: File}}, "Read me.\n", 0o644},
	{Source{Member: Member{Name: "images/base.tar", Kind: Image}}, strings.Repeat("image ", 1000), 0o600},
	{
		Source{Member: Member{Name: "packages/sandboxd_1.2.3_amd64.deb", Kind: Package, Package: "sandboxd", Version: "1.2.3"}},
		"package", 0o644,
	},
	{Source{Member: Member{Name: "sbom.json", Kind: SBOM}}, "{}", 0o644},
	{Source{Member: Member{Name: "units/empty", Kind: File}}, "", 0o644},
	{Source{Member: Member{Name: "units/start", Kind: File}}, "#!/bin/sh\n", 0o755},
}

func planOf(t testing.TB, key minisign.PrivateKey) Plan {
	t.Helper()
	dir := t.TempDir()
	p := Plan{
		Manifest: Manifest{
			Version: "1.2.3", Commit: "0123abc", OS: "linux", Architecture: runtime.GOARCH,
			Created: time.Unix(1767225600, 0),
		},
		Verifier: put(t, filepath.Join(dir, "verifier"), verifier, 0o755),
		Key:      key,
	}
	for _, f := range files {
		s := f.source
		s.Path = put(t, filepath.Join(dir, "in", s.Name), f.text, f.mode)
		p.Sources = append(p.Sources, s)
	}
	return p
}

// create makes a bundle of files and returns its path.
func create(t testing.TB, by signer) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "test.bundle")
	if err := Create(t.Context(), path, planOf(t, by.secret)); err != nil {
		t.Fatal(err)
	}
	return path
}

func mustOpen(t testing.TB, path string, keys ...Key) *Bundle {
	t.Helper()
	b, err := Open(t.Context(), path, keys)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// refused holds that err has the code, and that its text has each word.
func refused(t testing.TB, err error, code errs.Code, words ...string) {
	t.Helper()
	if !errs.Is(err, code) {
		t.Errorf("%v; want an error of the code %s", err, code)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("no %q in: %v", w, err)
		}
	}
}

func all(Member) bool { return true }

// TestRoundTrip: what goes in comes out.
func TestRoundTrip(t *testing.T) {
	by := newSigner(t)
	path := create(t, by)
	b := mustOpen(t, path, newSigner(t).public, by.public)
	want := planOf(t, by.secret).Manifest
	if b.Version != want.Version || b.Commit != want.Commit || b.OS != want.OS || b.Architecture != want.Architecture ||
		!b.Created.Equal(want.Created) || len(b.Members) != len(files) {
		t.Errorf("%+v", b.Manifest)
	}
	if want := "sandboxd 1.2.3 linux/" + runtime.GOARCH + " test.bundle"; b.Comment != want {
		t.Errorf("the trusted comment is %q, want %q", b.Comment, want)
	}
	if err := b.Check(t.Context()); err != nil {
		t.Error(err)
	}
	out := filepath.Join(t.TempDir(), "out")
	if err := b.Extract(t.Context(), out, all); err != nil {
		t.Fatal(err)
	}
	for i, f := range files {
		got, err := os.ReadFile(filepath.Join(out, f.source.Name))
		if err != nil || string(got) != f.text {
			t.Errorf("%s: %q, %v", f.source.Name, got, err)
		}
		fi, err := os.Stat(filepath.Join(out, f.source.Name))
		want := fs.FileMode(0o644)
		if f.mode&0o100 != 0 {
			want = 0o755
		}
		if err != nil || fi.Mode() != want {
			t.Errorf("%s: %v, %v; want the mode %v", f.source.Name, fi, err, want)
		}
		m := b.Members[i]
		if f.source.Name != m.Name || f.source.Kind != m.Kind || f.source.Package != m.Package || f.source.Version != m.Version {
			t.Errorf("%+v became %+v", f.source, m)
		}
	}
	refused(t, b.Extract(t.Context(), out, all), errs.Exists, out)
	some := filepath.Join(t.TempDir(), "some")
	if err := b.Extract(t.Context(), some, func(m Member) bool { return m.Kind == Image }); err != nil {
		t.Fatal(err)
	}
	if found := tree(t, some); len(found) != 1 || found[0] != "images/base.tar" {
		t.Errorf("extracted %q", found)
	}
}

// tree lists the files below dir.
func tree(t testing.TB, dir string) (found []string) {
	t.Helper()
	err := fs.WalkDir(os.DirFS(dir), ".", func(p string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			found = append(found, p)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestReproducible: equal sources make equal bytes, at another time, in another directory and order.
func TestReproducible(t *testing.T) {
	by := newSigner(t)
	first, err := os.ReadFile(create(t, by))
	if err != nil {
		t.Fatal(err)
	}
	p := planOf(t, by.secret)
	for i, j := 0, len(p.Sources)-1; i < j; i, j = i+1, j-1 {
		p.Sources[i], p.Sources[j] = p.Sources[j], p.Sources[i]
	}
	p.Created = p.Created.In(time.FixedZone("", 3600))
	for _, s := range p.Sources {
		if err := os.Chtimes(s.Path, time.Unix(1, 0), time.Unix(1, 0)); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "test.bundle")
	if err := Create(t.Context(), path, p); err != nil {
		t.Fatal(err)
	}
	second, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first, second) {
		t.Error("two bundles of the same differ")
	}
}

// TestCreateRefuses: what a reader would refuse is not made, and no file is left.
func TestCreateRefuses(t *testing.T) {
	by := newSigner(t)
	for name, c := range map[string]struct {
		change func(*Plan)
		word   string
	}{
		"a name that climbs":   {func(p *Plan) { p.Sources[0].Name = "../x" }, "climbs"},
		"two of one name":      {func(p *Plan) { p.Sources[0].Name = "SBOM.json" }, "have one name"},
		"a file and directory": {func(p *Plan) { p.Sources[0].Name = "units" }, "is a directory of"},
		"no file":              {func(p *Plan) { p.Sources[0].Path += "x" }, "no such file"},
		"a directory":          {func(p *Plan) { p.Sources[0].Path = "/" }, "no regular file"},
		"a device":             {func(p *Plan) { p.Sources[0].Path = "/dev/null" }, "no regular file"},
		"no verifier":          {func(p *Plan) { p.Verifier += "x" }, "verifier"},
		"no version":           {func(p *Plan) { p.Version = "1.2" }, "semantic version"},
		"another architecture": {func(p *Plan) { p.Verifier, p.Architecture = "/proc/self/exe", "arm64" }, "by --verifier"},
	} {
		p := planOf(t, by.secret)
		c.change(&p)
		path := filepath.Join(t.TempDir(), "test.bundle")
		if err := Create(t.Context(), path, p); err == nil || !strings.Contains(err.Error(), c.word) {
			t.Errorf("%s: %v; want %q", name, err, c.word)
		}
		if left := tree(t, filepath.Dir(path)); len(left) > 0 {
			t.Errorf("%s: left %q", name, left)
		}
	}
	if err := Create(t.Context(), filepath.Join(t.TempDir(), "a\nb"), planOf(t, by.secret)); !errs.Is(err, errs.Invalid) {
		t.Errorf("a name of two lines: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Create(ctx, filepath.Join(t.TempDir(), "x"), planOf(t, by.secret)); err == nil {
		t.Error("created after its context ended")
	}
}

// TestPackaged: names of packages say what they are.
func TestPackaged(t *testing.T) {
	for file, want := range map[string]string{
		"sandboxd_1.2.3_amd64.deb":                   "sandboxd 1.2.3",
		"sandboxd-image-base_1%3a1.2.3~rc1_all.deb":  "sandboxd-image-base 1:1.2.3~rc1",
		"sandboxd-1.2.3-1.x86_64.rpm":                "sandboxd 1.2.3-1",
		"sandboxd-image-base-1.2.3~rc1-1.noarch.rpm": "sandboxd-image-base 1.2.3~rc1-1",
		"sandboxd_1.2.3_arm64.deb":                   "",
		"sandboxd-1.2.3-1.aarch64.rpm":               "",
		"sandboxd.deb":                               "",
		"sandboxd.rpm":                               "",
		"x86_64.rpm":                                 "",
		"sandboxd_1.2.3_amd64.tar":                   "",
	} {
		s, err := Packaged("/some/where/"+file, "amd64")
		if want == "" {
			refused(t, err, errs.Invalid, file)
			continue
		}
		if got := s.Package + " " + s.Version; err != nil || got != want || s.Name != "packages/"+file || nameFault(s.Name) != "" {
			t.Errorf("%s: %q, %+v, %v", file, got, s, err)
		}
	}
}

// TestSuits: a bundle for another host, or of an older release, is refused.
func TestSuits(t *testing.T) {
	m := &Manifest{Version: "1.2.3", OS: "linux", Architecture: "amd64"}
	here := Host{OS: "linux", Architecture: "amd64"}
	for installed, older := range map[string]bool{
		"": false, "1.2.3": false, "1.2.2": false, "1.2.3-rc.1": false, "1.2.3+build": false, "0.9.9": false,
		"1.2.4": true, "1.10.0": true, "2.0.0": true, "1.2.4-dev+abc": true,
	} {
		h := here
		h.Installed = installed
		switch err := m.suits(h); {
		case older:
			refused(t, err, errs.WrongState, "1.2.3", installed, "--force")
		case err != nil:
			t.Errorf("%s is installed: %v", installed, err)
		}
		h.Force = true
		if err := m.suits(h); err != nil {
			t.Errorf("%s is installed, by force: %v", installed, err)
		}
	}
	refused(t, m.suits(Host{OS: "linux", Architecture: "arm64", Force: true}), errs.Unsupported, "linux/amd64", "linux/arm64")
	refused(t, m.suits(Host{OS: "plan9", Architecture: "amd64"}), errs.Unsupported, "plan9")
}

// TestDiff: what was added, removed and changed; a package is known by its name, not by its file's.
func TestDiff(t *testing.T) {
	pkg := func(name, version, form, sum string) Member {
		return Member{Name: "packages/" + name + "_" + version + form, Kind: Package, Package: name, Version: version, SHA256: sum}
	}
	old := &Manifest{Members: []Member{
		{Name: "images/base.tar", Kind: Image, SHA256: "1", Size: 10},
		{Name: "images/old.tar", Kind: Image, SHA256: "1"},
		{Name: "sbom.json", Kind: SBOM, SHA256: "1"},
		pkg("sandboxd", "1.0.0", ".deb", "1"),
		pkg("sandboxd", "1.0.0", ".rpm", "1"),
		pkg("same", "1.0.0", ".deb", "1"),
	}}
	next := &Manifest{Members: []Member{
		{Name: "images/base.tar", Kind: Image, SHA256: "2", Size: 12},
		{Name: "images/new.tar", Kind: Image, SHA256: "1"},
		{Name: "sbom.json", Kind: SBOM, SHA256: "1"},
		pkg("sandboxd", "1.1.0", ".deb", "2"),
		pkg("sandboxd", "1.1.0", ".rpm", "2"),
		pkg("same", "1.0.0", ".deb", "1"),
	}}
	var got []string
	for _, c := range Diff(old, next) {
		line := c.Change + " " + c.Kind + " " + c.Name
		if c.Kind == Package {
			line += " " + c.Old.Version + " " + c.New.Version + filepath.Ext(c.New.Name)
		}
		got = append(got, line)
	}
	want := "changed image images/base.tar\nadded image images/new.tar\nremoved image images/old.tar\n" +
		"changed package sandboxd 1.0.0 1.1.0.deb\nchanged package sandboxd 1.0.0 1.1.0.rpm"
	if s := strings.Join(got, "\n"); s != want {
		t.Errorf("%s\nwant:\n%s", s, want)
	}
	if c := Diff(old, old); len(c) != 0 {
		t.Errorf("a bundle differs from itself: %v", c)
	}
}
