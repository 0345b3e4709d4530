// Package treetest makes directory trees for the tests of package tree and of the
// packages that use it.
package treetest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// Crowd makes a tree of three directories with a hundred files each, named 000 to
// 099. If nested, each directory is in the one before it.
func Crowd(t testing.TB, nested bool) string {
	t.Helper()
	root := t.TempDir()
	in := root
	for n := range 3 {
		dir := filepath.Join(in, fmt.Sprintf("z%d", n))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for i := range 100 {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%03d", i)), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if nested {
			in = dir
		}
	}
	return root
}
