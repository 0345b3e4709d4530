package appliance

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// TestWork: the directory of an installation that was cut is removed by the next one; one in use
// and what is not a directory stay.
func TestWork(t *testing.T) {
	parent := t.TempDir()
	file, link := filepath.Join(parent, "sandboxd-install.file"), filepath.Join(parent, "sandboxd-install.link")
	target, cut := filepath.Join(parent, "other"), filepath.Join(parent, "sandboxd-install.1")
	err := errors.Join(os.MkdirAll(filepath.Join(cut, "bundle/images"), 0o755), os.MkdirAll(filepath.Join(target, "a"), 0o755),
		os.WriteFile(file, nil, 0o600), os.Symlink(target, link))
	if err != nil {
		t.Fatal(err)
	}
	used, remove, err := newWork(parent)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(cut); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory of one that was cut: %v", err)
	}
	other, removeOther, err := newWork(parent)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{used, other, file, link, filepath.Join(target, "a")} {
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(remove(), removeOther()); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) != 3 {
		t.Errorf("left %v, %v", left, err)
	}
}

// TestWorkAtOnce: of installations that begin at once, none loses its directory to another.
func TestWorkAtOnce(t *testing.T) {
	parent := t.TempDir()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 25 {
				dir, remove, err := newWork(parent)
				if err != nil {
					t.Error(err)
					return
				}
				if err := os.Mkdir(filepath.Join(dir, "a"), 0o700); err != nil {
					t.Error(err)
				}
				if err := remove(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}
