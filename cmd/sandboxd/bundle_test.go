package main

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"aead.dev/minisign"

	"github.com/sandboxd/sandboxd/internal/cli/group"
)

// run runs sandboxd with these arguments and returns what it prints.
func run(args ...string) (string, error) {
	var out strings.Builder
	root := command()
	root.SetOut(&out)
	root.SetErr(io.Discard)
	root.SetArgs(args)
	group.Strict(root)
	err := root.Execute()
	return out.String(), err
}

// TestBundle tells the story of two releases: made, checked, shown, compared, and refused.
func TestBundle(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("SOURCE_DATE_EPOCH", "1767225600")
	public, secret, err := minisign.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	publicText, err := public.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	secretText, err := secret.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"key.pub": string(publicText), "key.sec": string(secretText), "verifier": "#!/bin/sh\n",
		"sandboxd_1.0.0_all.deb": "one", "sandboxd_1.1.0_all.deb": "two, larger",
		"base.tar": strings.Repeat("image", 2000), "docs/a.md": "A", "docs/b/c.md": "C",
		"sbom.json":     `{"components":[{"name":"base","components":[{"name":"bash","version":"2","purl":"pkg:deb/debian/bash@2"}]}]}`,
		"old/sbom.json": `{"components":[{"name":"base","components":[{"name":"bash","version":"1","purl":"pkg:deb/debian/bash@1"}]}]}`,
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(content), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	make := func(version string, more ...string) {
		t.Helper()
		args := []string{
			"bundle", "create", "-o", version + ".bundle", "--key", "key.sec", "--verifier", "verifier", "--release", version,
			"--package", "sandboxd_" + version + "_all.deb", "--file", "documents=docs", "--file", "README=docs/a.md",
		}
		if out, err := run(append(args, more...)...); err != nil || out != version+".bundle\n" {
			t.Fatalf("create: %q, %v", out, err)
		}
	}
	make("1.0.0", "--commit", "0123abc", "--sbom", "old/sbom.json")
	make("1.1.0", "--image", "base.tar", "--sbom", "sbom.json")

	holds := func(out string, err error, words ...string) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range words {
			if !strings.Contains(strings.Join(strings.Fields(out), " "), w) {
				t.Errorf("no %q in:\n%s", w, out)
			}
		}
	}
	out, err := run("bundle", "verify", "1.1.0.bundle", "--key", "key.pub", "--installed", "1.0.0", "--extract", "out")
	holds(out, err, "version: 1.1.0", "for: linux/", "created: 2026-01-01T00:00:00Z", "(key.pub)", "files: 6,")
	if b, err := os.ReadFile("out/documents/b/c.md"); err != nil || string(b) != "C" {
		t.Errorf("extracted %q, %v", b, err)
	}
	out, err = run("bundle", "show", "1.0.0.bundle", "--key", "nobody", "--key", "key.pub")
	if err == nil || !strings.Contains(err.Error(), "no public key nobody") {
		t.Errorf("a key that is missing: %q, %v", out, err)
	}
	out, err = run("bundle", "show", "1.0.0.bundle", "--key", public.String())
	holds(out, err, "commit: 0123abc", "package packages/sandboxd_1.0.0_all.deb 1.0.0 3B 0644", "file README - 1B")
	out, err = run("bundle", "show", "1.0.0.bundle", "--key", "key.pub", "-o", "json")
	var shown struct {
		Version string
		Members []struct{ Name, SHA256 string }
	}
	if err := errors.Join(err, json.Unmarshal([]byte(out), &shown)); err != nil || shown.Version != "1.0.0" || len(shown.Members) != 5 {
		t.Errorf("%s: %v", out, err)
	}
	out, err = run("bundle", "diff", "1.0.0.bundle", "1.1.0.bundle", "--key", "key.pub")
	holds(out, err, "sandboxd 1.0.0 to 1.1.0", "changed package sandboxd 1.0.0 1.1.0 3B 11B", "added image images/base.tar - ",
		"changed sbom sbom/sbom.json", "changed base deb bash 1 2")
	if strings.Contains(out, "README") {
		t.Errorf("what did not change is in:\n%s", out)
	}

	for want, args := range map[string][]string{
		"bundle verify: bundle 1.0.0.bundle is refused: it has sandboxd 1.0.0, and 1.1.0 is installed": {
			"verify", "1.0.0.bundle", "--key", "key.pub", "--installed", "1.1.0",
		},
		"no public key /nowhere/bundle.pub":        {"verify", "1.0.0.bundle", "--key", "/nowhere/bundle.pub"},
		"open the bundle: open none: no such file": {"verify", "none", "--key", "key.pub"},
		"out: it exists":                           {"verify", "1.1.0.bundle", "--key", "key.pub", "--installed", "", "--extract", "out"},
		`--output "yaml"`:                          {"show", "1.0.0.bundle", "-o", "yaml"},
		"want -o FILE":                             {"create"},
		"want NAME=PATH":                           {"create", "-o", "x", "--key", "key.sec", "--file", "docs"},
		"no secret key of minisign":                {"create", "-o", "x", "--key", "key.pub"},
		"is no regular file": {
			"create", "-o", "x", "--key", "key.sec", "--verifier", "verifier", "--image", "/dev/null",
		},
	} {
		if _, err := run(append([]string{"bundle"}, args...)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %q", args, err, want)
		}
	}
	if out, err := run("bundle", "verify", "1.0.0.bundle", "--key", "key.pub", "--installed", "1.1.0", "--force"); err != nil {
		t.Errorf("by force: %s, %v", out, err)
	}
	t.Setenv("SOURCE_DATE_EPOCH", "")
	if _, err := run("bundle", "create", "-o", "x", "--key", "key.sec"); err == nil || !strings.Contains(err.Error(), "git log -1") {
		t.Errorf("without a time: %v", err)
	}
	if left, err := filepath.Glob("*.new"); err != nil || slices.Contains(left, "x") {
		t.Errorf("left %q, %v", left, err)
	}
}
