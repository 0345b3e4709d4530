// Package durable writes small files that must not be half written, or empty, after a
// power cut: all of a file is on disk before it has its name.
package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Write writes b to path and replaces the old file. It writes to <path>.new and renames
// that; when it returns, file and name are on disk.
func Write(path string, b []byte, mode fs.FileMode) error {
	f, err := os.OpenFile(path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return Rename(path+".new", path)
}

// Rename is rename(2); when it returns, the new name is on disk.
// Preconditions: the content of from is on disk.
func Rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(to))
}

// SyncDir makes the names in dir durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
