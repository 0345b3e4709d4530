package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"testing/iotest"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image/archive"
	at "github.com/sandboxd/sandboxd/pkg/image/archive/archivetest"
	"github.com/sandboxd/sandboxd/pkg/image/registry"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// memory is a database and a layer store that keep what they must remember.
type memory struct {
	images map[string]record.Image
	layers map[string]bool
	used   map[string]bool
	bad    map[string]bool // name:tag of records that cannot be read
	gone   func()          // after a record went
}

func (m *memory) PutImage(_ context.Context, i record.Image, replace bool) error {
	if was, ok := m.images[i.Ref()]; ok && was.Digest != i.Digest && !replace {
		return record.NotReplaced(i, was.Digest)
	}
	m.images[i.Ref()] = i
	return nil
}

func (m *memory) GetImage(_ context.Context, name, tag string) (record.Image, bool, error) {
	if m.bad[name+":"+tag] {
		return record.Image{}, false, errs.New(errs.Internal, "broken")
	}
	i, ok := m.images[name+":"+tag]
	return i, ok, nil
}

func (m *memory) ListImages(context.Context) (list []record.Image, bad []string, err error) {
	for _, i := range m.images {
		list = append(list, i)
	}
	return list, slices.Sorted(maps.Keys(m.bad)), nil
}

func (m *memory) DeleteImage(_ context.Context, name, tag string) error {
	delete(m.images, name+":"+tag)
	delete(m.bad, name+":"+tag)
	if m.gone != nil {
		m.gone()
	}
	return nil
}

// Stage unpacks nothing; a stage is called after the digest to come.
func (m *memory) Stage(_ context.Context, r io.Reader, progress func(int64)) (stage, digest string, bytes int64, err error) {
	h := sha256.New()
	n, err := io.Copy(h, r)
	if err != nil {
		return "", "", 0, err
	}
	if progress != nil {
		progress(n)
	}
	d := "sha256:" + hex.EncodeToString(h.Sum(nil))
	return "new-" + d, d, n, nil
}

func (m *memory) Commit(_ context.Context, _, digest string) error {
	m.layers[digest] = true
	return nil
}

func (m *memory) Drop(string) error { return nil }
func (m *memory) Room() error       { return nil }

func (m *memory) Read(_ context.Context, digest string, w io.Writer) error {
	_, err := io.WriteString(w, digest)
	return err
}

func (m *memory) ReadStage(ctx context.Context, stage string, w io.Writer) error {
	return m.Read(ctx, strings.TrimPrefix(stage, "new-"), w)
}

func (m *memory) StageHas(string, string) (bool, error) { return false, nil }

func (m *memory) Size(_ context.Context, digest string) (int64, error) {
	if !m.layers[digest] {
		return 0, errs.New(errs.NotFound, "no layer %s", digest)
	}
	return 1, nil
}

func (m *memory) Remove(_ context.Context, digest string) error {
	delete(m.layers, digest)
	return nil
}

func (m *memory) List(context.Context) (list []string, err error) {
	for d := range m.layers {
		list = append(list, d)
	}
	return list, nil
}

func (m *memory) users(layer string) []string {
	if m.used[layer] {
		return []string{"lab"}
	}
	return nil
}

func open(t *testing.T, recipes string) (*Store, *memory) {
	t.Helper()
	m := &memory{images: map[string]record.Image{}, layers: map[string]bool{}, used: map[string]bool{}, bad: map[string]bool{}}
	s, err := Open(Config{Layers: m, DB: m, RecipesDir: recipes, TempDir: filepath.Join(t.TempDir(), "build"), Users: m.users})
	if err != nil {
		t.Fatal(err)
	}
	return s, m
}

// parsed is the reference of a URI, which must be one.
func parsed(uri string) Reference {
	ref, err := ParseReference(uri)
	if err != nil {
		panic(err)
	}
	return ref
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
		want.URI = uri
		if got, err := ParseReference(uri); err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", uri, got, err, want)
		}
	}
	for _, uri := range []string{
		"", ":", "@", "python:", "python@", "Python", "py thon", "../etc", "/etc", "a//b", "a/", "-a", "a:b:c", "a:.b", "a\x00b", "a\n",
		"python@sha256:" + hex64[1:], "python@md5:" + hex64, "python@sha256:" + strings.ToUpper(hex64), "a:" + strings.Repeat("t", 129),
		strings.Repeat("a", 256),
	} {
		if r, err := ParseReference(uri); !errs.Is(err, errs.Invalid) {
			t.Errorf("%q: %+v, %v; want invalid", uri, r, err)
		}
	}
}

// FuzzParseReference: a reference is one that registries' own library reads alike, and it is
// looked up and kept under names that are read back as the same.
func FuzzParseReference(f *testing.F) {
	f.Add("localhost:5000/a/b:c@sha256:" + strings.Repeat("a", 64))
	f.Add("python")
	f.Add("a--b__c/d:T.1-2_")
	f.Fuzz(func(t *testing.T, uri string) {
		r, err := ParseReference(uri)
		if err != nil {
			if !errs.Is(err, errs.Invalid) || len(err.Error()) > 3000 {
				t.Fatal(err)
			}
			return
		}
		if strings.Contains(r.Name+r.Tag, "..") && strings.Contains(r.Name, "/..") || !strings.HasPrefix(uri, r.Name) {
			t.Fatalf("%q parsed as %+v", uri, r)
		}
		again, err := ParseReference(r.String())
		if err != nil || again.canonical() != r.canonical() || again.Kept().Ref() != r.Kept().Ref() {
			t.Fatalf("%q is looked up as %s, which is %+v, %v", uri, r, again, err)
		}
		if kept, err := ParseReference(r.Kept().Ref()); err != nil || kept.Kept().Ref() != r.Kept().Ref() {
			t.Fatalf("%q is kept as %s, which is %+v, %v", uri, r.Kept().Ref(), kept, err)
		}
		if a, err := parseAlias(uri, "python"); err == nil && (r.Digest != "" || a.repo != r.Name || a.any) {
			t.Fatalf("the alias %q is %+v", uri, a)
		}
	})
}

func TestResolveAndRemove(t *testing.T) {
	ctx := t.Context()
	s, m := open(t, "")
	digest := func(c string) string { return "sha256:" + strings.Repeat(c, 64) }
	for _, i := range []record.Image{
		{Name: "python", Tag: "latest", Digest: digest("1"), Layers: []string{"base", "py", "py", "lost"}},
		{Name: "python", Tag: "3.11", Digest: digest("2"), Layers: []string{"base", "py311"}},
	} {
		m.images[i.Ref()] = i
		for _, l := range i.Layers {
			m.layers[l] = true
		}
	}
	delete(m.layers, "lost")
	m.layers["nobody's"], m.layers["of an old build"], m.used["of an old build"] = true, true, true
	for uri, want := range map[string]string{
		"python": digest("1"), "python:3.11": digest("2"), "python@" + digest("2"): digest("2"),
		"python:latest@" + digest("1"): digest("1"),
	} {
		if i, err := s.Resolve(ctx, parsed(uri)); err != nil || i.Digest != want {
			t.Errorf("%s: %s, %v; want %s", uri, i.Digest, err, want)
		}
	}
	for _, uri := range []string{"ruby", "python:2", "python@" + digest("3"), "python:latest@" + digest("2")} {
		if _, err := s.Resolve(ctx, parsed(uri)); !errs.Is(err, errs.NotFound) || !strings.Contains(err.Error(), "sandboxctl image ls") {
			t.Errorf("%s: %v; want not found and what to do", uri, err)
		}
	}
	if _, err := ParseReference("Python"); !errs.Is(err, errs.Invalid) {
		t.Errorf("bad syntax: %v", err)
	}

	m.used["base"], m.used["py"] = true, true
	if _, err := s.Remove(ctx, parsed("python")); !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "lab") {
		t.Errorf("remove in use: %v", err)
	}
	m.used["py"] = false // base is used, but by the other image too
	if p, err := s.Remove(ctx, parsed("python")); err != nil || !slices.Equal(p.Images, []string{"python:latest"}) ||
		!slices.Equal(p.Layers, []string{"py"}) || p.Bytes != 1 {
		t.Errorf("removed %+v, %v", p, err)
	}
	if _, err := s.Remove(ctx, parsed("python")); !errs.Is(err, errs.NotFound) {
		t.Errorf("second remove: %v", err)
	}
	for range 2 {
		if err := s.Sweep(ctx); err != nil {
			t.Error(err)
		}
	}
	left, _ := m.List(ctx)
	slices.Sort(left)
	if want := []string{"base", "of an old build", "py311"}; !slices.Equal(left, want) {
		t.Errorf("layers left: %q, want %q", left, want)
	}

	p, err := s.Prune(ctx, true, time.Time{}) // base is used
	if err != nil || len(p.Images)+len(p.Layers) > 0 {
		t.Errorf("pruned %+v, %v", p, err)
	}
	m.used["base"], m.used["of an old build"] = false, false
	p, err = s.Prune(ctx, false, time.Time{})
	if err != nil || len(p.Images) > 0 || !slices.Equal(p.Layers, []string{"of an old build"}) || p.Bytes != 1 {
		t.Errorf("pruned %+v, %v", p, err)
	}
	made := m.images["python:3.11"]
	made.Created = time.Now()
	m.images["python:3.11"] = made
	p, err = s.Prune(ctx, true, made.Created) // it was not made before that
	if err != nil || len(p.Images)+len(p.Layers) > 0 {
		t.Errorf("pruned %+v, %v", p, err)
	}
	p, err = s.Prune(ctx, true, made.Created.Add(1))
	if err != nil || !slices.Equal(p.Images, []string{"python:3.11"}) || len(p.Layers) != 2 {
		t.Errorf("pruned %+v, %v", p, err)
	}
}

// TestTag: a tag is a name of the same image, and takes another image's name only where
// that is allowed. The layers go with the last name.
func TestTag(t *testing.T) {
	ctx := t.Context()
	s, m := open(t, "")
	m.images["python:latest"] = record.Image{Name: "python", Tag: "latest", Digest: "sha256:1", Layers: []string{"py"}}
	m.images["ruby:latest"] = record.Image{Name: "ruby", Tag: "latest", Digest: "sha256:2", Layers: []string{"rb"}}
	m.layers["py"], m.layers["rb"] = true, true
	for range 2 { // again is as once
		i, err := s.Tag(ctx, parsed("python"), parsed("mine/py:1"), false)
		if err != nil || i.Ref() != "mine/py:1" || i.Digest != "sha256:1" {
			t.Errorf("%+v, %v", i, err)
		}
	}
	_, err := s.Tag(ctx, parsed("python"), parsed("ruby"), false)
	if !errs.Is(err, errs.Denied) || m.images["ruby:latest"].Digest != "sha256:2" {
		t.Errorf("another image's name: %v", err)
	}
	if _, err := s.Tag(ctx, parsed("python"), parsed("ruby"), true); err != nil || m.images["ruby:latest"].Digest != "sha256:1" {
		t.Errorf("another image's name, by an admin: %v", err)
	}
	if _, err := s.Tag(ctx, parsed("nope"), parsed("x"), true); !errs.Is(err, errs.NotFound) {
		t.Errorf("no image: %v", err)
	}
	if _, err := s.Tag(ctx, parsed("python"), parsed("x@sha256:"+strings.Repeat("0", 64)), true); !errs.Is(err, errs.Invalid) {
		t.Errorf("a digest as a name: %v", err)
	}
	for _, c := range []struct {
		name   string
		layers []string
	}{{"python", nil}, {"ruby", nil}, {"mine/py:1", []string{"py"}}} {
		if p, err := s.Remove(ctx, parsed(c.name)); err != nil || !slices.Equal(p.Layers, c.layers) {
			t.Errorf("%s: removed %+v, %v", c.name, p, err)
		}
	}
}

// TestCommit: what was written over an image is an image of one more layer, with the
// config of the first.
func TestCommit(t *testing.T) {
	ctx := t.Context()
	s, m := open(t, "")
	base := record.Image{
		Name: "python", Tag: "latest", Digest: "sha256:1", Layers: []string{"py"},
		Config: record.ImageConfig{Workdir: "/srv", Cmd: []string{"x"}},
	}
	m.images["python:latest"], m.layers["py"] = base, true
	i, err := s.Commit(ctx, base, parsed("mine:1"), false, strings.NewReader("a tar"))
	if err != nil || i.Ref() != "mine:1" || len(i.Layers) != 2 || i.Layers[0] != "py" || i.Config.Workdir != "/srv" ||
		!slices.Equal(i.Config.Cmd, base.Config.Cmd) || m.images["mine:1"].Digest != i.Digest || !m.layers[i.Layers[1]] {
		t.Errorf("%+v, %v", i, err)
	}
	many := record.Image{Layers: make([]string, archive.MaxLayers)}
	for name, c := range map[string]struct {
		base    record.Image
		as      string
		replace bool
		r       io.Reader
		want    errs.Code
	}{
		"another image's name": {base, "python", false, strings.NewReader("other"), errs.Denied},
		"by an admin":          {base, "python", true, strings.NewReader("the admin's"), ""},
		"a digest":             {base, "x@sha256:" + strings.Repeat("0", 64), true, strings.NewReader(""), errs.Invalid},
		"too many layers":      {many, "x", true, strings.NewReader(""), errs.Unsupported},
		"a layer is gone":      {record.Image{Layers: []string{"gone"}}, "x", true, strings.NewReader(""), errs.Internal},
		"a reader that fails":  {base, "x", true, iotest.ErrReader(errs.New(errs.Exhausted, "full")), errs.Exhausted},
	} {
		if _, err := s.Commit(ctx, c.base, parsed(c.as), c.replace, c.r); (err != nil || c.want != "") && !errs.Is(err, c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	if _, made := m.images["x:latest"]; made || len(m.images) != 2 {
		t.Errorf("images %v", m.images)
	}
}

// TestUnreadable: while it is not known which layers an image needs, none is
// removed.
func TestUnreadable(t *testing.T) {
	ctx := t.Context()
	s, m := open(t, "")
	m.bad["python:latest"] = true
	m.images["ruby:latest"] = record.Image{Name: "ruby", Tag: "latest", Digest: "sha256:1", Layers: []string{"shared"}}
	m.layers["shared"], m.layers["python's"] = true, true
	if err := s.Sweep(ctx); err != nil {
		t.Error(err)
	}
	for _, all := range []bool{false, true} {
		if _, err := s.Prune(ctx, all, time.Time{}); !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "python:latest") {
			t.Errorf("prune: %v", err)
		}
	}
	if _, err := s.Remove(ctx, parsed("ruby")); err != nil || len(m.images) > 0 || len(m.layers) != 2 {
		t.Errorf("of the other: %v; layers %v", err, m.layers)
	}
	if _, err := s.Resolve(ctx, parsed("python")); !errs.Is(err, errs.Internal) {
		t.Errorf("resolve: %v", err)
	}
	if _, err := s.Remove(ctx, parsed("python")); err != nil || len(m.bad) > 0 {
		t.Errorf("remove: %v", err)
	}
	if err := s.Sweep(ctx); err != nil || len(m.layers) > 0 {
		t.Errorf("left %v, %v", m.layers, err)
	}
}

// TestUsedMeanwhile has a sandbox begin on an image while that is removed: the
// image is there again, and so are its layers.
func TestUsedMeanwhile(t *testing.T) {
	ctx := t.Context()
	for name, remove := range map[string]func(*Store) error{
		"remove": func(s *Store) error {
			if _, err := s.Remove(ctx, parsed("python")); !errs.Is(err, errs.WrongState) {
				return fmt.Errorf("removed: %w", err)
			}
			return nil
		},
		"prune": func(s *Store) error {
			p, err := s.Prune(ctx, true, time.Time{})
			if len(p.Images)+len(p.Layers) > 0 {
				return fmt.Errorf("pruned %+v", p)
			}
			return err
		},
	} {
		s, m := open(t, "")
		m.images["python:latest"] = record.Image{Name: "python", Tag: "latest", Digest: "sha256:1", Layers: []string{"py"}}
		m.layers["py"] = true
		m.gone = func() { m.used["py"] = true }
		if err := remove(s); err != nil || len(m.images) != 1 || len(m.layers) != 1 {
			t.Errorf("%s: %v; images %v, layers %v", name, err, m.images, m.layers)
		}
	}
}

func TestRecipes(t *testing.T) {
	s, _ := open(t, "../../rootfs")
	names, err := s.Recipes()
	if err != nil || !slices.Equal(names, []string{"base", "code-interpreter", "python"}) {
		t.Errorf("recipes %q, %v", names, err)
	}
	for _, n := range names {
		r, err := s.recipe(n)
		if err != nil || r.Variant != "minbase" || r.Workdir != "/workspace" {
			t.Errorf("%s: %+v, %v", n, r, err)
		}
		has := []string{"bash", "less", "vim-tiny"}
		if n == "code-interpreter" {
			has = append(has, "make", "npm")
		}
		for _, p := range has {
			if !slices.Contains(r.Packages, p) {
				t.Errorf("%s lacks the package %s", n, p)
			}
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
versions = { node = "nodejs" }
suite = "Book worm"`: "\"a b\" is not a valid package name\nversions: want PROGRAM = PACKAGE, a package of packages; got \"node\" = \"nodejs\"\n" +
			"\"rel\" is not an absolute path\nenv \"=x\" is not KEY=VALUE\nworkdir \"here\"",
		`packages = [`: "1| packages = [",
	} {
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, "bad"), 0o755), os.WriteFile(filepath.Join(dir, "bad", "recipe.toml"),
			[]byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
		if _, err := s.recipe("bad"); !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\n%v\nwant %s", text, err, want)
		}
	}
	if _, err := s.Build(t.Context(), "absent", true, io.Discard); !errs.Is(err, errs.NotFound) || !strings.Contains(err.Error(), "bad") {
		t.Errorf("absent recipe: %v", err)
	}
	if _, err := s.Build(t.Context(), "../bad", true, io.Discard); !errs.Is(err, errs.Invalid) {
		t.Errorf("recipe outside: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "bad", "recipe.toml"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", "/nowhere")
	if _, err := s.Build(t.Context(), "bad", true, io.Discard); !errs.Is(err, errs.Unsupported) ||
		!strings.Contains(err.Error(), "apt-get install mmdebstrap") {
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
	if got, err := AptSources(etc, "bookworm"); err != nil || got != want {
		t.Errorf("got\n%s%v\nwant\n%s", got, err, want)
	}
	if _, err := AptSources(etc, "sid"); !errs.Is(err, errs.Unsupported) {
		t.Errorf("suite the host has not: %v", err)
	}
}

// TestCheckPlan: a child that was taken over cannot name more than an honest
// one, nor what is not in the archive.
func TestCheckPlan(t *testing.T) {
	layer := archive.Layer{Span: archive.Span{At: 10, Size: 90}, DiffID: "sha256:" + strings.Repeat("0", 64)}
	plan := func(n int, change func(*archive.Layer)) *archive.Plan {
		l := layer
		change(&l)
		return &archive.Plan{Layers: slices.Repeat([]archive.Layer{l}, n), Config: record.ImageConfig{Workdir: "/"}}
	}
	runs := func(entrypoint, cmd []string) *archive.Plan {
		p := plan(1, func(*archive.Layer) {})
		p.Config.Entrypoint, p.Config.Cmd = entrypoint, cmd
		return p
	}
	if err := checkPlan(runs([]string{"a"}, make([]string, maxArgs-1)), 100); err != nil {
		t.Errorf("a long CMD: %v", err)
	}
	none := func(*archive.Layer) {}
	on := func(platform string) *archive.Plan {
		p := plan(1, func(*archive.Layer) {})
		p.Config.Platform = platform
		return p
	}
	if err := checkPlan(on("linux/arm/v7"), 100); err != nil {
		t.Errorf("of another machine: %v", err)
	}
	keeps := func(name string, size int) *archive.Plan {
		p := plan(1, func(*archive.Layer) {})
		p.Unused = map[string]json.RawMessage{name: json.RawMessage(`"` + strings.Repeat("x", size) + `"`)}
		return p
	}
	stops := plan(1, func(*archive.Layer) {})
	stops.Config.StopSignal = "SIG\x00"
	if err := checkPlan(keeps("OnBuild", maxText-2), 100); err != nil {
		t.Errorf("long triggers: %v", err)
	}
	for _, n := range []int{0, 1, archive.MaxLayers} {
		if err := checkPlan(plan(n, none), 100); err != nil {
			t.Errorf("%d layers: %v", n, err)
		}
	}
	for name, p := range map[string]*archive.Plan{
		"no machine": on("linux/\x1b[2J"),
		"windows":    on("windows/amd64"),
		"no field":   keeps("Cmd", 1),
		"too large":  keeps("OnBuild", maxText),
		"no signal":  stops,
		"many":       plan(archive.MaxLayers+1, none),
		"behind":     plan(1, func(l *archive.Layer) { l.At = 11 }),
		"before":     plan(1, func(l *archive.Layer) { l.At = -1 }),
		"huge":       plan(1, func(l *archive.Layer) { l.Size = 1 << 62 }),
		"too long":   runs([]string{"a"}, []string{strings.Repeat("x", maxArgBytes)}),
		"too many":   runs(make([]string, maxArgs), []string{"x"}),
		"NUL":        runs(nil, []string{"a\x00b"}),
		"not a name": plan(1, func(l *archive.Layer) { l.DiffID = "sha256:../x" }),
	} {
		if err := checkPlan(p, 100); !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// halted is a writer that stands still at its first byte.
type halted struct {
	at   chan struct{}
	once sync.Once
	on   chan struct{}
}

func (h *halted) Write(p []byte) (int, error) {
	h.once.Do(func() { h.at <- struct{}{} })
	<-h.on
	return len(p), nil
}

// TestExportsAtOnce: who comes when there are enough is sent away.
func TestExportsAtOnce(t *testing.T) {
	s, _ := open(t, "")
	i := record.Image{Name: "a", Tag: "b"}
	at, on := make(chan struct{}), make(chan struct{})
	var going sync.WaitGroup
	for range exports {
		going.Go(func() {
			if err := s.Export(t.Context(), i, &halted{at: at, on: on}); err != nil {
				t.Error(err)
			}
		})
	}
	for range exports {
		<-at
	}
	if err := s.Export(t.Context(), i, io.Discard); !errs.Is(err, errs.Unavailable) {
		t.Errorf("beside others: %v", err)
	}
	close(on)
	going.Wait()
	if err := s.Export(t.Context(), i, io.Discard); err != nil {
		t.Errorf("alone: %v", err)
	}
}

// TestNameNotReplaced: without the right, no name that clients use comes to mean another
// image, be it an image's own or an alias; nor does one for which the configuration or a
// recipe has an image that is not here yet, unless that is the one. A pull and the build
// of a recipe bring what the host's administrator chose.
func TestNameNotReplaced(t *testing.T) {
	aliases, err := ParseAliases(map[string]string{
		"ubuntu:*": "base", "ghost": "absent", "spirit:*": "absent:2", "worn": "broken", "alike": "same",
	})
	if err != nil {
		t.Fatal(err)
	}
	recipes := t.TempDir()
	for _, name := range []string{"python", "shell"} {
		if err := errors.Join(os.Mkdir(filepath.Join(recipes, name), 0o755), os.WriteFile(filepath.Join(recipes, name, "recipe.toml"), nil,
			0o644)); err != nil {
			t.Fatal(err)
		}
	}
	client, err := registry.New([]registry.Registry{{Prefix: "registry.example.com/team"}})
	if err != nil {
		t.Fatal(err)
	}
	hub, err := registry.New([]registry.Registry{{Prefix: "", Location: "registry.example.com"}})
	if err != nil {
		t.Fatal(err)
	}
	config := record.ImageConfig{Workdir: "/"}
	same, err := digestOf(nil, config)
	if err != nil {
		t.Fatal(err)
	}
	const exists, kept = "exists on this host", "its name is kept"
	for _, c := range []struct {
		name     string
		from     origin
		hub      bool // a registry for all names without a host
		versions bool // Config.SameVersions
		refused  string
	}{
		{name: "new"},
		{name: "python", refused: exists},
		{name: "same"},
		{name: "broken", refused: exists},
		{name: "ubuntu", refused: exists},
		{name: "ubuntu:22.04", refused: exists},
		{name: "worn", refused: exists},
		{name: "alike"},
		{name: "base:2"},
		{name: "ubuntu:22.04", from: fromRegistry, refused: exists},
		{name: "python", from: fromRecipe, refused: exists},

		{name: "ghost", refused: kept},
		{name: "ghost:1"},
		{name: "spirit:8", refused: kept},
		{name: "absent", refused: kept},
		{name: "absent:2", refused: kept},
		{name: "absent:3"},
		{name: "absent", from: fromRecipe},
		{name: "absent", from: fromRegistry, hub: true},
		{name: "ubuntu:22.04", versions: true, refused: kept},
		{name: "ubuntu:22.04", versions: true, hub: true, from: fromRegistry},

		{name: "shell", refused: kept},
		{name: "shell:2"},
		{name: "shell", from: fromRecipe},
		{name: "shell", from: fromRecipe, hub: true},
		{name: "shell", from: fromRegistry, hub: true},

		{name: "warm:1", refused: kept},
		{name: "warm"},
		{name: "warm:1", from: fromRegistry, hub: true},

		{name: "registry.example.com/team/app:1", refused: kept},
		{name: "registry.example.com/team/app:" + strings.Replace(same, ":", "-", 1), refused: kept},
		{name: "registry.example.com/team/app:1", from: fromRegistry},
		{name: "registry.example.com/other/app:1"},
		{name: "new", hub: true, refused: kept},
		{name: "some/new:1", hub: true, refused: kept},
		{name: "new", hub: true, from: fromRegistry},
		{name: "same", hub: true},
		{name: "localhost/new", hub: true},
	} {
		for _, replace := range []bool{false, true} {
			m := &memory{images: map[string]record.Image{}, layers: map[string]bool{}, bad: map[string]bool{"broken:latest": true}}
			for ref, digest := range map[string]string{"python": "sha256:1", "base": "sha256:2", "same": same} {
				m.images[ref+":latest"] = record.Image{Name: ref, Tag: "latest", Digest: digest}
			}
			s, err := Open(Config{
				Layers: m, DB: m, TempDir: t.TempDir(), Aliases: aliases, RecipesDir: recipes, Pools: []string{"warm:1", "?"},
				Registries: map[bool]*registry.Client{false: client, true: hub}[c.hub], SameVersions: c.versions,
			})
			if err != nil {
				t.Fatal(err)
			}
			i := parsed(c.name).Kept()
			i.Config = config
			_, err = s.name(t.Context(), i, nil, c.from, replace)
			if (c.refused == "" || replace) != (err == nil) || err != nil && (!errs.Is(err, errs.Denied) ||
				!strings.Contains(err.Error(), i.Ref()+" ") || !strings.Contains(err.Error(), "another name") ||
				!strings.Contains(err.Error(), c.refused)) {
				t.Errorf("%+v, replace %v: %v", c, replace, err)
			}
		}
	}
}

// TestKeptNames: no way by which a client gives a name takes one that is kept, and each
// does so for a client that may replace images.
func TestKeptNames(t *testing.T) {
	hosttest.Root(t) // a child reads the archive
	s, m := open(t, "../../rootfs")
	ctx := t.Context()
	base := record.Image{Name: "mine", Tag: DefaultTag, Digest: "sha256:1"}
	m.images[base.Ref()] = base
	kept := parsed("python")
	tar := at.Tar(t, at.File("a"))
	for name, give := range map[string]func(replace bool) (record.Image, error){
		"an import": func(replace bool) (record.Image, error) {
			return s.Import(ctx, Archive{Ref: kept, Replace: replace}, bytes.NewReader(tar), nil)
		},
		"a commit": func(replace bool) (record.Image, error) {
			return s.Commit(ctx, base, kept, replace, bytes.NewReader(tar))
		},
		"a tag": func(replace bool) (record.Image, error) { return s.Tag(ctx, parsed("mine"), kept, replace) },
	} {
		if _, err := give(false); !errors.Is(err, record.ErrNotReplaced) || !strings.Contains(err.Error(), "recipe python") {
			t.Errorf("%s: %v", name, err)
		}
		if _, ok := m.images["python:latest"]; ok {
			t.Errorf("%s: it has the name all the same", name)
		}
		if i, err := give(true); err != nil || i.Ref() != "python:latest" {
			t.Errorf("%s by an admin: %s, %v", name, i.Ref(), err)
		}
		delete(m.images, "python:latest")
	}
}

// TestPinnedName: a name with a digest is no image that has only the tag under which a
// pull would have kept it.
func TestPinnedName(t *testing.T) {
	s, m := open(t, "")
	digest := "sha256:" + strings.Repeat("a", 64)
	pinned := parsed("app:1@" + digest)
	kept := pinned.Kept()
	kept.Digest = "sha256:" + strings.Repeat("b", 64)
	m.images[kept.Ref()] = kept
	if i, err := s.Resolve(t.Context(), pinned); !errs.Is(err, errs.NotFound) {
		t.Errorf("an image by that tag alone: %s, %v", i.Digest, err)
	}
	kept.Sources = []string{digest}
	m.images[kept.Ref()] = kept
	if i, err := s.Resolve(t.Context(), pinned); err != nil || i.Digest != kept.Digest {
		t.Errorf("the one that was pulled: %s, %v", i.Digest, err)
	}
}
