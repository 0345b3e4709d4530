// Package testcache keeps what tests take minutes to make (images, official clients,
// disks of virtual machines) between runs and for all checkouts of a user, in
// ${XDG_CACHE_HOME:-~/.cache}/sandboxd-test.
//
// An entry is named after the content it was made of, so nothing in the cache is ever
// out of date. An entry that is missing, incomplete or damaged is made again. The
// directory may be deleted at any time at which no test runs.
package testcache

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Dir returns the directory of one kind of entry ("images"). It makes the directory if
// it is absent.
func Dir(kind string) (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the directory of the test cache: %w", err)
	}
	dir := filepath.Join(base, "sandboxd-test", kind)
	return dir, os.MkdirAll(dir, 0o755)
}

// Digest is the SHA-256 of the parts one after the other, in hexadecimal digits.
func Digest(parts ...[]byte) string {
	h := sha256.New()
	for _, p := range parts {
		h.Write(p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Lock waits until no other process makes or checks the entry at path. Close unlocks it.
func Lock(path string) (io.Closer, error) {
	f, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Keep writes a file, and its digest beside it (path.sha256). A file without its
// digest is not whole.
func Keep(path string, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	h := sha256.New()
	if err := write(io.MultiWriter(f, h)); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Remove(path + ".sha256"); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return os.WriteFile(path+".sha256", []byte(hex.EncodeToString(h.Sum(nil))+"\n"), 0o600)
}

// Open opens a file that Keep wrote. It fails if the file's content no longer has its digest.
func Open(path string) (*os.File, error) {
	want, err := os.ReadFile(path + ".sha256")
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	h := sha256.New()
	if _, err := io.Copy(h, f); err == nil && hex.EncodeToString(h.Sum(nil)) == strings.TrimSpace(string(want)) {
		if _, err = f.Seek(0, io.SeekStart); err == nil {
			return f, nil
		}
	}
	f.Close()
	return nil, fmt.Errorf("%s is damaged: its content is not what %s.sha256 says", path, path)
}

// Tree makes the directory at path and has fill write its files. It makes the entry anew
// unless an earlier fill completed and every file still has the content that fill wrote.
// It ignores what Python compiles (__pycache__).
func Tree(path string, fill func(at string) error) error {
	lock, err := Lock(path)
	if err != nil {
		return err
	}
	defer lock.Close()
	note := path + ".sha256"
	if want, err := os.ReadFile(note); err == nil {
		if got, err := treeDigest(path); err == nil && got == string(want) {
			return nil
		}
	}
	if err := errors.Join(os.RemoveAll(note), os.RemoveAll(path), os.MkdirAll(path, 0o755)); err != nil {
		return err
	}
	if err := fill(path); err != nil {
		return err
	}
	sum, err := treeDigest(path)
	if err != nil {
		return err
	}
	return os.WriteFile(note, []byte(sum), 0o600)
}

// treeDigest is a digest of the names, targets and contents of all files below root.
func treeDigest(root string) (string, error) {
	h := sha256.New()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && d.Name() == "__pycache__":
			return filepath.SkipDir
		case d.IsDir():
			return nil
		}
		rel, _ := filepath.Rel(root, path)
		if d.Type()&fs.ModeSymlink != 0 {
			target, err := os.Readlink(path)
			fmt.Fprintf(h, "%q -> %q\n", rel, target)
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		n, err := io.Copy(h, f)
		fmt.Fprintf(h, "%q %d\n", rel, n)
		return err
	})
	return hex.EncodeToString(h.Sum(nil)), err
}
