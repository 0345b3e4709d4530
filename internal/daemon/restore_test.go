package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// TestDrillKilled: the next daemon removes the copy of the state that a drill left, also without a target.
func TestDrillKilled(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"drill-1/sandboxd.db", "drill-2/sandboxd.db", "blobs/1"} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.Mkdir(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	db, err := store.Open(filepath.Join(t.TempDir(), "sandboxd.db"), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	d := &Daemon{cfg: &config.Config{StateDir: dir}, log: slog.New(slog.DiscardHandler), store: db}
	if err := errors.Join(openBackups(d, ""), db.Close()); err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(dir + "/*"); err != nil || !slices.Equal(left, []string{dir + "/blobs"}) {
		t.Errorf("%q is left, %v", left, err)
	}
}

// TestKeptStates: each restore keeps the state before it, and of these the newest stay.
func TestKeptStates(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sandboxd.db")
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(path, "state 0")
	var all []string
	for i := range keptStates + 3 {
		write(path+".new", fmt.Sprint("state ", i+1))
		kept, err := exchange(path+".new", path)
		for errors.Is(err, fs.ErrExist) { // two within a millisecond: the second is refused
			kept, err = exchange(path+".new", path)
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, kept)
	}
	left, err := filepath.Glob(path + beforeRestore + "*")
	if err != nil || !slices.Equal(left, all[3:]) {
		t.Errorf("left are %q, %v", left, err)
	}
	for i, name := range left {
		if text, _ := os.ReadFile(name); string(text) != fmt.Sprint("state ", i+3) {
			t.Errorf("%s has %q", filepath.Base(name), text)
		}
	}
	if text, _ := os.ReadFile(path); !strings.HasSuffix(string(text), fmt.Sprint(keptStates+3)) {
		t.Errorf("the state is %q", text)
	}
}
