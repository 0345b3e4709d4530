package appliance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/bundle"
	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/internal/upgrade"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Upgrade puts the release of a bundle beside the present one, changes to it as c says, and installs
// its packages and images. Begun again after an interruption, it does what is left.
//
// The manager of packages comes last: until the new version is found good, it has the version of
// before, and nothing of it must be undone.
func Upgrade(ctx context.Context, o Order, c upgrade.Change) (err error) {
	b, err := bundle.Open(ctx, o.File, o.Keys)
	if err != nil {
		return err
	}
	defer b.Close()
	current, err := c.Root.Named(versions.Current)
	if err != nil {
		return err
	}
	if current == "" {
		return errs.New(errs.WrongState, "%s has no version: this sandboxd was not installed by a package; use sandboxd bundle install",
			c.Root)
	}
	host := bundle.Host{OS: runtime.GOOS, Architecture: runtime.GOARCH, Installed: current, Force: o.Force}
	if err := b.For(host); err != nil {
		return err
	}
	m, err := managerOf(ctx, b)
	if err != nil {
		return err
	}
	p, err := prepare(ctx, o, b, m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.remove()) }()
	if current != b.Version {
		if c.Lock, err = c.Root.Lock(); err != nil {
			return err
		}
		defer c.Lock.Unlock()
		fmt.Fprintf(o.Out, "putting %s, signed by %s, beside %s\n", b.Version, b.Key.ID(), current)
		if err := stage(ctx, c.Root, b.Version, p.files, m); err != nil {
			return fmt.Errorf("put sandboxd %s beside %s: %w", b.Version, current, err)
		}
		c.To = b.Version
		if err := c.Run(ctx); err != nil {
			return err
		}
	}
	if err := m.install(ctx, p.files, o.Force, o.Out); err != nil {
		return fmt.Errorf("sandboxd %s runs, but its packages are not installed: %w; when the cause is mended, do the same again",
			b.Version, err)
	}
	return images(ctx, b, p.dir, o.Out)
}

// stage puts the version that the packages have where versions are. It is there as a whole, or not
// at all.
func stage(ctx context.Context, r versions.Root, version string, files []string, m manager) (err error) {
	if !versions.Valid(version) {
		return errs.New(errs.Invalid, "the bundle's version %q is no semantic version: it was not made by make bundle", version)
	}
	// A whole directory gets its name by rename(2), so it must be on the same file system.
	all := filepath.Dir(r.Dir(version))
	if err := removeStaged(all); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(all, staged)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	below := filepath.Join(string(versions.Default), "versions", version)
	for _, file := range files {
		if err := m.unpack(ctx, file, tmp); err != nil {
			return err
		}
	}
	dir := filepath.Join(tmp, below)
	if _, err := os.Stat(filepath.Join(dir, "bin/sandboxd")); err != nil {
		return errs.New(errs.Invalid, "no package of the bundle has %s/bin/sandboxd: the bundle is of another form; "+
			"use a newer sandboxd to install it", below)
	}
	if err := mountPoints(filepath.Join(dir, "libexec/sandboxd/agent")); err != nil {
		return err
	}
	if r.Has(version) {
		return same(r.Dir(version), dir)
	}
	for _, do := range []func() error{
		func() error { return failpoint.Pass("stage:sync") }, func() error { return syncAll(tmp) },
		func() error { return failpoint.Pass("stage:name") },
	} {
		if err := do(); err != nil {
			return err
		}
	}
	return durable.Rename(dir, r.Dir(version))
}

// staged begins the names of directories that are not versions yet.
const staged = ".staged-"

// removeStaged removes what an interrupted stage has left.
func removeStaged(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, staged+"*"))
	for _, path := range left {
		err = errors.Join(err, os.RemoveAll(path))
	}
	return err
}

// mountPoints makes the files on which the authority of a sandbox is mounted. The scripts of the
// packages make them, too.
func mountPoints(agent string) error {
	for _, name := range []string{"mitmproxy-ca-cert.pem", "ca-bundle.pem"} {
		f, err := os.OpenFile(filepath.Join(agent, name), os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
	}
	return nil
}

// syncAll writes the file system of dir to the disk.
func syncAll(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return fmt.Errorf("write %s to the disk: %w", dir, err)
	}
	return nil
}

// same fails if a file of fresh is not in dir, or another one.
func same(dir, fresh string) error {
	return filepath.WalkDir(fresh, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || e.Type()&fs.ModeSymlink != 0 {
			return err
		}
		name, err := filepath.Rel(fresh, path)
		if err != nil {
			return err
		}
		equal, err := sameFile(filepath.Join(dir, name), path)
		if err == nil && !equal {
			err = errors.New("it has other bytes")
		}
		if err != nil {
			return errs.New(errs.Exists, "another build of this version is there already, and may be in use: %s: %v; give one of them "+
				"another version number", filepath.Join(dir, name), err)
		}
		return nil
	})
}

func sameFile(one, other string) (bool, error) {
	a, err := os.Open(one)
	if err != nil {
		return false, err
	}
	defer a.Close()
	b, err := os.Open(other)
	if err != nil {
		return false, err
	}
	defer b.Close()
	x, y := make([]byte, 1<<16), make([]byte, 1<<16)
	for {
		n, err := io.ReadFull(a, x)
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return false, err
		}
		k, err := io.ReadFull(b, y)
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return false, err
		}
		if !bytes.Equal(x[:n], y[:k]) {
			return false, nil
		}
		if n == 0 {
			return true, nil
		}
	}
}
