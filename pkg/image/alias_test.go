package image

import (
	"os"
	"strings"
	"testing"

	"github.com/pelletier/go-toml/v2"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestAliases: which image each name means, on a host with base and python.
func TestAliases(t *testing.T) {
	s, m := open(t, t.TempDir())
	var err error
	s.cfg.Aliases, err = ParseAliases(map[string]string{
		"ubuntu:*": "base", "python:3*": "python", "python:3.9*": "python:old", "python:3.9.1": "base", "gone:*": "nothing", "off:*": "",
		"opensandbox/code-interpreter:*": "python", "bare": "base",
	})
	if err != nil {
		t.Fatal(err)
	}
	put := func(ref string) {
		t.Helper()
		r, err := ParseReference(ref)
		if err != nil {
			t.Fatal(err)
		}
		m.PutImage(t.Context(), record.Image{
			Name: r.Name, Tag: r.Tag,
			Digest: "sha256:" + strings.Repeat("a", 64),
		}, true) //nolint:errcheck // it is memory
	}
	put("base:latest")
	put("python:latest")
	put("python:old")
	for uri, want := range map[string]string{
		"base": "base:latest", "ubuntu": "base:latest", "ubuntu:latest": "base:latest", "ubuntu:22.04": "base:latest",
		"python": "python:latest", "python:3": "python:latest", "python:3.11-slim": "python:latest", "python:3.12": "python:latest",
		"python:3.9": "python:old", "python:3.9-slim": "python:old", "python:3.9.1": "base:latest",
		"opensandbox/code-interpreter:v1.1.0": "python:latest", "bare": "base:latest", "bare:latest": "base:latest",
	} {
		if i, err := s.Resolve(t.Context(), parsed(uri)); err != nil || i.Ref() != want {
			t.Errorf("%s: %s, %v; want %s", uri, i.Ref(), err, want)
		}
	}
	pinned := "ubuntu@sha256:" + strings.Repeat("a", 64)
	for uri, says := range map[string]string{
		"nginx:latest": "images.aliases", "python:2.7": "images.aliases", "bare:1": "images.aliases", "off": "images.aliases",
		"gone:7": "image build nothing", pinned: "digest", "ubuntu:1@" + strings.TrimPrefix(pinned, "ubuntu@"): "images.aliases",
		"other/ubuntu": "images.aliases",
	} {
		if i, err := s.Resolve(t.Context(), parsed(uri)); !errs.Is(err, errs.NotFound) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %s, %v; want it not to be found, and to read of %q", uri, i.Ref(), err, says)
		}
	}
	// What is here under the very name comes first, and an alias removes nothing.
	put("ubuntu:22.04")
	if i, err := s.Resolve(t.Context(), parsed("ubuntu:22.04")); err != nil || i.Ref() != "ubuntu:22.04" {
		t.Errorf("ubuntu:22.04 is %s, %v", i.Ref(), err)
	}
	if _, err := s.Remove(t.Context(), parsed("ubuntu:20.04")); !errs.Is(err, errs.NotFound) {
		t.Errorf("remove by an alias: %v", err)
	}
	if _, err := s.Resolve(t.Context(), parsed("base")); err != nil {
		t.Errorf("after that: %v", err)
	}
	if got := strings.Join(s.Aliases(record.Image{Name: "base", Tag: "latest"}), " "); got != "bare python:3.9.1 ubuntu:*" {
		t.Errorf("aliases of base: %s", got)
	}
}

// TestDefaultAliases: the names in OpenSandbox's examples mean images that the recipes of
// this repository make. On a host that has not made one, who asks reads how to.
func TestDefaultAliases(t *testing.T) {
	text, err := os.ReadFile("../../internal/config/default.toml")
	if err != nil {
		t.Fatal(err)
	}
	var defaults struct {
		Images struct{ Aliases map[string]string }
	}
	if err := toml.Unmarshal(text, &defaults); err != nil || len(defaults.Images.Aliases) == 0 {
		t.Fatal(defaults, err)
	}
	s, m := open(t, "../../rootfs")
	if s.cfg.Aliases, err = ParseAliases(defaults.Images.Aliases); err != nil {
		t.Fatal(err)
	}
	names := map[string]string{
		"opensandbox/code-interpreter": "code-interpreter", "opensandbox/code-interpreter:latest": "code-interpreter",
		"opensandbox/code-interpreter:v1.0.2": "code-interpreter",
		"code-interpreter":                    "code-interpreter", "python:3.11-slim": "python", "python:3": "python",
		"python:slim": "python",
		"python":      "python",
		"ubuntu":      "base", "ubuntu:24.04": "base", "debian:12-slim": "base",
	}
	for uri, recipe := range names {
		if _, err := s.Resolve(t.Context(), parsed(uri)); uri != recipe &&
			(!errs.Is(err, errs.NotFound) || !strings.Contains(err.Error(), "sandboxctl image build "+recipe+"`")) {
			t.Errorf("%s, before anything is built: %v", uri, err)
		}
	}
	recipes, err := s.Recipes()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range recipes {
		m.PutImage(t.Context(), record.Image{
			Name: name, Tag: DefaultTag,
			Digest: "sha256:" + strings.Repeat("a", 64),
		}, true) //nolint:errcheck // it is memory
	}
	for uri, recipe := range names {
		if i, err := s.Resolve(t.Context(), parsed(uri)); err != nil || i.Ref() != recipe+":latest" {
			t.Errorf("%s: %s, %v; want what the recipe %s makes", uri, i.Ref(), err, recipe)
		}
	}
	for _, a := range s.cfg.Aliases {
		if _, err := s.recipe(a.Image); err != nil {
			t.Errorf("%s stands for %s: %v", a.Name, a.Image, err)
		}
	}
	for _, uri := range []string{"opensandbox/other", "other/code-interpreter", "python:2.7"} {
		if i, err := s.Resolve(t.Context(), parsed(uri)); !errs.Is(err, errs.NotFound) {
			t.Errorf("%s is %s, %v", uri, i.Ref(), err)
		}
	}
}

func TestBadAliases(t *testing.T) {
	for name, image := range map[string]string{
		"Ubuntu": "base", "ubuntu:": "base", "ubuntu*": "base", "*": "base", ":*": "base", "": "base", "ubuntu:*x": "base",
		"ubuntu:**": "base",
		"ubuntu@sha256:" + strings.Repeat("a", 64): "base", "ubuntu": "Base", "debian": "base@sha256:" + strings.Repeat("a", 64),
		"a b": "base",
	} {
		if all, err := ParseAliases(map[string]string{name: image, "good:*": "base"}); err == nil ||
			!strings.Contains(err.Error(), "want NAME") {
			t.Errorf("%q = %q: %+v, %v", name, image, all, err)
		}
	}
}
