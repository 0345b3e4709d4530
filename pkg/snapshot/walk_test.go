package snapshot

import (
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree/treetest"
	"golang.org/x/sys/unix"
)

// budget has room for two directories of a crowd.
const budget = 250 * (tree.NameCost + 3)

// TestDiffHolds: it counts the names of all directories that it is in, and no others.
func TestDiffHolds(t *testing.T) {
	for _, nested := range []bool{true, false} {
		told := 0
		d := differ{
			ctx: t.Context(), held: tree.Names{Max: budget},
			hide: func(string) bool { return false }, emit: func(_, _ string) error { told++; return nil },
		}
		fd, err := d.open(unix.AT_FDCWD, treetest.Crowd(t, nested))
		if err != nil {
			t.Fatal(err)
		}
		err = d.directory("", node{dir: true, own: true, upper: fd}, node{dir: true}, nil)
		d.closeFrom(0)
		if errs.Is(err, errs.Exhausted) != nested || !nested && (err != nil || told != 303 || d.held.Bytes != 0) {
			t.Errorf("nested %v: %d changes, %d bytes held, %v", nested, told, d.held.Bytes, err)
		}
	}
}

// TestDiffsAtOnce: who comes when there are enough is sent away.
func TestDiffsAtOnce(t *testing.T) {
	s := &Store{diffs: make(chan struct{}, 1), poolDir: t.TempDir()}
	none := func(string, string) error { return nil }
	s.diffs <- struct{}{}
	if err := s.Diff(t.Context(), "daaaaaaaaaaa", "", nil, nil, none); !errs.Is(err, errs.Unavailable) {
		t.Errorf("beside others: %v", err)
	}
	<-s.diffs
	for range 2 { // each gives its place back
		if err := s.Diff(t.Context(), "daaaaaaaaaaa", "", nil, nil, none); !errs.Is(err, errs.WrongState) {
			t.Errorf("alone: %v", err)
		}
	}
}
