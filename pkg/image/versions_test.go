package image

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func TestReadVersions(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	r := &Recipe{}
	if got, err := r.readVersions(dir); err != nil || len(got) != 0 {
		t.Errorf("a root without a distribution: %v, %v", got, err)
	}
	write("os-release", "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nVERSION_ID=\"12\"\nVERSION_CODENAME=bookworm\nID=debian\n")
	write("debian_version", "12.11\n")
	write("status", "Package: python3.11\nVersion: 9\n\nPackage: python3\nStatus: install ok installed\nVersion: 3.11.2-1+b1\n\n"+
		"Package: golang-go\nVersion: 2:1.19~1\n\nPackage: npm\nVersion: 9.2.0~ds1-1\n")
	r.Versions = map[string]string{"python": "python3", "go": "golang-go", "npm": "npm"}
	want := map[string]string{
		"sandboxd.version.debian": "12.11 bookworm", "sandboxd.version.python": "3.11.2",
		"sandboxd.version.go": "1.19", "sandboxd.version.npm": "9.2.0",
	}
	if got, err := r.readVersions(dir); err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	write("debian_version", "trixie/sid\n")
	if got, err := r.readVersions(dir); err != nil || got["sandboxd.version.debian"] != "12 bookworm" {
		t.Errorf("without a point release: %v, %v", got, err)
	}
	r.Versions["node"] = "nodejs"
	if _, err := r.readVersions(dir); !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "nodejs") {
		t.Errorf("a package that is not there: %v", err)
	}
}

// TestOtherVersions: an alias whose image is not what the name says is noted, or refused
// if the configuration says so.
func TestOtherVersions(t *testing.T) {
	s, m := open(t, t.TempDir())
	var err error
	s.cfg.Aliases, err = ParseAliases(map[string]string{
		"ubuntu:*": "base", "debian:*": "base", "python:3*": "python", "python:slim*": "python", "old:*": "old",
		"opensandbox/code-interpreter:*": "code-interpreter", "python:3.7": "python", "alpine": "base",
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, labels := range map[string]map[string]string{
		"base":             {"sandboxd.version.debian": "12.11 bookworm"},
		"python":           {"sandboxd.version.debian": "12.11 bookworm", "sandboxd.version.python": "3.11.2"},
		"code-interpreter": {"sandboxd.version.debian": "12.11 bookworm", "sandboxd.version.python": "3.11.2"},
		"old":              nil,
	} {
		err = errors.Join(err, m.PutImage(t.Context(), record.Image{
			Name: name, Tag: DefaultTag, Digest: "sha256:" + strings.Repeat("a", 64), Config: record.ImageConfig{Labels: labels},
		}, true))
	}
	if err != nil {
		t.Fatal(err)
	}
	const (
		base   = "its alias base:latest (debian 12.11) is used instead"
		python = "its alias python:latest (debian 12.11, python 3.11.2) is used instead"
	)
	for uri, want := range map[string]string{
		"base": "", "python": "", "python:latest": "", "old": "",
		"ubuntu": base, "ubuntu:22.04": base, "ubuntu:jammy": base,
		"debian": "", "debian:12": "", "debian:12-slim": "", "debian:12.11": "", "debian:bookworm-slim": "",
		"debian:1": base, "debian:11": base, "debian:bullseye": base, "debian:12.1": base,
		"python:3": "", "python:3.11": "", "python:3.11-slim": "", "python:3.11.2-slim-bookworm": "", "python:slim": "",
		"python:3.13": python, "python:3.1": python, "python:3.11.9": python,
		"opensandbox/code-interpreter": "", "opensandbox/code-interpreter:latest": "",
		"opensandbox/code-interpreter:v1.1.0": "its alias code-interpreter:latest (debian 12.11, python 3.11.2) is used instead",
		"old:2":                               "its alias old:latest (its versions are not recorded) is used instead",
		"python:3.7":                          "", "alpine": "", // the configuration names these very tags
	} {
		ref := parsed(uri)
		i, err := s.Resolve(t.Context(), ref)
		if err != nil {
			t.Errorf("%s: %v", uri, err)
			continue
		}
		if want != "" {
			want = "image " + uri + " is not on this host; " + want
		}
		if got := s.Note(ref, i); got != want {
			t.Errorf("%s: %q, want %q", uri, got, want)
		}
		s.cfg.SameVersions = true
		switch _, err = s.Resolve(t.Context(), ref); {
		case want == "" && err != nil:
			t.Errorf("%s is refused: %v", uri, err)
		case want != "" && (!errs.Is(err, errs.NotFound) || !strings.Contains(err.Error(), "images.other_versions")):
			t.Errorf("%s is not refused: %v", uri, err)
		}
		s.cfg.SameVersions = false
	}
}
