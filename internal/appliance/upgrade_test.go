package appliance

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/upgrade"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// release makes a package that has a version, whose daemon prints text.
func (b *bench) release(version, text string) string {
	b.t.Helper()
	dir := "sandboxd_" + version + "_all"
	b.put(dir+"/DEBIAN/control", fmt.Sprintf("Package: sandboxd\nVersion: %s\nArchitecture: all\nMaintainer: a <a@example.org>\n"+
		"Description: a\n", version))
	below := dir + "/usr/lib/sandboxd/versions/" + version
	if err := os.Chmod(b.put(below+"/bin/sandboxd", "#!/bin/sh\necho "+text+"\n"), 0o755); err != nil {
		b.t.Fatal(err)
	}
	b.put(below+"/libexec/sandboxd/agent/sandbox-agent", "agent of "+version)
	b.put(below+"/share/sandboxd/schema", "6\n")
	b.put(below+"/share/sandboxd/rootfs/large", strings.Repeat(text, 1<<14))
	path := filepath.Join(b.dir, dir)
	if out, err := exec.Command("dpkg-deb", "--root-owner-group", "-Znone", "--build", path).CombinedOutput(); err != nil {
		b.t.Fatalf("dpkg-deb: %v: %s", err, out)
	}
	return path + ".deb"
}

// versionsBelow lists what lies where versions are.
func versionsBelow(t *testing.T, r versions.Root) string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(r.Dir("x")))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return strings.Join(names, " ")
}

// TestStage: a version of a package is there as a whole or not at all, and is never changed.
func TestStage(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	r := versions.Root(filepath.Join(b.dir, "versions-root"))
	b.put("versions-root/versions/.staged-of-a-killed-program/file", "half")
	one, other := b.release("1.0.0", "one"), b.deb("other", "1.0", "")
	for range 2 { // the second time it is there
		if err := stage(ctx, r, "1.0.0", []string{other, one}, debian{}); err != nil {
			t.Fatal(err)
		}
		if got := versionsBelow(t, r); got != "1.0.0" {
			t.Errorf("there is %q", got)
		}
	}
	if text, err := os.ReadFile(r.Program("1.0.0", "sandboxd")); err != nil || !strings.Contains(string(text), "echo one") {
		t.Errorf("%s, %v", text, err)
	}
	for _, name := range []string{"mitmproxy-ca-cert.pem", "ca-bundle.pem"} {
		if fi, err := os.Stat(filepath.Join(r.Dir("1.0.0"), "libexec/sandboxd/agent", name)); err != nil || fi.Size() != 0 {
			t.Errorf("%s: %v, %v", name, fi, err)
		}
	}
	if err := stage(ctx, r, "1.0.0", []string{b.release("1.0.0", "two")}, debian{}); !errs.Is(err, errs.Exists) {
		t.Errorf("another build of a version that is there: %v", err)
	}
	if text, err := os.ReadFile(r.Program("1.0.0", "sandboxd")); err != nil || !strings.Contains(string(text), "echo one") {
		t.Errorf("it was changed: %s, %v", text, err)
	}
	for version, files := range map[string][]string{"1.1.0": {one}, "1.2.0": {other}, "../up": {one}, "": {one}, "current": {one}} {
		if err := stage(ctx, r, version, files, debian{}); !errs.Is(err, errs.Invalid) {
			t.Errorf("version %q: %v", version, err)
		}
	}
	b.put("damaged.deb", "no package")
	if err := stage(ctx, r, "1.1.0", []string{filepath.Join(b.dir, "damaged.deb")}, debian{}); err == nil {
		t.Error("a damaged package")
	}
	if got := versionsBelow(t, r); got != "1.0.0" {
		t.Errorf("there is %q", got)
	}
}

// TestStageFullDisk: a disk that is full in the middle has no version, and no part of one.
func TestStageFullDisk(t *testing.T) {
	b := newBench(t)
	r := versions.Root(hosttest.SmallDisk(t, "size=128k"))
	if err := os.Mkdir(filepath.Join(string(r), "versions"), 0o755); err != nil {
		t.Fatal(err)
	}
	err := stage(t.Context(), r, "1.0.0", []string{b.release("1.0.0", "sixteenth of a megabyte")}, debian{})
	if err == nil || !strings.Contains(err.Error(), unix.ENOSPC.Error()) && !strings.Contains(err.Error(), "No space left") {
		t.Errorf("a full disk: %v", err)
	}
	if got := versionsBelow(t, r); got != "" {
		t.Errorf("there is %q", got)
	}
}

// TestUpgradeRefuses what cannot be, before anything is written.
func TestUpgradeRefuses(t *testing.T) {
	b := newBench(t)
	r := versions.Root(filepath.Join(b.dir, "versions-root"))
	change := upgrade.Change{Root: r, Out: b.said}
	b.bundle("1.0.0", "", b.release("1.0.0", "one"))
	refuses := func(what string, code errs.Code, words string) {
		t.Helper()
		if err := Upgrade(t.Context(), b.order, change); !errs.Is(err, code) || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", what, err)
		}
	}
	refuses("without a version", errs.WrongState, "bundle install")
	b.put("versions-root/versions/1.1.0/share/sandboxd/schema", "6")
	if err := r.Point(versions.Current, "1.1.0"); err != nil {
		t.Fatal(err)
	}
	refuses("an older release", errs.WrongState, "1.1.0 is installed")
	b.bundle("1.2.0", "", b.release("1.2.0", "next"), b.deb("needy", "1", "Depends: nobody\n"))
	refuses("a dependency that is missing", errs.Unsupported, "the package nobody")
	f, err := os.OpenFile(b.order.File, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteString("x")
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	if err := Upgrade(t.Context(), b.order, change); err == nil {
		t.Error("a changed bundle")
	}
	if got := versionsBelow(t, r); got != "1.1.0" {
		t.Errorf("there is %q", got)
	}
}
