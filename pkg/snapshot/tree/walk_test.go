package tree

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/snapshot/tree/treetest"
	"golang.org/x/sys/unix"
)

// TestWalk counts every inode once, however many names are in a directory.
func TestWalk(t *testing.T) {
	dir := treetest.Crowd(t, true)
	many := filepath.Join(dir, "many")
	if err := os.Mkdir(many, 0o755); err != nil {
		t.Fatal(err)
	}
	for i := range 2*chunk + 1 {
		if err := os.Link(filepath.Join(dir, "z0", "000"), filepath.Join(many, fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	dirs, files := 0, 0
	err := Walk(t.Context(), dir, func(st *unix.Stat_t) {
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			dirs++
		} else {
			files++
		}
	})
	if err != nil || dirs != 5 || files != 300 {
		t.Errorf("%d directories, %d files, %v", dirs, files, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Walk(ctx, dir, func(*unix.Stat_t) {}); !errors.Is(err, context.Canceled) {
		t.Errorf("of nobody: %v", err)
	}
}
