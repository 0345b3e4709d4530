package oci

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Write makes the bundle dir (0700) and puts spec into it as config.json
// (0600), whole or not at all. A second Write replaces the first.
func Write(dir string, spec *specs.Spec) error {
	b, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("encode spec of bundle %s: %w", dir, err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make bundle: %w", err)
	}
	return WriteFile(dir, "config.json", b, 0o600)
}

// SourceOf is what the bundle dir mounts at a path of the guest; "": nothing.
func SourceOf(dir, path string) (string, error) {
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return "", err
	}
	var spec specs.Spec
	if err := json.Unmarshal(b, &spec); err != nil {
		return "", fmt.Errorf("read the bundle %s: %w", dir, err)
	}
	for _, m := range spec.Mounts {
		if m.Destination == path {
			return m.Source, nil
		}
	}
	return "", nil
}

// WriteFile puts one more file into the bundle dir, either all of it or nothing: for
// example the resolv.conf that Config binds. A file that a guest reads needs mode 0644.
//
// It does not sync: a bundle is in /run and is lost at a reboot.
func WriteFile(dir, name string, data []byte, mode fs.FileMode) error {
	path := filepath.Join(dir, name)
	tmp := path + ".new"
	if err := os.WriteFile(tmp, data, mode); err != nil {
		return fmt.Errorf("write bundle file: %w", err)
	}
	// The mode must not depend on the umask or on a leftover file.
	if err := os.Chmod(tmp, mode); err != nil {
		return fmt.Errorf("write bundle file: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("write bundle file: %w", err)
	}
	return nil
}

// Remove removes the bundle dir and the files in it. It never descends: a root file
// system mounted below the bundle survives, and is an error. A missing bundle is no
// error.
func Remove(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove bundle: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			return fmt.Errorf("remove bundle %s: it contains the directory %s, which is not part of a bundle; if nothing uses the "+
				"directory, remove it by hand", dir, e.Name())
		}
	}
	for _, e := range entries {
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove bundle: %w", err)
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove bundle: %w", err)
	}
	return nil
}
