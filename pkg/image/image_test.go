package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// memory is a database and a layer store that keep what they must remember.
type memory struct {
	images map[string]record.Image
	layers map[string]bool
	used   map[string]bool
}

func (m *memory) PutImage(_ context.Context, i record.Image) error {
	m.images[i.Ref()] = i
	return nil
}

func (m *memory) GetImage(_ context.Context, name, tag string) (record.Image, bool, error) {
	i, ok := m.images[name+":"+tag]
	return i, ok, nil
}

func (m *memory) ListImages(context.Context) (list []record.Image, err error) {
	for _, i := range m.images {
		list = append(list, i)
	}
	return list, nil
}

func (m *memory) DeleteImage(_ context.Context, name, tag string) error {
	delete(m.images, name+":"+tag)
	return nil
}

func (m *memory) ImportLayer(_ context.Context, r io.Reader, progress func(int64)) (string, int64, error) {
	h := sha256.New()
	n, err := io.Copy(h, r)
	if err != nil {
		return "", 0, err
	}
	progress(n)
	d := "sha256:" + hex.EncodeToString(h.Sum(nil))
	m.layers[d] = true
	return d, n, nil
}

func (m *memory) RemoveLayer(_ context.Context, digest string) error {
	delete(m.layers, digest)
	return nil
}

func (m *memory) ListLayers(context.Context) (list []string, err error) {
	for d := range m.layers {
		list = append(list, d)
	}
	return list, nil
}

func open(t *testing.T, recipes string) (*Store, *memory) {
	t.Helper()
	m := &memory{images: map[string]record.Image{}, layers: map[string]bool{}, used: map[string]bool{}}
	s, err := Open(Config{Layers: m, DB: m, RecipesDir: recipes, TempDir: filepath.Join(t.TempDir(), "build"), InUse: func(l string) bool { return m.used[l] }})
	if err != nil {
		t.Fatal(err)
	}
	return s, m
}

func TestParseReference(t *testing.T) {
	hex64 := strings.Repeat("0123456789abcdef", 4)
	for uri, want := range map[string]Reference{
		"python":                        {Name: "python"},
		"python:3.11-slim":              {Name: "python", Tag: "3.11-slim"},
		"python@sha256:" + hex64:        {Name: "python", Digest: "sha256:" + hex64},
		"a/b_c:T@sha256:" + hex64:       {Name: "a/b_c", Tag: "T", Digest: "sha256:" + hex64},
		"localhost:5000/x/y":            {Name: "localhost:5000/x/y"},
		"localhost:5000/x/y:latest":     {Name: "localhost:5000/x/y", Tag: "latest"},
		"registry.example.com/team/app": {Name: "registry.example.com/team/app"},
	} {
		if got, err := ParseReference(uri); err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", uri, got, err, want)
		}
	}
	for _, uri := range []string{
		"", ":", "@", "python:", "python@", "Python", "py thon", "../etc", "/etc", "a//b", "a/", "-a", "a:b:c", "a:.b", "a\x00b", "a\n",
		"python@sha256:" + hex64[1:], "python@md5:" + hex64, "python@sha256:" + strings.ToUpper(hex64), "a:" + strings.Repeat("t", 129), strings.Repeat("a", 256),
	} {
		if r, err := ParseReference(uri); !errs.Is(err, errs.Invalid) {
			t.Errorf("%q: %+v, %v; want invalid", uri, r, err)
		}
	}
}

func FuzzParseReference(f *testing.F) {
	f.Add("localhost:5000/a/b:c@sha256:" + strings.Repeat("a", 64))
	f.Fuzz(func(t *testing.T, uri string) {
		r, err := ParseReference(uri)
		if err != nil {
			return
		}
		if strings.Contains(r.Name+r.Tag, "..") && strings.Contains(r.Name, "/..") || !strings.HasPrefix(uri, r.Name) {
			t.Errorf("%q parsed as %+v", uri, r)
		}
	})
}

func TestResolveAndRemove(t *testing.T) {
	ctx := t.Context()
	s, m := open(t, "")
	digest := func(c string) string { return "sha256:" + strings.Repeat(c, 64) }
	for _, i := range []record.Image{
		{Name: "python", Tag: "latest", Digest: digest("1"), Layers: []string{"base", "py"}},
		{Name: "python", Tag: "3.11", Digest: digest("2"), Layers: []string{"base", "py311"}},
	} {
		m.images[i.Ref()] = i
		for _, l := range i.Layers {
			m.layers[l] = true
		}
	}
	m.layers["nobody's"], m.layers["of an old build"], m.used["of an old build"] = true, true, true
	for uri, want := range map[string]string{
		"python": digest("1"), "python:3.11": digest("2"), "python@" + digest("2"): digest("2"), "python:latest@" + digest("1"): digest("1"),
	} {
		if i, err := s.Resolve(ctx, uri); err != nil || i.Digest != want {
			t.Errorf("%s: %s, %v; want %s", uri, i.Digest, err, want)
		}
	}
	for _, uri := range []string{"ruby", "python:2", "python@" + digest("3"), "python:latest@" + digest("2")} {
		if _, err := s.Resolve(ctx, uri); !errs.Is(err, errs.NotFound) || !strings.Contains(err.Error(), "sandboxctl image ls") {
			t.Errorf("%s: %v; want not found and what to do", uri, err)
		}
	}
	if _, err := s.Resolve(ctx, "Python"); !errs.Is(err, errs.Invalid) {
		t.Errorf("bad syntax: %v", err)
	}

	m.used["base"], m.used["py"] = true, true
	if err := s.Remove(ctx, "python"); !errs.Is(err, errs.WrongState) {
		t.Errorf("remove in use: %v", err)
	}
	m.used["py"] = false // base is used, but by the other image too
	if err := s.Remove(ctx, "python"); err != nil {
		t.Error(err)
	}
	if err := s.Remove(ctx, "python"); !errs.Is(err, errs.NotFound) {
		t.Errorf("second remove: %v", err)
	}
	for range 2 {
		if err := s.Sweep(ctx); err != nil {
			t.Error(err)
		}
	}
	left, _ := m.ListLayers(ctx)
	slices.Sort(left)
	if want := []string{"base", "of an old build", "py311"}; !slices.Equal(left, want) {
		t.Errorf("layers left: %q, want %q", left, want)
	}
}

func TestRecipes(t *testing.T) {
	s, _ := open(t, "../../rootfs")
	names, err := s.Recipes()
	if err != nil || !slices.Equal(names, []string{"base", "python"}) {
		t.Errorf("recipes %q, %v", names, err)
	}
	for _, n := range names {
		r, err := s.recipe(n)
		if err != nil || r.Variant != "minbase" || r.Workdir != "/workspace" || !slices.Contains(r.Packages, "bash") {
			t.Errorf("%s: %+v, %v", n, r, err)
		}
	}

	dir := t.TempDir()
	s, _ = open(t, dir)
	for text, want := range map[string]string{
		`package = ["a"]`: "unknown key:\n1| package = ",
		`packages = ["a b"]
workdir = "here"
env = ["=x"]
exclude = ["rel"]
suite = "Book worm"`: "\"a b\" is no package\n\"rel\" is no absolute path\nenv \"=x\" is not KEY=VALUE\nworkdir \"here\"",
		`packages = [`: "1| packages = [",
	} {
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, "bad"), 0o755), os.WriteFile(filepath.Join(dir, "bad", "recipe.toml"), []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
		if _, err := s.recipe("bad"); !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\n%v\nwant %s", text, err, want)
		}
	}
	if _, err := s.Build(t.Context(), "absent", io.Discard); !errs.Is(err, errs.NotFound) || !strings.Contains(err.Error(), "bad") {
		t.Errorf("absent recipe: %v", err)
	}
	if _, err := s.Build(t.Context(), "../bad", io.Discard); !errs.Is(err, errs.Invalid) {
		t.Errorf("recipe outside: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "bad", "recipe.toml"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", "/nowhere")
	if _, err := s.Build(t.Context(), "bad", io.Discard); !errs.Is(err, errs.Unsupported) || !strings.Contains(err.Error(), "apt-get install mmdebstrap") {
		t.Errorf("without mmdebstrap: %v", err)
	}
}

func TestAptSources(t *testing.T) {
	etc := fstest.MapFS{
		"sources.list": {Data: []byte(`# deb http://mirror.test/debian bookworm main
deb [ arch=amd64  signed-by=/k.gpg ] http://mirror.test/debian bookworm main contrib # comment
deb-src http://mirror.test/debian bookworm main
deb http://mirror.test/debian bookworm-backports main
deb http://docker.test/debian bookworm stable
deb http://broken.test
`)},
		"sources.list.d/debian.sources": {Data: []byte(`Types: deb deb-src
# a comment
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates trixie
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://security.test
Suites: bookworm-security
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 -----END PGP PUBLIC KEY BLOCK-----

Enabled: no
Types: deb
URIs: http://off.test
Suites: bookworm
Components: main
`)},
		"sources.list.d/other.list":        {Data: []byte("deb http://mirror.test/debian bookworm-updates main\n")},
		"sources.list.d/off.list.disabled": {Data: []byte("deb http://off.test bookworm main\n")},
	}
	want := `deb [arch=amd64 signed-by=/k.gpg] http://mirror.test/debian bookworm main contrib
deb http://mirror.test/debian bookworm-updates main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.test/debian bookworm main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.test/debian bookworm-updates main
deb http://security.test bookworm-security main
`
	if got, err := aptSources(etc, "bookworm"); err != nil || got != want {
		t.Errorf("got\n%s%v\nwant\n%s", got, err, want)
	}
	if _, err := aptSources(etc, "sid"); !errs.Is(err, errs.Unsupported) {
		t.Errorf("suite the host has not: %v", err)
	}
}
