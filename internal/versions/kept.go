package versions

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/durable"
)

// A package manager lets the link current name the version that it has unpacked, and removes the files of the one
// before, minutes before it lets that version be tried. For this time the scripts of the packages
// (tools/packages/scripts) have hard links of all other versions, and say which of them is to run:
//
//	ROOT/kept/1.1.0/{bin,libexec,share,systemd}
//	ROOT/kept/current                            1.1.0
//	ROOT/undo        ─▶ kept/1.1.0               so that the service's unit calls it before each start

func (r Root) kept() string { return filepath.Join(string(r), "kept") }

// Packaging reports whether a package manager is between the scripts of a package: it unpacks a version that no link
// and no list of its own names yet.
func (r Root) Packaging() (bool, error) {
	_, err := os.Lstat(r.kept())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Replaced returns the version that a package manager is replacing and that is to run until its scripts have come to an
// end; "": there is none.
func (r Root) Replaced() (string, error) {
	path := filepath.Join(r.kept(), "current")
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("which version a package manager is replacing: %w", err)
	}
	version := strings.TrimSpace(string(b))
	if !Valid(version) { // the scripts were cut short before anything was unpacked
		return "", nil
	}
	return version, nil
}

// Instead lets version run until the scripts have come to an end, if they are replacing undone: a change to that is
// being undone. It may be cut anywhere, and done again.
func (r Root) Instead(undone, version string) error {
	replaced, err := r.Replaced()
	if replaced != undone || err != nil {
		return err
	}
	path := filepath.Join(r.kept(), "current")
	_, err = os.Stat(filepath.Join(r.kept(), version))
	switch {
	case err == nil:
		err = durable.Write(path, []byte(version+"\n"), 0o644)
	case errors.Is(err, fs.ErrNotExist): // its package is the one that is unpacked
		if err = os.Remove(path); err == nil {
			err = durable.SyncDir(r.kept())
		}
	}
	if err != nil {
		return fmt.Errorf("let sandboxd %s, and not %s, run until a package manager has replaced it: %w", version, undone, err)
	}
	return nil
}

// PutBack lets the version that a package manager is replacing be whole, and the current one. It may be cut anywhere,
// and done again.
func (r Root) PutBack(version string) error {
	from, to := filepath.Join(r.kept(), version), r.Dir(version)
	err := filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if e.IsDir() {
			err = os.MkdirAll(filepath.Join(to, name), 0o755)
		} else if err = os.Link(path, filepath.Join(to, name)); errors.Is(err, fs.ErrExist) {
			err = nil
		}
		return err
	})
	if err == nil {
		_, err = os.Stat(r.Program(version, "sandboxd"))
	}
	if err == nil {
		err = r.sync()
	}
	if err == nil {
		err = r.Point(Current, version)
	}
	if err != nil {
		return fmt.Errorf("let sandboxd %s, which a package manager is replacing, run until its successor is tried: %w", version, err)
	}
	return nil
}

// sync writes the file system to the disk.
func (r Root) sync() error {
	f, err := os.Open(string(r))
	if err != nil {
		return err
	}
	defer f.Close()
	return os.NewSyscallError("syncfs", unix.Syncfs(int(f.Fd())))
}
