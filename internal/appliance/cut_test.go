package appliance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"aead.dev/minisign"

	"github.com/sandboxd/sandboxd/internal/bundle"
	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/upgrade"
	"github.com/sandboxd/sandboxd/internal/upgrade/upgradetest"
	"github.com/sandboxd/sandboxd/internal/versions"
)

// before and next are the versions of the upgrades that are cut.
const before, next = "1.0.0", "1.1.0"

// TestMain is also a process that upgrades, and may be killed there.
func TestMain(m *testing.M) {
	dir := os.Getenv("APPLIANCE_TEST_DIR")
	if dir == "" {
		os.Exit(m.Run())
	}
	if err := upgradeIn(dir); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// upgradeIn upgrades the host in the directory of a bench to next. Its daemon is a few lines: test/e2e
// upgrades the real one.
func upgradeIn(dir string) error {
	key, err := bundle.ReadKey(filepath.Join(dir, "key"))
	if err != nil {
		return err
	}
	r := versions.Root(filepath.Join(dir, "versions-root"))
	running, err := r.Named(versions.Current)
	if err != nil {
		return err
	}
	c, err := upgradetest.Daemon(filepath.Join(dir, "socket"), func() string { return running })
	if err != nil {
		return err
	}
	restart := func(context.Context) (err error) {
		running, err = r.Named(versions.Current)
		return err
	}
	o := Order{
		File: filepath.Join(dir, next+".bundle"), Keys: []bundle.Key{key}, Lacks: func(context.Context) []string { return nil },
		Out: os.Stdout, Work: filepath.Join(dir, "work"),
	}
	return Upgrade(context.Background(), o, upgrade.Change{Root: r, Client: c, Restart: restart, Limit: time.Minute, Out: os.Stdout})
}

// upgrade runs this program as a process that upgrades, and is killed at a failpoint. cut reports whether it
// was killed.
func (b *bench) upgrade(point string) (out string, cut bool) {
	b.t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "APPLIANCE_TEST_DIR="+b.dir, failpoint.Env+"="+point+"=kill")
	said, err := cmd.CombinedOutput()
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if cut = ok && status.Signaled(); err != nil && !cut {
		return string(said) + err.Error(), false
	}
	return string(said), cut
}

// host lets before be current, and makes a bundle of next, which has the package and an image.
func (b *bench) host(r versions.Root) (pkg string) {
	b.t.Helper()
	err := os.MkdirAll(filepath.Dir(r.Dir(before)), 0o755)
	if err == nil {
		err = stage(b.t.Context(), r, before, []string{b.release(before, "'[]'")}, debian{}) // what doctor says: no findings
	}
	if err := errors.Join(err, r.Point(versions.Current, before)); err != nil {
		b.t.Fatal(err)
	}
	pkg = b.release(next, "'[]'")
	b.bundle(next, b.put("base.tar", "image"), pkg)
	b.put("key", b.secret.Public().(minisign.PublicKey).String())
	return pkg
}

// whole fails if a version has not all bytes of its package.
func (b *bench) whole(r versions.Root, version, pkg string) {
	b.t.Helper()
	tmp := b.t.TempDir()
	err := debian{}.unpack(b.t.Context(), pkg, tmp)
	if err == nil {
		err = same(r.Dir(version), filepath.Join(tmp, string(versions.Default), "versions", version))
	}
	if err != nil {
		b.t.Error(err)
	}
}

// TestUpgradePowerCut cuts an upgrade by the copy of a disk that holds what has reached it then. A version
// is there as a whole or not at all, and the same upgrade again does what is left.
func TestUpgradePowerCut(t *testing.T) {
	hosttest.Root(t)
	const half = `\.staged-\d+ `
	for _, c := range []struct {
		at      string // a failpoint, or a program that Upgrade calls
		left    string // matches what lies where versions are
		current string
	}{
		{"stage:sync", `^(` + half + `)?1\.0\.0$`, before},
		{"stage:name", `^` + half + `1\.0\.0$`, before},
		{"upgrade:journal", `^(` + half + `)?1\.0\.0 1\.1\.0$`, before},
		{"upgrade:disarm", `^1\.0\.0 1\.1\.0$`, next},
		{"dpkg", `^1\.0\.0 1\.1\.0$`, next},
		{"sandboxctl", `^1\.0\.0 1\.1\.0$`, next},
	} {
		t.Run(c.at, func(t *testing.T) {
			d := hosttest.NewDisk(t, 32<<20)
			b := benchIn(t, d.Dir)
			r := versions.Root(filepath.Join(b.dir, "versions-root"))
			pkg := b.host(r)
			if !strings.Contains(c.at, ":") {
				b.program(c.at, "exec kill -KILL $PPID") // exec: it has no file of the disk open then
			}
			if err := syncAll(b.dir); err != nil {
				t.Fatal(err)
			}
			if out, cut := b.upgrade(c.at); !cut {
				t.Fatalf("it was not cut: %s", out)
			}
			d.Put(d.Left())
			current, err := r.Named(versions.Current)
			if got := versionsBelow(t, r); err != nil || current != c.current || !regexp.MustCompile(c.left).MatchString(got) {
				t.Errorf("after the cut there is %q, and %q is current, %v", got, current, err)
			}
			if r.Has(next) {
				b.whole(r, next, pkg)
			}
			b.again(r, c.at, pkg)
		})
	}
}

// again upgrades after the cut, and fails if something of the upgrade is missing then, or left over.
func (b *bench) again(r versions.Root, at, pkg string) {
	b.t.Helper()
	if err := os.Remove(filepath.Join(b.dir, "bin", at)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		b.t.Fatal(err)
	}
	b.program("sandboxctl", `echo "$@" >>"`+b.dir+`/calls"`)
	out, _ := b.upgrade("")
	if current, err := r.Named(versions.Current); err != nil || current != next {
		b.t.Errorf("%q is current, %v; it says:\n%s", current, err, out)
	}
	if got := versionsBelow(b.t, r); got != before+" "+next {
		b.t.Errorf("in the end there is %q", got)
	}
	b.whole(r, next, pkg)
	if got := b.installed(); !slices.Equal(got, []string{"sandboxd " + next + " installed"}) {
		b.t.Errorf("installed %q; it says:\n%s", got, out)
	}
	if calls, err := os.ReadFile(filepath.Join(b.dir, "calls")); err != nil || !strings.HasSuffix(string(calls), "/images/base.tar\n") {
		b.t.Errorf("sandboxctl was called: %q, %v; it says:\n%s", calls, err, out)
	}
}
