package diff

import (
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree/treetest"
	"golang.org/x/sys/unix"
)

// budget has room for the names of two directories of a crowd.
const budget = 250 * (tree.NameCost + 3)

// TestDiffHolds: a comparison counts the names of all directories that it is in, and
// no others.
func TestDiffHolds(t *testing.T) {
	for _, nested := range []bool{true, false} {
		changes := 0
		d := differ{
			ctx: t.Context(), held: tree.Names{Max: budget},
			hide: func(string) bool { return false }, emit: func(_, _ string) error { changes++; return nil },
		}
		fd, err := d.open(unix.AT_FDCWD, treetest.Crowd(t, nested))
		if err != nil {
			t.Fatal(err)
		}
		err = d.directory("", node{dir: true, own: true, upper: fd}, node{dir: true}, nil)
		d.closeFrom(0)
		if errs.Is(err, errs.Exhausted) != nested || !nested && (err != nil || changes != 303 || d.held.Bytes != 0) {
			t.Errorf("nested %v: %d changes, %d bytes held, %v", nested, changes, d.held.Bytes, err)
		}
	}
}
