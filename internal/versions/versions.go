// Package versions is the directory in which versions of sandboxd lie side by side, and the journal
// of a change from one to another.
//
//	ROOT/versions/1.2.0/{bin,libexec,share,systemd}
//	ROOT/current       ─▶ versions/1.2.0   what the service starts
//	ROOT/previous      ─▶ versions/1.1.0   what ran before; a rollback goes there
//	ROOT/undo          ─▶ versions/1.1.0   only while 1.2.0 is on trial or in its soak: the program that can undo it
//	ROOT/upgrade.json                      the journal
//	ROOT/upgrade.lock                      held by the program that changes the version
//	ROOT/upgrade.reserve                   room for an undoing, while a version is on trial or in its soak
//	ROOT/upgrade.running                   a daemon of that version runs, or has crashed
//	ROOT/kept                              only while a package manager replaces a version (kept.go)
//
// A link is replaced by rename(2), so at every moment it names a whole version. A directory is in
// versions when all of it is on disk.
package versions

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/mod/semver"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Default is where packages put versions.
const Default Root = "/usr/lib/sandboxd"

// Root is a directory that has versions.
type Root string

// Link is the name of a link to a version.
type Link string

const (
	Current  Link = "current"
	Previous Link = "previous"
	Undo     Link = "undo"
)

// Version is one that is there.
type Version struct {
	Name string
	// Schema is the newest schema of the state that it reads; 0: it does not say.
	Schema int
}

// Of returns the root and the version that a program belongs to. ok is false for one that lies
// elsewhere, such as in build/bin of a checkout.
func Of(program string) (r Root, version string, ok bool) {
	bin, _ := filepath.Split(program)
	dir := filepath.Dir(filepath.Clean(bin))
	all := filepath.Base(filepath.Dir(dir)) // kept has the links by which a replaced version settles
	if filepath.Base(filepath.Clean(bin)) != "bin" || all != "versions" && all != "kept" || !Valid(filepath.Base(dir)) {
		return "", "", false
	}
	return Root(filepath.Dir(filepath.Dir(dir))), filepath.Base(dir), true
}

// Own is Of for the program that runs.
func Own() (r Root, version string, ok bool) {
	self, err := os.Executable()
	if err != nil {
		return "", "", false
	}
	return Of(strings.TrimSuffix(self, " (deleted)"))
}

// Valid reports whether name is a semantic version without a leading "v", and so a safe name of a
// directory.
func Valid(name string) bool { return semver.IsValid("v"+name) && strings.Count(name, ".") >= 2 }

// Dir is the directory of a version.
func (r Root) Dir(version string) string { return filepath.Join(string(r), "versions", version) }

// Program is a program of a version.
func (r Root) Program(version, name string) string { return filepath.Join(r.Dir(version), "bin", name) }

// Has reports whether the version is there.
func (r Root) Has(version string) bool {
	fi, err := os.Stat(r.Dir(version))
	return Valid(version) && err == nil && fi.IsDir()
}

// List returns the versions that are there, the newest first.
func (r Root) List() (all []Version, err error) {
	entries, err := os.ReadDir(filepath.Join(string(r), "versions"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list the versions: %w", err)
	}
	for _, e := range entries {
		if !e.IsDir() || !Valid(e.Name()) {
			continue
		}
		schema, err := r.Schema(e.Name())
		if err != nil {
			return nil, err
		}
		all = append(all, Version{e.Name(), schema})
	}
	slices.SortFunc(all, func(a, b Version) int { return semver.Compare("v"+b.Name, "v"+a.Name) })
	return all, nil
}

// Schema returns the newest schema of the state that a version reads; 0: it does not say.
func (r Root) Schema(version string) (int, error) {
	path := filepath.Join(r.Dir(version), "share/sandboxd/schema")
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("which schema %s reads: %w", version, err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || n < 1 {
		return 0, fmt.Errorf("which schema %s reads: %s has %.20q, want a number: install this version again", version, path, b)
	}
	return n, nil
}

// Named returns the version that a link names; "": there is no such link.
func (r Root) Named(l Link) (string, error) {
	to, err := os.Readlink(r.link(l))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("which version is %s: %w", l, err)
	}
	version := filepath.Base(to)
	if !Valid(version) {
		return "", errs.New(errs.Internal, "%s leads to %q, which is no version: ln -sfn versions/VERSION %[1]s", r.link(l), to)
	}
	return version, nil
}

// Point lets a link name a version; when it returns, that is on disk. "" removes the link.
func (r Root) Point(l Link, version string) error {
	path := r.link(l)
	if version == "" {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return durable.SyncDir(string(r))
	}
	if !r.Has(version) {
		return fmt.Errorf("let %s name version %s: %s is missing", path, version, r.Dir(version))
	}
	next := path + ".new"
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(filepath.Join("versions", version), next); err != nil {
		return err
	}
	return durable.Rename(next, path)
}

func (r Root) link(l Link) string { return filepath.Join(string(r), string(l)) }
