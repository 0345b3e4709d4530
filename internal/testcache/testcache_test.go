package testcache

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
)

// A kept file opens as long as its content is what was written.
func TestKeep(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image.tar")
	if _, err := Open(path); err == nil {
		t.Error("a file that is not there was opened")
	}
	write := func(w io.Writer) error { _, err := fmt.Fprint(w, "a whole image"); return err }
	if err := Keep(path, write); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(f); err != nil || string(b) != "a whole image" {
		t.Errorf("it holds %q, %v", b, err)
	}
	f.Close()

	for name, damage := range map[string]func() error{
		"cut short":    func() error { return os.Truncate(path, 5) },
		"changed":      func() error { return os.WriteFile(path, []byte("b whole image"), 0o600) },
		"no digest":    func() error { return os.Remove(path + ".sha256") },
		"empty":        func() error { return os.Truncate(path, 0) },
		"not a digest": func() error { return os.WriteFile(path+".sha256", nil, 0o600) },
	} {
		if err := Keep(path, write); err != nil {
			t.Fatal(err)
		}
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(path); err == nil {
			t.Errorf("%s: it was opened", name)
		}
	}
	gone := errors.New("the export broke off")
	if err := Keep(path, func(w io.Writer) error { fmt.Fprint(w, "half"); return gone }); !errors.Is(err, gone) {
		t.Errorf("a write that failed: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".new-*")); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// A tree is filled once, and again when its content has changed.
func TestTree(t *testing.T) {
	path := filepath.Join(t.TempDir(), "venv")
	file := filepath.Join(path, "lib", "file")
	fills := 0
	fill := func(at string) error {
		fills++
		return errors.Join(os.Mkdir(filepath.Join(at, "lib"), 0o755), os.WriteFile(file, []byte("whole"), 0o600),
			os.Symlink("lib", filepath.Join(at, "link")))
	}
	use := func(what string, want int) {
		t.Helper()
		if err := Tree(path, fill); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(file); err != nil || string(b) != "whole" || fills != want {
			t.Errorf("%s: filled %d times, want %d; it holds %q, %v", what, fills, want, b, err)
		}
	}
	use("new", 1)
	use("again", 1)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(filepath.Join(path, "lib", "__pycache__"), 0o755))
	must(os.WriteFile(filepath.Join(path, "lib", "__pycache__", "x.pyc"), nil, 0o600))
	use("compiled", 1)
	must(os.WriteFile(file, []byte("Whole"), 0o600))
	use("changed", 2)
	must(os.Remove(filepath.Join(path, "link")))
	use("a link is gone", 3)
	must(os.WriteFile(filepath.Join(path, "more"), nil, 0o600))
	use("one file more", 4)
	must(os.Remove(path + ".sha256"))
	use("incomplete", 5)
	must(os.WriteFile(file, nil, 0o600))
	broken := errors.New("no network")
	if err := Tree(path, func(string) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("a fill that failed: %v", err)
	}
	use("after a fill that failed", 6)
}
